package script

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
	"sync"
)

// Host is what a shell needs of the machine that it runs on. Implementations are safe for
// concurrent use.
type Host interface {
	// Lookup returns the command of that name, or nil.
	Lookup(sh *Shell, name string) Command
	// Open opens a file for a redirection: op is "<", ">" or ">>".
	Open(sh *Shell, path, op string) (io.ReadWriteCloser, error)
	// Fork runs f as a process of its own, with a shell that is a copy of sh, and returns its number
	// and a function that waits for its status. It fails where there may be no more processes.
	Fork(sh *Shell, f func(child *Shell) int) (pid int, wait func() int, err error)
	// Checkpoint returns an error where the shell must stop: its process was killed. It blocks while
	// the machine is frozen.
	Checkpoint(sh *Shell) error
}

// Command is a program of the machine. It returns its exit status.
type Command func(sh *Shell, argv []string) int

// Shell is the state of one running script. One goroutine uses it at a time.
type Shell struct {
	Host   Host
	Env    map[string]string // every variable; all of them are exported
	Args   []string          // $0, $1 …
	Dir    string
	PID    int
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	// Task is the machine's own, handed on unchanged.
	Task any

	status  int
	last    int // $!
	exiting bool
	waits   []func() int
}

// Clone returns a copy for a subshell or a process of its own.
func (sh *Shell) Clone() *Shell {
	c := *sh
	c.Env = maps.Clone(sh.Env)
	c.exiting, c.waits = false, nil
	return &c
}

// Exit makes the script end with that status after the running command.
func (sh *Shell) Exit(status int) {
	sh.exiting, sh.status = true, status
}

// Status returns the status of the last command.
func (sh *Shell) Status() int { return sh.status }

// Wait waits for the background commands that this shell started and returns the last one's status.
func (sh *Shell) Wait() int {
	status := 0
	for _, wait := range sh.waits {
		status = wait()
	}
	sh.waits = nil
	return status
}

// Run runs a script and returns its exit status.
func (sh *Shell) Run(src string) int {
	l, err := parse(src)
	if err != nil {
		fmt.Fprintf(sh.Stderr, "sh: %v\n", err)
		return 2
	}
	return sh.list(l)
}

// Call runs one command with its arguments and returns its exit status.
func (sh *Shell) Call(argv []string) int {
	c := sh.Host.Lookup(sh, argv[0])
	if c == nil {
		fmt.Fprintf(sh.Stderr, "sh: %s: not found\n", argv[0])
		return 127
	}
	return c(sh, argv)
}

func (sh *Shell) list(l list) int {
	skip := ""
	for _, it := range l {
		if sh.exiting || sh.Host.Checkpoint(sh) != nil {
			return sh.status
		}
		// After "a &&" with a failing a, everything up to the next ";" or "||" is skipped.
		run := skip == "" || skip == "&&" && sh.status == 0 || skip == "||" && sh.status != 0
		if run {
			if it.op == "&" {
				sh.background(it)
			} else {
				sh.status = sh.item(it)
			}
		}
		skip = ""
		if it.op == "&&" || it.op == "||" {
			skip = it.op
		}
	}
	return sh.status
}

func (sh *Shell) background(it item) {
	it.op = ";"
	pid, wait, err := sh.Host.Fork(sh, func(c *Shell) int {
		return c.list(list{it})
	})
	if err != nil {
		fmt.Fprintf(sh.Stderr, "sh: fork: %v\n", err)
		sh.status = 254
		return
	}
	sh.last, sh.status = pid, 0
	sh.waits = append(sh.waits, wait)
}

func (sh *Shell) item(it item) int {
	status := 0
	if len(it.pipeline) == 1 {
		status = sh.node(it.pipeline[0])
	} else {
		status = sh.pipe(it.pipeline)
	}
	if it.negate && !sh.exiting {
		if status == 0 {
			return 1
		}
		return 0
	}
	return status
}

func (sh *Shell) pipe(nodes []node) int {
	var group sync.WaitGroup
	statuses := make([]int, len(nodes))
	in := sh.Stdin
	for i, n := range nodes {
		c := sh.Clone()
		c.Stdin = in
		var closeOut, closeIn func()
		if r, ok := in.(*io.PipeReader); ok {
			closeIn = func() { _ = r.Close() }
		}
		if i < len(nodes)-1 {
			r, w := io.Pipe()
			c.Stdout, in = w, r
			closeOut = func() { _ = w.Close() }
		}
		group.Go(func() {
			statuses[i] = c.node(n)
			if closeOut != nil {
				closeOut()
			}
			if closeIn != nil {
				closeIn()
			}
		})
	}
	group.Wait()
	return statuses[len(statuses)-1]
}

func (sh *Shell) node(n node) int {
	restore, err := sh.redirect(n.redirs)
	defer restore()
	if err != nil {
		fmt.Fprintf(sh.Stderr, "sh: %v\n", err)
		return 1
	}
	switch n.kind {
	case "simple":
		return sh.simple(n)
	case "group":
		return sh.list(n.body)
	case "subshell":
		return sh.Clone().list(n.body)
	case "if":
		sh.status = 0
		if sh.list(n.cond) == 0 {
			return sh.list(n.body)
		}
		if !sh.exiting {
			sh.status = 0
			return sh.list(n.other)
		}
	case "while", "until":
		return sh.loop(n)
	case "for":
		return sh.forEach(n)
	}
	return sh.status
}

