package fake

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation/fake/script"
)

// command returns the program of that name, or nil. Programs that no real system has begin a list
// of their own: they make happen what tests of the layers above have to survive.
func command(name string) script.Command {
	switch name {
	case "sh", "bash", "dash":
		return runShell
	case "echo":
		return runEcho
	case "printf":
		return runPrintf
	case "true", ":", "export", "set", "stdbuf":
		return func(*script.Shell, []string) int { return 0 }
	case "false":
		return func(*script.Shell, []string) int { return 1 }
	case "exit":
		return runExit
	case "sleep":
		return runSleep
	case "cat":
		return runCat
	case "env":
		return runEnv
	case "pwd":
		return func(sh *script.Shell, _ []string) int { return out(sh, "%s\n", sh.Dir) }
	case "cd":
		return runCd
	case "test", "[":
		return runTest
	case "seq":
		return runSeq
	case "head", "wc":
		return runCount
	case "python3":
		return runPython
	}
	if c := processCommand(name); c != nil {
		return c
	}
	if c := fileCommand(name); c != nil {
		return c
	}
	return faultCommand(name)
}

func processCommand(name string) script.Command {
	switch name {
	case "wait":
		return func(sh *script.Shell, _ []string) int { return sh.Wait() }
	case "exec", "setsid", "nohup", "command":
		// Sessions do not matter here: what belongs to a process is known.
		return func(sh *script.Shell, argv []string) int {
			if len(argv) < 2 {
				return 0
			}
			status := sh.Call(argv[1:])
			if argv[0] == "exec" {
				sh.Exit(status)
			}
			return status
		}
	case "trap":
		return runTrap
	case "kill":
		return runKill
	case "id":
		return runID
	case "whoami":
		return func(sh *script.Shell, _ []string) int { return out(sh, "%s\n", sh.Env["USER"]) }
	case "hostname":
		return runHostname
	case "nproc":
		return func(sh *script.Shell, _ []string) int {
			cpus := taskOf(sh).machine.appliedNow().Limits.CPUs
			return out(sh, "%d\n", max(1, int(cpus+0.999)))
		}
	case "tty":
		return func(sh *script.Shell, _ []string) int {
			if !isTerminal(sh.Stdout) {
				_ = out(sh, "not a tty\n")
				return 1
			}
			return out(sh, "/dev/pts/0\n")
		}
	case "stty":
		return func(sh *script.Shell, _ []string) int {
			p := taskOf(sh).process
			p.mu.Lock()
			size := p.size
			p.mu.Unlock()
			return out(sh, "%d %d\n", size.rows, size.cols)
		}
	}
	return nil
}

func out(sh *script.Shell, format string, args ...any) int {
	if _, err := fmt.Fprintf(sh.Stdout, format, args...); err != nil {
		return 1
	}
	return 0
}

func number(argv []string, i int) int64 {
	if i >= len(argv) {
		return 0
	}
	n, _ := strconv.ParseInt(argv[i], 10, 64)
	return n
}

func runShell(sh *script.Shell, argv []string) int {
	c := sh.Clone()
	for i := 1; i < len(argv); i++ {
		if strings.HasPrefix(argv[i], "-") && strings.HasSuffix(argv[i], "c") && i+1 < len(argv) {
			c.Args = append([]string{argv[0]}, argv[i+2:]...)
			if len(argv) > i+2 {
				c.Args = argv[i+2:]
			}
			return c.Run(argv[i+1])
		}
		if !strings.HasPrefix(argv[i], "-") {
			data, _, err := taskOf(sh).machine.tree.read(userOf(sh), absolute(argv[i], sh.Dir, userOf(sh)))
			if err != nil {
				_ = complain(sh, argv[0], "cannot open %s: %v", argv[i], err)
				return 127
			}
			c.Args = argv[i:]
			return c.Run(string(data))
		}
	}
	return interactive(c)
}

// interactive reads a line, runs it, and goes on with the next one.
func interactive(sh *script.Shell) int {
	status := 0
	lines := bufio.NewReader(sh.Stdin)
	sh.Stdin = lines
	for {
		if isTerminal(sh.Stdout) {
			_ = out(sh, "$ ")
		}
		line, err := lines.ReadString('\n')
		if line = strings.TrimSpace(line); line != "" {
			status = sh.Run(line)
			if line == "exit" || strings.HasPrefix(line, "exit ") {
				return status
			}
		}
		if err != nil || taskOf(sh).ctx.Err() != nil {
			return status
		}
	}
}

