package sandbox

import (
	"context"
	"slices"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
)

// Recording says how much content the journal keeps of what happens in a sandbox, beside the facts and the salted hashes
// in its events. Each includes those before it.
type Recording string

// The levels.
const (
	// RecordHashes keeps no content. Programs' arguments are kept with the processes nevertheless, as long as these are.
	RecordHashes Recording = "hashes"
	// RecordContent keeps arguments, code, what was written to programs, what they and code said, and the inspected
	// requests of the sandbox with their answers. It is the default.
	RecordContent Recording = "content"
	// RecordAll keeps also the files that were read and written through the API.
	RecordAll Recording = "all"
)

// rank orders levels; what a sandbox of an older version has is the default.
func (r Recording) rank() int {
	switch r {
	case RecordHashes:
		return 0
	case RecordAll:
		return 2
	}
	return 1
}

// keeps reports whether content is kept that is kept from a level on.
func (r Recording) keeps(from Recording) bool { return r.rank() >= from.rank() }

func (c *checker) recording(r Recording) {
	c.that(r == "" || r == RecordHashes || r == RecordContent || r == RecordAll, "use hashes, content or all", "record is %s", quote(string(r)))
}

// keeper returns a keeper for content that is kept from a level on, and whose hash is kept in any case.
func (b *box) keeper(from Recording) *journal.Keeper {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.keeperLocked(from)
}

func (b *box) keeperLocked(from Recording) *journal.Keeper {
	return journal.NewKeeper(b.sb.Spec.Record.keeps(from))
}

// keeping adds content to an event, kept from a level on.
func (b *box) keeping(from Recording, e journal.Event, o journal.Observer, name string, content []byte) journal.Event {
	k := b.keeper(from)
	_, _ = k.Write(content) // never fails
	return e.WithKept(o, name, k)
}

// transcript is what a process or run said, as it passed on its way to a caller or was asked for at the end. It is not safe
// for concurrent use.
type transcript struct {
	b      *box
	kept   map[string]*journal.Keeper
	order  []string
	missed int64 // bytes, or items, that had been dropped before they were seen
}

func newTranscript(b *box) *transcript {
	return &transcript{b: b, kept: make(map[string]*journal.Keeper)}
}

func (h *transcript) write(name string, data []byte) {
	k := h.kept[name]
	if k == nil {
		k = h.b.keeper(RecordContent)
		h.kept[name] = k
		h.order = append(h.order, name)
	}
	_, _ = k.Write(data) // never fails
}

// onto adds what was heard to the event that tells of the end.
//
//casemate:fact guest process.ended,run.ended stdout body
//casemate:fact guest process.ended,run.ended stderr body
//casemate:fact guest process.ended terminal body
//casemate:fact guest run.ended results body results and errors, as lines of JSON
func (h *transcript) onto(e journal.Event) journal.Event {
	for _, name := range h.order {
		e = e.WithKept(journal.Guest, name, h.kept[name])
	}
	return e
}

// Output implements OutputSink.
func (h *transcript) Output(s Stream, _ int64, data []byte) error {
	switch s {
	case Stdout:
		h.write("stdout", data)
	case Stderr:
		h.write("stderr", data)
	case TTY:
		h.write("terminal", data)
	}
	return nil
}

// Gap implements OutputSink.
func (h *transcript) Gap(g Gap) error {
	h.missed += g.To - g.From
	return nil
}

// item takes one of a run. Results and errors become lines of JSON.
func (h *transcript) item(i guestwire.RunItem) {
	switch i.Kind {
	case ItemStdout:
		h.write("stdout", i.Data)
	case ItemStderr:
		h.write("stderr", i.Data)
	case ItemResult, ItemError:
		what := `{"result":`
		if i.Kind == ItemError {
			what = `{"error":`
		}
		h.write("results", append(append([]byte(what), i.Data...), "}\n"...))
	case 0:
		h.missed += i.Gap
	}
}

// hearing is an OutputSink that hears what passes.
type hearing struct {
	OutputSink
	h *transcript
}

