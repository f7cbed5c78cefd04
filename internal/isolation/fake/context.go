package fake

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// interpreters are the code contexts of a machine. Their language, whatever they are told to speak, has
// one command per line:
//
//	print TEXT     warn TEXT      stdout, stderr
//	show TEXT      get NAME       a result; a variable as the main one
//	set NAME TEXT                 a variable
//	raise NAME TEXT               an error, which ends the run
//	sleep MS       stubborn       what an interrupt ends; what only a kill does
//	await NAME                    until a context of the machine has the variable
//	die SIGNAL                    the interpreter ends
//	line JSON                     a result item as it is, for drivers that lie
//	1+1                           2
//
// Beside that it knows the Python that the API's documents show (see python).
type interpreters struct {
	// mu guards everything of all of them.
	mu    sync.Mutex
	byID  map[string]*interpreter
	order []*interpreter
	// set is closed and replaced when a variable is set; nil where nobody has waited for one.
	set chan struct{}
}

type interpreter struct {
	all       *interpreters
	info      guestwire.ContextInfo
	variables map[string]string
	runs      map[string]*codeRun
	order     []*codeRun
	queue     []*codeRun
	current   *codeRun
	changed   chan struct{}
}

type codeRun struct {
	info      guestwire.RunInfo
	code      string
	timeout   time.Duration
	items     []codeItem
	changed   chan struct{}
	interrupt chan struct{}
	killed    chan struct{}
	cause     guestwire.RunEnd
	raised    bool
}

type codeItem struct {
	kind guestwire.ItemKind
	data []byte
}

func (m *machine) answerContext(c *guestwire.Conn, call guestwire.Call) error {
	s := &m.codes
	switch call.Method {
	case guestwire.MethodContextCreate:
		return reply(c, call, func(r guestwire.CreateContext) (any, error) { return s.create(r) })
	case guestwire.MethodContextFork:
		r, err := decode[guestwire.ForkContexts](call)
		if err != nil {
			return err
		}
		return list(c, s.fork(r))
	case guestwire.MethodContextDrop:
		r, err := decode[guestwire.ContextRefs](call)
		if err != nil {
			return err
		}
		for _, id := range r.IDs {
			_ = s.remove(id) // what is not known is passed over
		}
		return c.End(nil)
	case guestwire.MethodContextRun:
		return s.run(c, call)
	case guestwire.MethodContextItems:
		return s.follow(c, call)
	case guestwire.MethodContextList:
		s.mu.Lock()
		var infos []guestwire.ContextInfo
		for _, i := range s.order {
			infos = append(infos, i.told())
		}
		s.mu.Unlock()
		return list(c, infos)
	case guestwire.MethodContextRuns:
		r, err := decode[guestwire.ContextRef](call)
		if err != nil {
			return err
		}
		i, err := s.get(r.ID)
		if err != nil {
			return err
		}
		s.mu.Lock()
		var infos []guestwire.RunInfo
		for _, r := range i.order {
			infos = append(infos, r.told())
		}
		s.mu.Unlock()
		return list(c, infos)
	}
	return s.steer(c, call)
}

func list[T any](c *guestwire.Conn, all []T) error {
	for _, v := range all {
		if err := c.Event(v); err != nil {
			return err
		}
	}
	return c.End(nil)
}

// steer answers what is said about one context.
func (s *interpreters) steer(c *guestwire.Conn, call guestwire.Call) error {
	switch call.Method {
	case guestwire.MethodContextWait:
		return reply(c, call, func(r guestwire.WaitContext) (any, error) {
			i, err := s.get(r.ID)
			if err != nil {
				return nil, err
			}
			return await(s, &i.changed, func() (guestwire.ContextInfo, bool) {
				return i.told(), i.info.Starts != r.Starts || i.info.State == guestwire.ContextEnded
			}), nil
		})
	case guestwire.MethodContextRunWait:
		return reply(c, call, func(r guestwire.RunRef) (any, error) {
			run, err := s.find(r.Context, r.Run)
			if err != nil {
				return nil, err
			}
			return await(s, &run.changed, func() (guestwire.RunInfo, bool) { return run.told(), run.info.End != "" }), nil
		})
	case guestwire.MethodContextInterrupt:
		return reply(c, call, func(r guestwire.RunRef) (any, error) { return s.interrupt(r) })
	case guestwire.MethodContextRestart:
		return reply(c, call, func(r guestwire.ContextRef) (any, error) { return s.restart(r.ID) })
	case guestwire.MethodContextDelete:
		return reply(c, call, func(r guestwire.ContextRef) (any, error) { return nil, s.remove(r.ID) })
	}
	return errs.New(errs.Unsupported, "the fake knows no method %s", call.Method)
}

