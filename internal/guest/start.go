package guest

import (
	"errors"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/account"
	"casemate.dev/internal/guest/pty"
	"casemate.dev/internal/guest/resolve"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
)

const (
	maxID = 128
	// maxArgument is the kernel's bound of one argument or variable (MAX_ARG_STRLEN, execve(2)).
	maxArgument = 128 << 10
	// maxInfoArgv bounds the arguments that ProcessInfo repeats, so that it fits a frame.
	maxInfoArgv = 16 << 10
	// defaultPath is where programs are looked for where neither template nor caller says.
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	defaultTerm = "xterm-256color"
)

// start starts a process, or returns the one that has its id. It takes over files, the scope's.
func (g *Guest) start(r guestwire.StartProcess, files []*os.File) (p *process, attached bool, err error) {
	p, fresh, err := g.processes.enter(r.ID)
	if err != nil || !fresh {
		closeFiles(files)
		if err != nil {
			return nil, false, err
		}
		<-p.ready
		return p, true, p.err
	}
	undo := cleanup.New(func() { closeFiles(files) })
	p.err = g.startFresh(p, r, files, undo)
	if p.err != nil {
		undo.Run()
		g.processes.leave(p)
	}
	close(p.ready)
	return p, false, p.err
}

// startFresh starts a process of its own, which reaper and pumps look after.
func (g *Guest) startFresh(p *process, r guestwire.StartProcess, files []*os.File, undo *cleanup.Stack) error {
	attr, s, err := g.prepare(p, &r, files, undo)
	if err != nil {
		return err
	}
	child, err := g.reaper.fork(func() (int, error) { return g.cfg.Spawner.Start(*attr) })
	if err != nil {
		return startError(err, &r, attr)
	}
	undo.Release()
	p.begun(child, s)
	g.lookAfter(p, s)
	p.limitTime(time.Duration(r.TimeoutMS) * time.Millisecond)
	return nil
}

// prepare does all that a start takes before the fork.
func (g *Guest) prepare(p *process, r *guestwire.StartProcess, files []*os.File, undo *cleanup.Stack) (*spawn.Attr, *streams, error) {
	attr, err := g.plan(p, r)
	if err != nil {
		return nil, nil, err
	}
	if attr.Scope, p.tree, err = g.tree(r.Scope, files); err != nil {
		return nil, nil, errs.Wrap(err, errs.InvalidArgument, "%v", err)
	}
	if len(files) == 0 {
		undo.Add(p.tree.close)
	}
	if found, noScope := p.tree.(*descent); noScope {
		found.mark = p.id
		attr.Env = append(attr.Env, markVariable+"="+p.id)
	}
	s, err := g.streams(p, r, attr, undo)
	if err != nil {
		return nil, nil, err
	}
	p.out = g.pool.NewBuffer(r.Buffer, r.Hold)
	undo.Add(p.out.Drop)
	p.grace = defaultGrace
	if r.GraceMS > 0 {
		p.grace = time.Duration(r.GraceMS) * time.Millisecond
	}
	p.open = len(s.ours)
	p.info.Started = time.Now().UnixNano()
	return attr, s, nil
}

// begun takes note of the process's birth.
func (p *process) begun(c *child, s *streams) {
	s.closeTheirs()
	p.child = c
	p.info.PID = c.pid
	if found, noScope := p.tree.(*descent); noScope {
		found.pid = c.pid
	}
}

// lookAfter has pumps read what the process prints, and the reaper wait for its end.
func (g *Guest) lookAfter(p *process, s *streams) {
	for i := range s.ours {
		o := &s.ours[i]
		if !o.live() {
			continue
		}
		f := o.take()
		if raw, err := f.SyscallConn(); err == nil { // of an open file it is to be had
			p.mu.Lock()
			p.sources = append(p.sources, drain{raw: raw, kind: o.kind})
			p.mu.Unlock()
		}
		go p.pump(f, o.kind, o.rest, &g.chunks)
	}
	g.reaper.adopt(p.child, p.hasEnded)
}

// limitTime arms the timeout, unless the process has ended already.
func (p *process) limitTime(d time.Duration) {
	if d <= 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended.IsZero() {
		p.timeout = time.AfterFunc(d, p.expire)
	}
}