// Output implements OutputSink.
func (t hearing) Output(s Stream, offset int64, data []byte) error {
	_ = t.h.Output(s, offset, data) // never fails
	return t.OutputSink.Output(s, offset, data)
}

// Gap implements OutputSink.
func (t hearing) Gap(g Gap) error {
	_ = t.h.Gap(g) // never fails
	return t.OutputSink.Gap(g)
}

// saidBy returns what a process that has ended said, as the guest still holds it; nil where it does not tell.
func (m *Manager) saidBy(pr *proc) *transcript {
	ctx, cancel := m.detached(m.ctx, pr.box.guest)
	defer cancel()
	stream, err := pr.box.guest.Output(ctx, guestwire.OutputRequest{ID: pr.id})
	if err != nil {
		return nil
	}
	defer stream.Close()
	h := newTranscript(pr.box)
	if pump(stream, h) != nil {
		return nil
	}
	return h
}

// saidByRun is saidBy for a run of code.
func (m *Manager) saidByRun(r *codeRun) *transcript {
	ctx, cancel := m.detached(m.ctx, r.c.box.guest)
	defer cancel()
	stream, err := r.c.box.guest.Items(ctx, guestwire.ItemsRequest{Context: r.c.id, Run: r.id})
	if err != nil {
		return nil
	}
	defer stream.Close()
	h := newTranscript(r.c.box)
	if pumpItems(stream, deafSink{}, h) != nil {
		return nil
	}
	return h
}

// give notes what a process is given right at its start, for the event that tells of that.
func (pr *proc) give(input []byte) {
	pr.box.mu.Lock()
	defer pr.box.mu.Unlock()
	pr.input = input
}

// given returns what give was told; nil: nothing.
func (pr *proc) given() []byte {
	pr.box.mu.Lock()
	defer pr.box.mu.Unlock()
	return pr.input
}

// Redact erases content that an event of a sandbox speaks of, none: all of it, and records that. A process's arguments
// go from what is told of the process as well. Kinds: PermissionDenied (a sandbox that calls back), NotFound.
func (m *Manager) Redact(ctx context.Context, p Principal, ref string, r journal.Redaction) (journal.Event, error) {
	if p.Sandbox != "" || p.Inside {
		return journal.Event{}, errs.New(errs.PermissionDenied, "a sandbox can't have its own record redacted")
	}
	var err error
	if r.Sandbox, err = m.known(ctx, p, ref); err != nil {
		return journal.Event{}, err
	}
	r.Actor = p.ID
	return m.journal.Redact(ctx, r, func(process string, names []string) []store.Write {
		// kernel.argv is of what the process executed itself.
		if process == "" || !slices.Contains(names, "server.argv") && !slices.Contains(names, "guest.argv") {
			return nil
		}
		return m.forgetArguments(r.Sandbox, process)
	})
}

// forgetArguments takes a process's arguments out of what is told of it. The process may end meanwhile: its end brings
// back none of them, and this takes no end away.
func (m *Manager) forgetArguments(sandboxID, processID string) []store.Write {
	const gone = "[redacted]"
	if b := m.find(sandboxID); b != nil {
		if pr := b.proc(processID); pr != nil {
			pr.forget([]string{gone})
		}
	}
	return []store.Write{store.ReplaceInProcess(sandboxID, processID, "$.Argv", `["`+gone+`"]`)}
}

// forget puts other arguments in the place of a process's. Where its end is being recorded, that is waited for.
func (pr *proc) forget(argv []string) {
	pr.box.mu.Lock()
	defer pr.box.mu.Unlock()
	if pr.finishing {
		pr.box.mu.Unlock()
		<-pr.ended
		pr.box.mu.Lock()
	}
	pr.info.Argv = argv
}

// ReadBody returns content that an event of a sandbox speaks of.
func (m *Manager) ReadBody(ctx context.Context, p Principal, ref string, event uint64, name string) (journal.Body, error) {
	sandboxID, err := m.known(ctx, p, ref)
	if err != nil {
		return journal.Body{}, err
	}
	return m.journal.ReadBody(ctx, sandboxID, event, name)
}