// await returns what look gives once it says so.
func await[T any](s *interpreters, changed *chan struct{}, look func() (T, bool)) T {
	for {
		s.mu.Lock()
		v, ok := look()
		news := *changed
		s.mu.Unlock()
		if ok {
			return v
		}
		<-news
	}
}

func (s *interpreters) create(r guestwire.CreateContext) (guestwire.ContextInfo, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := s.byID[r.ID]; i != nil {
		info := i.told()
		info.Attached = true
		return info, nil
	}
	return s.make(r, false), nil
}

func (s *interpreters) fork(r guestwire.ForkContexts) []guestwire.Forked {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []guestwire.Forked
	for _, id := range r.IDs {
		word := guestwire.Forked{ID: id}
		if s.byID[r.Zygote] == nil {
			f := guestwire.FailureOf(errs.New(errs.NotFound, "no such context: %q", r.Zygote))
			word.Failed = &f
		} else {
			word.Info = s.make(guestwire.CreateContext{ID: id, Language: "python"}, true)
		}
		all = append(all, word)
	}
	return all
}

// make adds an interpreter; mu is held.
func (s *interpreters) make(r guestwire.CreateContext, fork bool) guestwire.ContextInfo {
	now, dir := time.Now().UnixNano(), r.Dir
	if dir == "" {
		dir = "/home/user"
	}
	i := &interpreter{
		all: s, variables: map[string]string{}, runs: map[string]*codeRun{}, changed: make(chan struct{}),
		info: guestwire.ContextInfo{
			ID: r.ID, Language: r.Language, Version: "fake", Dir: dir, User: "user", PID: 7,
			State: guestwire.ContextIdle, Created: now, Started: now, Starts: 1, Zygote: r.Zygote, Fork: fork,
		},
	}
	if s.byID == nil {
		s.byID = map[string]*interpreter{}
	}
	s.byID[r.ID] = i
	s.order = append(s.order, i)
	return i.told()
}

func (s *interpreters) get(id string) (*interpreter, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := s.byID[id]; i != nil {
		return i, nil
	}
	return nil, errs.New(errs.NotFound, "no such context: %q", id)
}

func (s *interpreters) find(context, run string) (*codeRun, error) {
	i, err := s.get(context)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := i.runs[run]; r != nil {
		return r, nil
	}
	return nil, errs.New(errs.NotFound, "no such run: %q", run)
}

func (i *interpreter) told() guestwire.ContextInfo {
	info := i.info
	info.Queued = len(i.queue)
	if i.current != nil {
		info.State, info.Run = guestwire.ContextBusy, i.current.info.ID
	}
	return info
}

func (r *codeRun) told() guestwire.RunInfo {
	info := r.info
	info.Items = int64(len(r.items))
	return info
}

func wake(c *chan struct{}) {
	close(*c)
	*c = make(chan struct{})
}

func (s *interpreters) run(c *guestwire.Conn, call guestwire.Call) error {
	q, err := decode[guestwire.RunCode](call)
	if err != nil {
		return err
	}
	code, err := c.ReadText(guestwire.MaxCode)
	if err != nil {
		return err
	}
	i, err := s.get(q.Context)
	if err != nil {
		return err
	}
	s.mu.Lock()
	r, attached := i.runs[q.ID], true
	if r == nil {
		if i.info.State == guestwire.ContextEnded {
			s.mu.Unlock()
			return errs.New(errs.FailedPrecondition, "the interpreter of context %q has ended", q.Context)
		}
		attached = false
		r = &codeRun{
			code: code, timeout: time.Duration(q.TimeoutMS) * time.Millisecond,
			changed: make(chan struct{}), interrupt: make(chan struct{}, 1), killed: make(chan struct{}),
			info: guestwire.RunInfo{ID: q.ID, Context: q.Context, Queued: time.Now().UnixNano()},
		}
		i.runs[q.ID], i.order, i.queue = r, append(i.order, r), append(i.queue, r)
		i.info.Runs++
		i.nextLocked()
	}
	info := r.told()
	info.Attached = attached
	s.mu.Unlock()
	if err := c.Reply(info); err != nil {
		return err
	}
	return s.send(c, r, q.Items)
}

func (s *interpreters) follow(c *guestwire.Conn, call guestwire.Call) error {
	q, err := decode[guestwire.ItemsRequest](call)
	if err != nil {
		return err
	}
	r, err := s.find(q.Context, q.Run)
	if err != nil {
		return err
	}
	return s.send(c, r, q)
}