func runEcho(sh *script.Shell, argv []string) int {
	args, end := argv[1:], "\n"
	if len(args) > 0 && args[0] == "-n" {
		args, end = args[1:], ""
	}
	return out(sh, "%s%s", strings.Join(args, " "), end)
}

func runPrintf(sh *script.Shell, argv []string) int {
	if len(argv) < 2 {
		return 2
	}
	format, err := strconv.Unquote(`"` + strings.ReplaceAll(argv[1], `"`, `\"`) + `"`)
	if err != nil {
		format = argv[1]
	}
	args := make([]any, 0, len(argv))
	for _, a := range argv[2:] {
		args = append(args, a)
	}
	format = strings.NewReplacer("%d", "%v", "%i", "%v").Replace(format)
	return out(sh, format, args[:min(len(args), strings.Count(format, "%")-2*strings.Count(format, "%%"))]...)
}

func runExit(sh *script.Shell, argv []string) int {
	status := sh.Status()
	if len(argv) > 1 {
		status = int(number(argv, 1)) & 255
	}
	sh.Exit(status)
	return status
}

func runSleep(sh *script.Shell, argv []string) int {
	t := taskOf(sh)
	if len(argv) > 1 && argv[1] == "infinity" {
		<-t.ctx.Done()
		return 128
	}
	seconds, err := strconv.ParseFloat(strings.Join(argv[1:], ""), 64)
	if err != nil {
		return complain(sh, "sleep", "invalid time interval")
	}
	timer := time.NewTimer(time.Duration(seconds * float64(time.Second)))
	defer timer.Stop()
	select {
	case <-timer.C:
		t.machine.gate(t.ctx)
		return 0
	case <-t.ctx.Done():
		return 128
	}
}

func runCat(sh *script.Shell, argv []string) int {
	if len(argv) == 1 {
		_, _ = io.Copy(sh.Stdout, sh.Stdin)
		return 0
	}
	status := 0
	u := userOf(sh)
	for _, name := range argv[1:] {
		data, _, err := taskOf(sh).machine.tree.read(u, absolute(name, sh.Dir, u))
		if err != nil {
			status = complain(sh, "cat", "%s: %v", name, err)
			continue
		}
		if _, err := sh.Stdout.Write(data); err != nil {
			return 1
		}
	}
	return status
}

func runEnv(sh *script.Shell, argv []string) int {
	if len(argv) > 1 {
		c := sh.Clone()
		for i, a := range argv[1:] {
			name, value, ok := strings.Cut(a, "=")
			if !ok {
				return c.Call(argv[i+1:])
			}
			c.Env[name] = value
		}
	}
	names := make([]string, 0, len(sh.Env))
	for name := range sh.Env {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		_ = out(sh, "%s=%s\n", name, sh.Env[name])
	}
	return 0
}

func runCd(sh *script.Shell, argv []string) int {
	u := userOf(sh)
	dir := u.home
	if len(argv) > 1 {
		dir = absolute(argv[1], sh.Dir, u)
	}
	if !taskOf(sh).machine.tree.isDir(dir) {
		return complain(sh, "cd", "%s: no such directory", dir)
	}
	sh.Dir = dir
	return 0
}

func runTest(sh *script.Shell, argv []string) int {
	args := argv[1:]
	if argv[0] == "[" && len(args) > 0 {
		args = args[:len(args)-1]
	}
	ok := false
	switch len(args) {
	case 1:
		ok = args[0] != ""
	case 2:
		ok = unaryTest(sh, args[0], args[1])
	case 3:
		a, _ := strconv.Atoi(args[0])
		b, _ := strconv.Atoi(args[2])
		ok = map[string]bool{
			"=": args[0] == args[2], "!=": args[0] != args[2], "-eq": a == b, "-ne": a != b,
			"-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b,
		}[args[1]]
	}
	if ok {
		return 0
	}
	return 1
}

