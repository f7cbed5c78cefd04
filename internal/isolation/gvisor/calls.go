package gvisor

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/walls"
	"casemate.dev/internal/linux/seccomp/filter"
)

// The Sentry tells of calls by a trace session (pkg/sentry/seccheck): records of the points that a session names, over a
// connection that runsc makes before the sandbox begins.

// The names that gVisor knows.
const (
	sessionName = "Default" // the only one that there may be
	sinkName    = "remote"
)

// Where runsc finds the session's configuration and the socket in the cell's own file system.
const (
	traceConfig = bundleDir + "/trace.json"
	traceSocket = rootDir + "/trace.sock"
)

// traceRetries is how often the Sentry tries to tell of a call while there is no room, at most 10 ms apart: as long, the
// caller waits. What it can't tell then it counts.
const traceRetries = 300

// lastPoint is the number of the last system call that the Sentry can tell of (pkg/sentry/seccheck/metadata_*.go).
const lastPoint = 441

// The parts of a session's configuration (runsc/boot/seccheck.go, pkg/sentry/seccheck/config.go).
type (
	initConfig struct {
		Session session `json:"trace_session"`
	}
	session struct {
		Name   string  `json:"name"`
		Points []point `json:"points"`
		Sinks  []sink  `json:"sinks"`
	}
	point struct {
		Name    string   `json:"name"`
		Context []string `json:"context_fields"`
	}
	sink struct {
		Name   string         `json:"name"`
		Config map[string]any `json:"config"`
	}
)

// traced adds what makes a runtime tell of calls.
func traced(c isolation.Calls, r *isolation.Runtime) error {
	if !c.Any() {
		return nil
	}
	s := session{Name: sessionName, Sinks: []sink{{
		Name: sinkName, Config: map[string]any{"endpoint": traceSocket, "retries": traceRetries},
	}}}
	for _, name := range points(runtime.GOARCH, c) {
		s.Points = append(s.Points, point{name, []string{"thread_id", "group_id", "process_name"}})
	}
	data, err := json.Marshal(initConfig{s})
	if err != nil {
		return fmt.Errorf("encode the trace session: %w", err)
	}
	r.Trace = traceSocket
	r.Files[traceConfig] = data
	return nil
}

// checkTraced fails where the sandbox's kernel has no session, though the runsc that started it has made the connection
// for one: what it can't set up it only says in a log that nobody reads.
func (i *Instance) checkTraced(ctx context.Context, c isolation.Calls) error {
	if !c.Any() {
		return nil
	}
	var list []session
	answer, err := i.ask(ctx, methodTraces, nil)
	if err == nil {
		err = json.Unmarshal(answer, &list)
	}
	if err != nil {
		return fmt.Errorf("ask for trace sessions: %w", err)
	}
	if len(list) != 1 || list[0].Name != sessionName || len(list[0].Sinks) != 1 || list[0].Sinks[0].Name != sinkName {
		return errs.New(errs.Unsupported, "the sandbox's kernel tells of no system calls: it has %d trace sessions", len(list)).
			WithHint("use the runsc that belongs to this server, or create the sandbox with --calls none")
	}
	return nil
}

// points names what a session is to tell of.
func points(arch string, c isolation.Calls) []string {
	var out []string
	has := func(call string) (number uint32, ok bool) {
		n, err := filter.Named(arch, call)
		return n.Number, err == nil
	}
	typed := func(calls ...string) {
		for _, call := range calls {
			if _, ok := has(call); ok {
				out = append(out, "syscall/"+call+"/enter")
			}
		}
	}
	raw := func(call, when string) {
		if n, ok := has(call); ok && n <= lastPoint {
			out = append(out, "syscall/sysno/"+strconv.Itoa(int(n))+"/"+when)
		}
	}
	if c.Exec {
		// The raw record comes first and has the mark, which the other has not.
		for _, call := range []string{"execve", "execveat"} {
			raw(call, "enter")
			typed(call)
		}
	}
	if c.Connect {
		typed("connect")
	}
	if c.Open {
		typed("open", "openat", "creat")
		raw("openat2", "enter") // of which there is no other record
	}
	if c.Attempts {
		for _, call := range walls.TellingCalls() {
			if !slices.Contains(unseen(), call) {
				raw(call, "exit")
			}
		}
	}
	return out
}

// unseen names calls that may tell of an attempt, and are made so often for other reasons that telling of each would cost
// every program.
func unseen() []string { return []string{"ioctl"} }

// newMark returns a mark for what a guest executes. Whoever knew it could execute unseen, so no other guest's is the
// same.
func newMark() uint64 {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand.Read
	return binary.LittleEndian.Uint64(random[:]) | 1
}

// coverage says what differs from a cell that is none: its calls are told of by the kernel that answers them, afterwards.
func coverage(calls map[string]string) map[string]string {
	const recorded = "recorded"
	out := maps.Clone(calls)
	if strings.HasPrefix(out["attempts"], recorded) {
		out["attempts"] = "recorded by its own kernel once answered, but for ioctl and calls above " + strconv.Itoa(lastPoint)
	}
	for kind, text := range out {
		if strings.HasPrefix(text, "lost") {
			out[kind] = "lost: nobody hears of these calls any more, and they go on"
		}
	}
	return out
}

// Observes implements isolation.Observer.
func (b *Backend) Observes() isolation.Calls {
	if o, ok := b.cells.(isolation.Observer); ok {
		return o.Observes()
	}
	return isolation.Calls{}
}

// EndedBy implements isolation.Observer.
func (b *Backend) EndedBy(ctx context.Context, id string) string {
	if o, ok := b.cells.(isolation.Observer); ok {
		return o.EndedBy(ctx, id)
	}
	return ""
}

// Held implements isolation.Holder. It says what is to be: the keeper can't let the Sentry's processes stand still, so
// the server does, when it hears of the attempt.
func (i *Instance) Held(ctx context.Context) bool {
	h, ok := i.Cell.(isolation.Holder)
	return ok && h.Held(ctx)
}

// Release implements isolation.Holder.
func (i *Instance) Release(ctx context.Context) error {
	if h, ok := i.Cell.(isolation.Holder); ok {
		return h.Release(ctx)
	}
	return nil
}