func (s *interpreters) send(c *guestwire.Conn, r *codeRun, q guestwire.ItemsRequest) error {
	for next := q.Offset; ; {
		s.mu.Lock()
		var items []codeItem
		if next < int64(len(r.items)) {
			items = slices.Clone(r.items[next:])
		}
		news, info := r.changed, r.told()
		s.mu.Unlock()
		for _, it := range items {
			if err := c.Item(it.kind, next, it.data); err != nil {
				return nil
			}
			next++
		}
		if len(items) > 0 {
			continue
		}
		if info.End != "" || !q.Follow {
			return c.End(info)
		}
		<-news
	}
}

// nextLocked lets the next run begin.
func (i *interpreter) nextLocked() {
	if i.current != nil || len(i.queue) == 0 || i.info.State == guestwire.ContextEnded {
		return
	}
	r := i.queue[0]
	i.queue = i.queue[1:]
	i.current = r
	r.info.Began = time.Now().UnixNano()
	if r.timeout > 0 {
		time.AfterFunc(r.timeout, func() {
			i.all.mu.Lock()
			defer i.all.mu.Unlock()
			if i.current == r {
				r.cause = guestwire.RunTimedOut
				r.stop()
			}
		})
	}
	go i.execute(r)
}

func (r *codeRun) stop() {
	select {
	case r.interrupt <- struct{}{}:
	default:
	}
}

func (i *interpreter) execute(r *codeRun) {
	for line := range strings.Lines(r.code) {
		if line = strings.TrimSpace(line); !i.python(r, line) && !i.line(r, line) {
			break
		}
	}
	i.all.mu.Lock()
	defer i.all.mu.Unlock()
	if r.info.End != "" {
		return
	}
	r.info.Count = int64(len(i.order))
	end := guestwire.RunCompleted
	switch {
	case r.cause != "":
		end = r.cause
	case r.raised:
		end = guestwire.RunFailed
	}
	i.endLocked(r, end)
	i.nextLocked()
}

func (i *interpreter) endLocked(r *codeRun, end guestwire.RunEnd) {
	if r.info.End != "" {
		return
	}
	r.info.End, r.info.Ended = end, time.Now().UnixNano()
	if i.current == r {
		i.current = nil
	}
	close(r.killed)
	wake(&r.changed)
}

// python executes a line of the few forms of Python that are known, and reports whether it was one:
// assignments, print of a text, a variable plus a number, os.getcwd() and a loop over range.
func (i *interpreter) python(r *codeRun, line string) bool {
	var n int
	if c, err := fmt.Sscanf(line, "for i in range(%d): print(i)", &n); c == 1 && err == nil {
		for k := range n {
			i.say(r, guestwire.ItemStdout, fmt.Sprintln(k))
		}
		return true
	}
	parts := strings.Split(line, "; ")
	for _, part := range parts {
		name, value, assigned := strings.Cut(part, " = ")
		addend, number, added := strings.Cut(part, " + ")
		switch {
		case assigned:
			i.all.mu.Lock()
			i.variables[name] = value
			i.all.mu.Unlock()
		case added:
			i.all.mu.Lock()
			a, _ := strconv.Atoi(i.variables[addend])
			i.all.mu.Unlock()
			b, _ := strconv.Atoi(number)
			i.result(r, strconv.Itoa(a+b), true)
		case strings.HasPrefix(part, "print(\""):
			i.say(r, guestwire.ItemStdout, strings.TrimSuffix(strings.TrimPrefix(part, "print(\""), "\")")+"\n")
		case part == "os.getcwd()":
			i.result(r, "'"+i.info.Dir+"'", true)
		case len(parts) > 1 && strings.HasPrefix(part, "import "):
		default:
			return false
		}
	}
	return true
}

