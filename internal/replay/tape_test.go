package replay

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"casemate.dev/internal/journal/bundle"
)

// tape makes a record event by event.
type tape struct {
	t   testing.TB
	r   *Record
	now time.Time

	asked int // connections so far
}

type object = map[string]any

// newTape begins the record of a sandbox that was made at a time.
func newTape(t testing.TB, sandbox string, at time.Time, settings object) *tape {
	w := &tape{t: t, r: &Record{}, now: at}
	made := object{"template": "base", "profile": "locked", "isolation": "namespace", "file_changes": "full", "record": "content"}
	for k, v := range settings {
		made[k] = v
	}
	w.event(sandbox, "sandbox.created", "", object{"server": made})
	w.event(sandbox, "sandbox.claimed", "", object{"server": object{"name": sandbox + "-host"}})
	return w
}

func (w *tape) event(sandbox, kind, process string, facts object, bodies ...bundle.Body) {
	w.now = w.now.Add(10 * time.Millisecond)
	raw, err := json.Marshal(object{"sandbox": sandbox, "seq": w.r.last + 1, "time": w.now, "type": kind, "process": process, "facts": facts})
	if err != nil {
		w.t.Fatal(err)
	}
	w.r.Add(raw, bodies)
}

func (w *tape) add(kind, process string, facts object, bodies ...bundle.Body) {
	w.event(w.r.Sandbox, kind, process, facts, bodies...)
}

// put makes a body with what stands for it among facts.
func put(name string, data []byte) (bundle.Ref, bundle.Body) {
	return bundle.Ref{Body: "h", Bytes: int64(len(data))}, bundle.Body{Name: name, Data: data}
}

// ran is a process that ran.
type ran struct {
	id      string
	argv    []string
	pid     int
	stdin   string
	out     string
	err     string
	code    int
	end     string // "": exited
	files   []object
	hashes  []string // of what they hold; nil: not in the record
	unknown bool     // which files changed
	took    time.Duration
	more    object // facts of its start
}

// start tells of the start of a process.
func (w *tape) start(p ran) {
	argv, err := json.Marshal(p.argv)
	if err != nil {
		w.t.Fatal(err)
	}
	ref, body := put("server.argv", argv)
	server := object{"argv": ref}
	bodies := []bundle.Body{body}
	if p.stdin != "" {
		ref, body := put("server.stdin", []byte(p.stdin))
		server["stdin"], bodies = ref, append(bodies, body)
	}
	for k, v := range p.more {
		server[k] = v
	}
	w.add("process.started", p.id, object{"server": server, "guest": object{"pid": p.pid}}, bodies...)
}

func (w *tape) end(p ran) {
	w.now = w.now.Add(p.took)
	guest := object{"end": "exited", "code": p.code}
	if p.end != "" {
		guest = object{"end": p.end}
	}
	var bodies []bundle.Body
	for name, text := range map[string]string{"stdout": p.out, "stderr": p.err} {
		if text != "" {
			ref, body := put("guest."+name, []byte(text))
			guest[name], bodies = ref, append(bodies, body)
		}
	}
	w.add("process.ended", p.id, object{"guest": guest}, bodies...)
	if !p.unknown {
		count := map[string]int{}
		for _, f := range p.files {
			count[fmt.Sprint(f["op"])]++
		}
		server := object{
			"files": p.files, "created": count["created"], "modified": count["modified"], "deleted": count["deleted"], "renamed": count["renamed"],
		}
		bodies = nil
		if p.hashes != nil {
			text, err := json.Marshal(p.hashes)
			if err != nil {
				w.t.Fatal(err)
			}
			ref, body := put("server.hashes", text)
			server["hashes"], bodies = ref, []bundle.Body{body}
		}
		w.add("files.changed", p.id, object{"server": server}, bodies...)
	}
}

func (w *tape) run(p ran) {
	w.start(p)
	w.end(p)
}

// code is a run of code that said nothing.
func (w *tape) code(id, context, text string, more object) {
	ref, body := put("server.code", []byte(text))
	server := object{"run": id, "context": context, "language": "python", "code": ref}
	for k, v := range more {
		server[k] = v
	}
	w.add("run.started", "", object{"server": server}, body)
	w.add("run.ended", "", object{"server": object{"run": id, "context": context}, "guest": object{"end": "completed"}})
	w.add("files.changed", "", object{"server": object{"run": id}})
}

// Times at which the recorded sandbox was made, and those of the runs.
func madeAt() (record, first, second time.Time) {
	record = time.Date(2026, 3, 9, 11, 58, 30, 0, time.UTC)
	return record, record.Add(50 * time.Hour), record.Add(51 * time.Hour)
}

// again begins the record of a sandbox in which a run of another one was made.
func again(t testing.TB, of string, run int, settings object) *tape {
	_, first, second := madeAt()
	at := first
	if run > 1 {
		at = second
	}
	made := object{"labels": map[string]string{LabelOf: of, LabelRun: fmt.Sprint(run)}}
	for k, v := range settings {
		made[k] = v
	}
	return newTape(t, fmt.Sprintf("again%d", run), at, made)
}

// recorded begins the record that is held against others.
func recorded(t testing.TB, settings object) *tape {
	at, _, _ := madeAt()
	return newTape(t, "web", at, settings)
}