// plan checks the request and says what to start.
func (g *Guest) plan(p *process, r *guestwire.StartProcess) (*spawn.Attr, error) {
	argv, err := arguments(r.Argv)
	if err != nil {
		return nil, err
	}
	id := g.identity()
	u, err := g.user(id.or(r.User))
	if err != nil {
		return nil, err
	}
	env, err := environment(u, r.TTY, g.cfg.Env, id.claim.Env, r.Env)
	if err != nil {
		return nil, err
	}
	dir, err := workDir(r.Dir, id.dir, u)
	if err != nil {
		return nil, err
	}
	paths := spawn.Candidates(argv[0], env["PATH"], dir)
	if len(paths) == 0 {
		return nil, errs.New(errs.NotFound, "no such program in the sandbox: %s", guestwire.Escape(argv[0])).
			WithHint("PATH is %s", guestwire.Escape(env["PATH"]))
	}
	p.info = guestwire.ProcessInfo{
		ID: p.id, Argv: shortArgv(r.Argv), Dir: guestwire.Escape(dir), User: u.String(), TTY: r.TTY,
	}
	return &spawn.Attr{
		Paths: paths, Argv: argv, Env: flatten(env), Dir: dir,
		UID: u.UID, GID: u.GID, Groups: u.Groups, Setsid: true, Ctty: -1,
	}, nil
}

func arguments(wire []string) ([]string, error) {
	if len(wire) == 0 || wire[0] == "" {
		return nil, errs.New(errs.InvalidArgument, "no program given")
	}
	argv := make([]string, len(wire))
	for i, text := range wire {
		arg, ok := guestwire.Unescape(text)
		if !ok {
			return nil, errs.New(errs.InvalidArgument, "argument %d holds a NUL", i)
		}
		if len(arg) >= maxArgument {
			return nil, errs.New(errs.InvalidArgument, "argument %d has %d bytes; the kernel takes less than %d",
				i, len(arg), maxArgument).WithHint("write it to a file, or send it to standard input")
		}
		argv[i] = arg
	}
	return argv, nil
}

// shortArgv cuts what only informs.
func shortArgv(argv []string) []string {
	size := 0
	for i, arg := range argv {
		if size += len(arg) + 1; size > maxInfoArgv {
			short := slices.Clone(argv[:i])
			return append(short, "…")
		}
	}
	return argv
}

// environment joins what the user is, the template, the claim and the request: the later ones win.
func environment(u account.User, tty bool, layers ...map[string]string) (map[string]string, error) {
	env := map[string]string{
		"PATH": defaultPath, "HOME": u.Home, "USER": u.String(), "LOGNAME": u.String(), "SHELL": u.Shell,
	}
	if u.Shell == "" {
		env["SHELL"] = "/bin/sh"
	}
	if tty {
		env["TERM"] = defaultTerm
	}
	for _, layer := range layers {
		for k, v := range layer {
			name, ok1 := guestwire.Unescape(k)
			value, ok2 := guestwire.Unescape(v)
			if !ok1 || !ok2 || name == "" || strings.Contains(name, "=") {
				return nil, errs.New(errs.InvalidArgument, "environment variable %s is malformed", quote(k))
			}
			if len(name)+len(value)+2 > maxArgument {
				return nil, errs.New(errs.InvalidArgument, "environment variable %s has %d bytes; the kernel takes less than %d",
					quote(k), len(value), maxArgument)
			}
			env[name] = value
		}
	}
	return env, nil
}

// flatten returns the variables in a fixed order, so that the same request always starts the same.
func flatten(env map[string]string) []string {
	list := make([]string, 0, len(env)+1)
	for _, k := range slices.Sorted(maps.Keys(env)) {
		list = append(list, k+"="+env[k])
	}
	return list
}

// workDir returns the absolute working directory: what is asked for, else the sandbox's, else the
// user's home.
func workDir(asked, fallback string, u account.User) (string, error) {
	dir, ok := guestwire.Unescape(asked)
	if !ok {
		return "", errs.New(errs.InvalidArgument, "the working directory holds a NUL")
	}
	base := fallback
	if base == "" {
		base = u.Home
	}
	switch {
	case dir == "":
		dir = base
	case dir == "~" || strings.HasPrefix(dir, "~/"):
		dir = u.Home + dir[1:]
	case dir[0] != '/':
		dir = path.Join(base, dir)
	}
	return dir, checkDir(dir)
}