func (sh *Shell) loop(n node) int {
	status := 0
	for sh.Host.Checkpoint(sh) == nil {
		ok := sh.list(n.cond) == 0
		if sh.exiting || ok != (n.kind == "while") {
			break
		}
		status = sh.list(n.body)
	}
	if !sh.exiting {
		sh.status = status
	}
	return sh.status
}

func (sh *Shell) forEach(n node) int {
	sh.status = 0
	for _, v := range sh.expand(n.words) {
		if sh.exiting || sh.Host.Checkpoint(sh) != nil {
			break
		}
		sh.Env[n.name] = v
		sh.list(n.body)
	}
	return sh.status
}

func (sh *Shell) simple(n node) int {
	argv := sh.expand(n.words)
	target := sh
	if len(argv) > 0 && len(n.assign) > 0 {
		target = sh.Clone() // "A=1 command" sets A for that command only
	}
	for _, a := range n.assign {
		target.Env[a.name] = sh.join(a.value)
	}
	if len(argv) == 0 {
		return 0
	}
	status := target.Call(argv)
	if target != sh && target.exiting {
		sh.Exit(target.status)
		return sh.status
	}
	if sh.exiting {
		return sh.status
	}
	return status
}

// redirect puts redirections in place and returns what undoes them.
func (sh *Shell) redirect(rs []redirect) (restore func(), err error) {
	in, out, errOut := sh.Stdin, sh.Stdout, sh.Stderr
	var files []io.Closer
	restore = func() {
		sh.Stdin, sh.Stdout, sh.Stderr = in, out, errOut
		for _, f := range files {
			_ = f.Close()
		}
	}
	for _, r := range rs {
		target := sh.join(r.target)
		if r.op == ">&" {
			switch {
			case r.fd == 2 && target == "1":
				sh.Stderr = sh.Stdout
			case r.fd == 1 && target == "2":
				sh.Stdout = sh.Stderr
			default:
				return restore, fmt.Errorf("%s: bad file descriptor", target)
			}
			continue
		}
		f, err := sh.Host.Open(sh, target, r.op)
		if err != nil {
			return restore, fmt.Errorf("cannot open %s: %w", target, err)
		}
		files = append(files, f)
		switch r.fd {
		case 0:
			sh.Stdin = f
		case 1:
			sh.Stdout = f
		case 2:
			sh.Stderr = f
		}
	}
	return restore, nil
}

// expand expands words and splits what came from unquoted expansions at blanks.
func (sh *Shell) expand(words []word) []string {
	var out []string
	for _, w := range words {
		var field strings.Builder
		open := false
		for _, pt := range w {
			v := sh.value(pt)
			if pt.quoted || pt.kind == "text" {
				field.WriteString(v)
				open = true
				continue
			}
			fields := strings.Fields(v)
			for i, f := range fields {
				if i > 0 {
					out = append(out, field.String())
					field.Reset()
				}
				field.WriteString(f)
				open = true
			}
		}
		if open {
			out = append(out, field.String())
		}
	}
	return out
}

func (sh *Shell) join(w word) string {
	var b strings.Builder
	for _, pt := range w {
		b.WriteString(sh.value(pt))
	}
	return b.String()
}

func (sh *Shell) value(pt part) string {
	switch pt.kind {
	case "var":
		return sh.variable(pt.text)
	case "sum":
		return strconv.FormatInt(sh.sum(pt.text), 10)
	case "command":
		var b bytes.Buffer
		c := sh.Clone()
		c.Stdout = &b
		sh.status = c.Run(pt.text)
		return strings.TrimRight(b.String(), "\n")
	}
	return pt.text
}

func (sh *Shell) variable(name string) string {
	if base, fallback, ok := strings.Cut(name, ":-"); ok {
		if v := sh.variable(base); v != "" {
			return v
		}
		return fallback
	}
	switch name {
	case "?":
		return strconv.Itoa(sh.status)
	case "$":
		return strconv.Itoa(sh.PID)
	case "!":
		return strconv.Itoa(sh.last)
	case "#":
		return strconv.Itoa(max(0, len(sh.Args)-1))
	case "@", "*":
		if len(sh.Args) < 2 {
			return ""
		}
		return strings.Join(sh.Args[1:], " ")
	}
	if n, err := strconv.Atoi(name); err == nil {
		if n < len(sh.Args) {
			return sh.Args[n]
		}
		return ""
	}
	return sh.Env[name]
}

// sum works out a chain of integers joined by + - * / %, from left to right.
func (sh *Shell) sum(src string) int64 {
	var total int64
	op := byte('+')
	for src = strings.TrimSpace(src); src != ""; src = strings.TrimSpace(src) {
		end := strings.IndexAny(src[1:], "+-*/% \t")
		if end < 0 {
			end = len(src) - 1
		}
		token := strings.TrimPrefix(src[:end+1], "$")
		src = strings.TrimSpace(src[end+1:])
		n, err := strconv.ParseInt(token, 0, 64)
		if err != nil {
			n, _ = strconv.ParseInt(sh.Env[token], 0, 64)
		}
		switch {
		case op == '+':
			total += n
		case op == '-':
			total -= n
		case op == '*':
			total *= n
		case n == 0:
			return 0
		case op == '/':
			total /= n
		case op == '%':
			total %= n
		}
		if src == "" {
			break
		}
		op, src = src[0], src[1:]
	}
	return total
}
