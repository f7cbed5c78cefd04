package journal

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/journal/tree"
	"casemate.dev/internal/store"
)

// PublicKey is the key that checkpoints are verified with; "" without proofs.
func (l *Log) PublicKey() string { return l.key.public }

// Export writes the bundle of a sandbox's events (package bundle) as the log is now, with proofs that it
// began with each of heads. FailedPrecondition: a head does not fit, so that the log was cut or rewritten
// since it was given out, or the head is another's; NotFound: the sandbox has no events.
func (l *Log) Export(ctx context.Context, sandbox string, heads [][]byte, w io.Writer) error {
	if l.tree == nil {
		return errs.New(errs.Unsupported, "this journal is kept without proofs")
	}
	_ = l.db.Flush() // as in Events
	v, err := l.tree.View()
	if err != nil {
		return err
	}
	x := exporter{l: l, ctx: ctx, sandbox: sandbox, view: v, out: bufio.NewWriterSize(w, 64<<10)}
	if err := x.find(); err != nil {
		return err
	}
	if err := x.begin(heads); err != nil {
		return err
	}
	if err := x.events(); err != nil {
		return err
	}
	if err := x.seal(); err != nil {
		return err
	}
	return x.out.Flush()
}

type exporter struct {
	l       *Log
	ctx     context.Context //nolint:containedctx // of one call
	sandbox string
	view    *tree.View
	out     *bufio.Writer
	leaves  []place
}

// place is where an event lies in the log.
type place struct {
	leaf int64
	tree.Record
}

// find looks the sandbox's leaves up.
func (x *exporter) find() error {
	err := x.view.Records(0, func(at int64, r tree.Record) bool {
		if r.Stream == x.sandbox {
			x.leaves = append(x.leaves, place{at, r})
		}
		return at%4096 != 0 || x.ctx.Err() == nil
	})
	if err == nil {
		err = x.ctx.Err()
	}
	if err == nil && len(x.leaves) == 0 {
		err = errs.New(errs.NotFound, "there are no events of %s", x.sandbox)
	}
	return err
}

func (x *exporter) begin(heads [][]byte) error {
	origin := x.view.Head.Origin
	lines := []bundle.Line{
		{Bundle: &bundle.Header{Version: bundle.Version, Origin: origin, Sandbox: x.sandbox, Key: x.l.key.public}},
		{Checkpoint: string(x.view.Checkpoint)},
	}
	for _, text := range heads {
		h, err := tree.ParseCheckpoint(text, x.l.key.verifier)
		switch {
		case err != nil:
			return errs.New(errs.FailedPrecondition, "a head is not signed with this server's key").WithHint("it may be another server's, or from before the key was replaced")
		case h.Size > x.view.Head.Size:
			return errs.New(errs.FailedPrecondition, "the journal was cut: a head of %d entries was given out, and the log has %d", h.Size, x.view.Head.Size)
		case h.Size == 0:
			continue
		}
		p, err := x.view.ProvePrefix(h.Size)
		if err != nil {
			return err
		}
		if tree.CheckPrefix(x.view.Head, h, p) != nil {
			return errs.New(errs.FailedPrecondition, "the journal was rewritten: its first %d entries are not those of a head that was given out", h.Size)
		}
		lines = append(lines, bundle.Line{Head: string(text), Proof: p})
	}
	for _, line := range lines {
		if err := line.Write(x.out); err != nil {
			return err
		}
	}
	return nil
}

// events writes every event with its proof and its bodies, a page at a time.
func (x *exporter) events() error {
	const page = 200
	for from := 0; from < len(x.leaves); from += page {
		part := x.leaves[from:min(from+page, len(x.leaves))]
		first, last := part[0].Seq, part[len(part)-1].Seq
		rows, err := x.l.db.EventsAfter(x.ctx, x.sandbox, first-1, int(last-first)+1) //nolint:gosec // at most a page
		if err != nil {
			return fmt.Errorf("read events: %w", err)
		}
		bySeq := make(map[uint64]store.Event, len(rows))
		for _, r := range rows {
			bySeq[r.Seq] = r
		}
		for _, p := range part {
			row, there := bySeq[p.Seq]
			if err := x.event(p, row, there); err != nil {
				return err
			}
		}
	}
	return nil
}

func (x *exporter) event(p place, row store.Event, there bool) error {
	proof, err := x.view.Prove(p.leaf)
	if err != nil {
		return err
	}
	out := bundle.Line{Leaf: &p.leaf, Proof: proof}
	if !there {
		out.Lost = &bundle.Lost{Seq: p.Seq, Hash: p.Hash}
		return out.Write(x.out)
	}
	e, err := ofRow(row)
	if err != nil {
		return err
	}
	row.Facts = encode(e.Facts)
	out.Event = json.RawMessage(line(row))
	if err := out.Write(x.out); err != nil {
		return err
	}
	bodies, err := x.l.db.BodiesOf(x.ctx, x.sandbox, p.Seq, p.Seq, MaxBody)
	if err != nil {
		return fmt.Errorf("read bodies: %w", err)
	}
	for _, b := range bodies {
		if len(b.Data) == 0 {
			continue // only its salt is kept
		}
		if err := (bundle.Line{Body: &bundle.Body{Seq: b.Seq, Name: b.Name, Salt: b.Salt, Data: b.Data}}).Write(x.out); err != nil {
			return err
		}
	}
	return nil
}

func (x *exporter) seal() error {
	imported, err := x.l.imported(x.ctx)
	if err != nil {
		return err
	}
	h := x.view.Head
	text, err := bundle.Seal{
		Origin: h.Origin, Sandbox: x.sandbox, Last: x.leaves[len(x.leaves)-1].Seq, Size: h.Size, Root: h.Root, Imported: imported,
	}.Sign(x.l.key.signer)
	if err != nil {
		return fmt.Errorf("sign bundle: %w", err)
	}
	return bundle.Line{Seal: text}.Write(x.out)
}

// imported is how many events the log's beginning holds that are older than it.
func (l *Log) imported(ctx context.Context) (int64, error) {
	rows, err := l.db.EventsOfTypes(ctx, ServerStream, []string{string(JournalBegun)}, 0, pageSize)
	if err != nil {
		return 0, fmt.Errorf("read the journal's beginning: %w", err)
	}
	var f begunFacts
	for _, row := range rows { // the newest counts
		e, err := ofRow(row)
		if err != nil {
			return 0, err
		}
		f = begunFacts{}
		if err := json.Unmarshal(e.Facts[Server], &f); err != nil {
			return 0, fmt.Errorf("read the journal's beginning: %w", err)
		}
	}
	return f.Imported, nil
}