func unaryTest(sh *script.Shell, op, arg string) bool {
	tree := taskOf(sh).machine.tree
	info, err := tree.stat(absolute(arg, sh.Dir, userOf(sh)), op != "-L")
	switch op {
	case "-n":
		return arg != ""
	case "-z", "!":
		return arg == ""
	case "-t":
		return isTerminal(sh.Stdout)
	case "-e":
		return err == nil
	case "-f":
		return err == nil && info.Type == guestwire.TypeFile
	case "-d":
		return err == nil && info.Type == guestwire.TypeDir
	case "-L":
		return err == nil && info.Type == guestwire.TypeSymlink
	case "-s":
		return err == nil && info.Size > 0
	}
	return false
}

func runSeq(sh *script.Shell, argv []string) int {
	first, last := int64(1), number(argv, len(argv)-1)
	if len(argv) > 2 {
		first = number(argv, 1)
	}
	for i := first; i <= last; i++ {
		if out(sh, "%d\n", i) != 0 {
			return 1
		}
	}
	return 0
}

func runCount(sh *script.Shell, argv []string) int {
	if len(argv) < 2 || argv[1] != "-c" {
		return complain(sh, argv[0], "only -c is known here")
	}
	if argv[0] == "head" {
		_, _ = io.CopyN(sh.Stdout, sh.Stdin, number(argv, 2))
		return 0
	}
	n, _ := io.Copy(io.Discard, sh.Stdin)
	return out(sh, "%d\n", n)
}

// runPython knows print of a number, a product or a string, for examples in tests.
func runPython(sh *script.Shell, argv []string) int {
	if len(argv) < 3 || argv[1] != "-c" {
		return complain(sh, "python3", "only -c is known here")
	}
	body, ok := strings.CutPrefix(strings.TrimSpace(argv[2]), "print(")
	body, closed := strings.CutSuffix(body, ")")
	if !ok || !closed {
		return complain(sh, "python3", "only print(…) is known here")
	}
	if s := strings.Trim(body, `"'`); s != body {
		return out(sh, "%s\n", s)
	}
	a, b, product := strings.Cut(body, "*")
	x, _ := strconv.Atoi(strings.TrimSpace(a))
	if product {
		y, _ := strconv.Atoi(strings.TrimSpace(b))
		x *= y
	}
	return out(sh, "%d\n", x)
}

func runTrap(sh *script.Shell, argv []string) int {
	if len(argv) < 3 {
		return 0
	}
	for _, name := range argv[2:] {
		taskOf(sh).ignore(signalNumber(name), argv[1] == "")
	}
	return 0
}

func runKill(sh *script.Shell, argv []string) int {
	sig := int(syscall.SIGTERM)
	args := argv[1:]
	if len(args) > 0 && strings.HasPrefix(args[0], "-") {
		sig, args = signalNumber(args[0][1:]), args[1:]
	}
	m := taskOf(sh).machine
	status := 0
	for _, a := range args {
		pid, _ := strconv.Atoi(a)
		m.mu.Lock()
		var hit []*task
		for _, t := range m.tasks {
			if t.pid == pid || pid == -1 {
				hit = append(hit, t)
			}
		}
		m.mu.Unlock()
		for _, t := range hit {
			t.signal(sig)
		}
		if len(hit) == 0 {
			status = complain(sh, "kill", "%s: no such process", a)
		}
	}
	return status
}

func signalNumber(name string) int {
	if n, err := strconv.Atoi(name); err == nil {
		return n
	}
	switch strings.TrimPrefix(strings.ToUpper(name), "SIG") {
	case "HUP":
		return int(syscall.SIGHUP)
	case "INT":
		return int(syscall.SIGINT)
	case "KILL":
		return int(syscall.SIGKILL)
	case "USR1":
		return int(syscall.SIGUSR1)
	}
	return int(syscall.SIGTERM)
}

func runID(sh *script.Shell, argv []string) int {
	u := userOf(sh)
	switch strings.Join(argv[1:], " ") {
	case "-u", "-g":
		return out(sh, "%d\n", u.id)
	case "-un", "-u -n", "-nu":
		return out(sh, "%s\n", u.name)
	}
	return out(sh, "uid=%d(%s) gid=%d(%s)\n", u.id, u.name, u.id, u.name)
}

func runHostname(sh *script.Shell, _ []string) int {
	m := taskOf(sh).machine
	m.mu.Lock()
	claim := m.claim
	m.mu.Unlock()
	if claim == nil {
		return out(sh, "localhost\n")
	}
	return out(sh, "%s\n", claim.Hostname)
}