// checkDir refuses a working directory that is none, with words that help, and one that a magic link
// leads to (CVE-2024-21626). The process itself enters it by name, as its user. That the name could
// be changed in between harms nothing: what the guest has open holds no directory.
func checkDir(dir string) error {
	fd, err := resolve.Open(unix.AT_FDCWD, dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err == nil {
		return unix.Close(fd)
	}
	text := guestwire.Escape(dir)
	switch {
	case errors.Is(err, unix.ENOENT):
		return errs.New(errs.NotFound, "no such directory in the sandbox: %s", text)
	case errors.Is(err, unix.ENOTDIR):
		return errs.New(errs.InvalidArgument, "not a directory: %s", text)
	case resolve.IsMagic(err):
		return errs.New(errs.InvalidArgument, "the working directory leads through a link that is not followed: %s", text)
	case errors.Is(err, unix.ENAMETOOLONG):
		return errs.New(errs.InvalidArgument, "the working directory's name is too long")
	}
	return nil // what PID 1 can't tell, the process will
}

// source is where output of one kind comes from: our end of a pipe, or of a terminal.
type source struct {
	fd   int      // a pipe's; -1: closed, or another's
	file *os.File // a terminal's
	kind guestwire.Stream
	rest []byte // was read and not printed yet
}

func (o *source) live() bool { return o.fd >= 0 || o.file != nil }

// take hands the source over as a file for Go's poller.
func (o *source) take() *os.File {
	f := o.file
	if f == nil {
		_ = unix.SetNonblock(o.fd, true) // can't fail on an open pipe
		f = os.NewFile(uintptr(o.fd), "pipe")
	}
	o.fd, o.file = -1, nil
	return f
}

func (o *source) close() {
	switch {
	case o.fd >= 0:
		_ = unix.Close(o.fd)
	case o.file != nil:
		_ = o.file.Close()
	}
	o.fd, o.file = -1, nil
}

// streams are the ends of a process's standard streams.
type streams struct {
	ours   []source
	theirs []int
	term   *os.File // their end of a terminal
}

func (s *streams) closeTheirs() {
	for _, fd := range s.theirs {
		_ = unix.Close(fd)
	}
	s.theirs = nil
	if s.term != nil {
		_ = s.term.Close()
	}
}

func (s *streams) close() {
	for i := range s.ours {
		s.ours[i].close()
	}
	s.closeTheirs()
}

// streams makes the standard streams and puts the child's ends into attr.
func (g *Guest) streams(p *process, r *guestwire.StartProcess, attr *spawn.Attr, undo *cleanup.Stack) (*streams, error) {
	s := &streams{}
	undo.Add(s.close)
	if r.TTY {
		master, term, err := pty.Open(attr.UID, r.Rows, r.Cols)
		if err != nil {
			return nil, err
		}
		s.ours = []source{{fd: -1, file: master, kind: guestwire.TTY}}
		s.term, p.term = term, master
		p.input = newInput(master, true)
		attr.Files = []uintptr{term.Fd(), term.Fd(), term.Fd()}
		attr.Ctty = 0
		return s, nil
	}
	stdin := uintptr(g.null)
	switch r.Stdin {
	case guestwire.StdinNone:
	case guestwire.StdinPipe:
		theirs, ours, err := pipe(attr.UID)
		if err != nil {
			return nil, err
		}
		in := source{fd: ours}
		file := in.take()
		undo.Add(func() { _ = file.Close() })
		s.theirs = append(s.theirs, theirs)
		p.input = newInput(file, false)
		stdin = uintptr(theirs)
	default:
		return nil, errs.New(errs.InvalidArgument, "unknown kind of standard input: %s", quote(string(r.Stdin)))
	}
	attr.Files = append(make([]uintptr, 0, 3), stdin)
	for _, kind := range [...]guestwire.Stream{guestwire.Stdout, guestwire.Stderr} {
		ours, theirs, err := pipe(attr.UID)
		if err != nil {
			return nil, err
		}
		s.ours, s.theirs = append(s.ours, source{fd: ours, kind: kind}), append(s.theirs, theirs)
		attr.Files = append(attr.Files, uintptr(theirs))
	}
	return s, nil
}

// pipe makes a pipe. Everybody may open it again by /dev/stdout, who can see it there at all: proc shows a
// process's descriptors to its own user only, and the thread that starts processes may give nothing away
// to another user. A kernel that gives pipes no modes (gVisor's) gives this one to its user.
func pipe(uid uint32) (r, w int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return -1, -1, errs.Wrap(err, errs.ResourceExhausted, "no pipe to be had: %v", err)
	}
	err = os.NewSyscallError("fchmod", unix.Fchmod(fds[0], 0o666)) // both ends are one inode
	if errors.Is(err, unix.EPERM) {
		err = os.NewSyscallError("fchown", unix.Fchown(fds[0], int(uid), -1))
	}
	if err != nil {
		_ = unix.Close(fds[0])
		_ = unix.Close(fds[1])
		return -1, -1, err
	}
	return fds[0], fds[1], nil
}