// line executes one line, and reports whether to go on.
func (i *interpreter) line(r *codeRun, line string) bool {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "print":
		i.say(r, guestwire.ItemStdout, rest+"\n")
	case "warn":
		i.say(r, guestwire.ItemStderr, rest+"\n")
	case "show":
		i.result(r, rest, false)
	case "line":
		i.say(r, guestwire.ItemResult, rest)
	case "1+1":
		i.result(r, "2", true)
	case "set":
		name, value, _ := strings.Cut(rest, " ")
		i.all.mu.Lock()
		i.variables[name] = value
		if i.all.set != nil {
			wake(&i.all.set)
		}
		i.all.mu.Unlock()
	case "await":
		return i.await(r, rest)
	case "get":
		i.all.mu.Lock()
		value, ok := i.variables[rest]
		i.all.mu.Unlock()
		if !ok {
			return i.raise(r, "NameError", rest)
		}
		i.result(r, value, true)
	case "raise":
		name, value, _ := strings.Cut(rest, " ")
		return i.raise(r, name, value)
	case "sleep":
		ms, _ := strconv.Atoi(rest)
		select {
		case <-time.After(time.Duration(ms) * time.Millisecond):
		case <-r.interrupt:
			return i.raise(r, "KeyboardInterrupt", "")
		case <-r.killed:
			return false
		}
	case "stubborn":
		<-r.killed
		return false
	case "die":
		sig, _ := strconv.Atoi(rest)
		i.all.mu.Lock()
		defer i.all.mu.Unlock()
		i.dieLocked(guestwire.RunLost, sig)
		return false
	}
	return true
}

// await waits until a context has a variable, and reports whether to go on.
func (i *interpreter) await(r *codeRun, name string) bool {
	has := func(other *interpreter) bool { _, ok := other.variables[name]; return ok }
	for {
		i.all.mu.Lock()
		if i.all.set == nil {
			i.all.set = make(chan struct{})
		}
		there, news := slices.ContainsFunc(i.all.order, has), i.all.set
		i.all.mu.Unlock()
		if there {
			return true
		}
		select {
		case <-news:
		case <-r.interrupt:
			return i.raise(r, "KeyboardInterrupt", "")
		case <-r.killed:
			return false
		}
	}
}

func (i *interpreter) say(r *codeRun, k guestwire.ItemKind, text string) {
	i.all.mu.Lock()
	defer i.all.mu.Unlock()
	r.items = append(r.items, codeItem{k, []byte(text)})
	wake(&r.changed)
}

func (i *interpreter) result(r *codeRun, text string, main bool) {
	b, _ := json.Marshal(map[string]any{"ev": "result", "id": r.info.ID, "main": main, "data": map[string]string{"text/plain": text}})
	i.say(r, guestwire.ItemResult, string(b))
}

func (i *interpreter) raise(r *codeRun, name, value string) bool {
	i.all.mu.Lock()
	r.raised, r.info.Name, r.info.Value = true, name, value
	i.all.mu.Unlock()
	b, _ := json.Marshal(map[string]string{"ev": "error", "id": r.info.ID, "name": name, "value": value, "traceback": name + ": " + value})
	i.say(r, guestwire.ItemError, string(b))
	return false
}

// dieLocked ends the interpreter by a signal.
func (i *interpreter) dieLocked(end guestwire.RunEnd, sig int) {
	i.info.State, i.info.End, i.info.Signal, i.info.PID = guestwire.ContextEnded, guestwire.EndSignaled, sig, 0
	i.variables = map[string]string{}
	over := i.queue
	if i.current != nil {
		over = append([]*codeRun{i.current}, over...)
	}
	i.queue = nil
	for _, r := range over {
		r.info.Driver, r.info.Signal = guestwire.EndSignaled, sig
		i.endLocked(r, end)
	}
	wake(&i.changed)
}

func (s *interpreters) interrupt(q guestwire.RunRef) (guestwire.InterruptReply, error) {
	i, err := s.get(q.Context)
	if err != nil {
		return guestwire.InterruptReply{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := i.current; r != nil && (q.Run == "" || q.Run == r.info.ID) {
		r.cause = guestwire.RunInterrupted
		r.stop()
		return guestwire.InterruptReply{Run: r.info.ID}, nil
	}
	for n, r := range i.queue {
		if r.info.ID == q.Run {
			i.queue = slices.Delete(i.queue, n, n+1)
			i.endLocked(r, guestwire.RunInterrupted)
			return guestwire.InterruptReply{Run: r.info.ID}, nil
		}
	}
	return guestwire.InterruptReply{}, nil
}

func (s *interpreters) restart(id string) (guestwire.ContextInfo, error) {
	i, err := s.get(id)
	if err != nil {
		return guestwire.ContextInfo{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i.dieLocked(guestwire.RunCanceled, int(syscall.SIGKILL))
	i.info.State, i.info.End, i.info.Signal, i.info.PID = guestwire.ContextIdle, "", 0, 8
	i.info.Starts++
	return i.told(), nil
}

func (s *interpreters) remove(id string) error {
	i, err := s.get(id)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i.dieLocked(guestwire.RunCanceled, int(syscall.SIGKILL))
	delete(s.byID, id)
	s.order = slices.DeleteFunc(s.order, func(o *interpreter) bool { return o == i })
	return nil
}
