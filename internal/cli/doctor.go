package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/server"
)

func (a *app) doctorCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Tell what this machine can do, what is missing and how to get it",
		Long: `Tell what the server's machine can do: each layer of isolation, the programs that are used, room on disk.
For what is missing it says what to do. Where no server is up, a temporary one is started to ask.

Exit codes: 0 when everything that is required is there, 1 when something is missing, 125 when it could not
be found out.`,
		Args: exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			return a.doctor(ctx)
		},
	}
}

// finding is one thing that doctor looked at.
type finding struct {
	Name     string `json:"name"`
	OK       bool   `json:"ok"`
	Required bool   `json:"required"`
	Detail   string `json:"detail,omitempty"`
	Remedy   string `json:"remedy,omitempty"`
}

func (a *app) doctor(ctx context.Context) error {
	host, err := a.askHost(ctx)
	if err != nil {
		return cannot(err, "examine this machine")
	}
	local := localFindings()
	if a.json {
		raw, err := marshalJSON(host)
		if err != nil {
			return err
		}
		if err := a.printJSON(map[string]any{"host": json.RawMessage(raw), "local": local}); err != nil {
			return err
		}
	} else {
		a.printDoctor(host, local)
	}
	missing := 0
	for _, b := range host.GetBackends() {
		for _, c := range b.GetCapabilities() {
			if b.GetDefault() && c.GetRequired() && !c.GetOk() {
				missing++
			}
		}
	}
	for _, f := range local {
		if f.Required && !f.OK {
			missing++
		}
	}
	if missing > 0 {
		return &exitError{code: 1}
	}
	return nil
}

// askHost asks the server what its machine can do, or a temporary server where none is up.
func (a *app) askHost(ctx context.Context) (*client.Host, error) {
	c, err := a.connect()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	host, err := c.System.Host(ctx)
	if client.KindOf(err) != client.Unavailable || a.url != "" || a.getenv(client.EnvURL) != "" || os.Geteuid() != 0 {
		return host, err
	}
	if !a.json {
		a.note("no server is up; asking a temporary one")
	}
	return a.askTemporary(ctx)
}

// askTemporary starts a server with directories of its own, asks it and takes all away again.
func (a *app) askTemporary(ctx context.Context) (host *client.Host, err error) {
	dir, err := os.MkdirTemp("", "casemate-doctor-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	socket := filepath.Join(dir, "run", "casemate.sock")
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var log strings.Builder
	child := exec.CommandContext(ctx, self, "serve", "--listen=none", "--data-dir="+filepath.Join(dir, "data"),
		"--run-dir="+filepath.Join(dir, "run"), "--keys-dir="+filepath.Join(dir, "keys"))
	child.Stderr = &log
	child.Env = append(os.Environ(), "NO_COLOR=1")
	child.Cancel = func() error { return child.Process.Signal(syscall.SIGTERM) }
	child.WaitDelay = stopTimeout
	if err := child.Start(); err != nil {
		return nil, err
	}
	exited := make(chan struct{})
	go func() {
		_ = child.Wait() // the log tells why
		close(exited)
	}()
	defer func() { stop(); <-exited }()
	if err := awaitServer(ctx, socket, exited, func() {}); err != nil {
		stop()
		<-exited
		if said := lastWords(strings.Split(log.String(), "\n")); said != nil {
			return nil, said
		}
		return nil, err
	}
	c, err := client.New("unix://"+socket, "")
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.System.Host(ctx)
}

// localFindings looks at what the server's probes do not: programs, room, settings of the host.
func localFindings() []finding {
	list := []finding{
		program("mkfs.btrfs", "disk limits by a btrfs image", "apt-get install btrfs-progs"),
		program("debootstrap", "building template base", "apt-get install debootstrap"),
		program("python3", "Python in template host", "apt-get install python3"),
		room(),
		corePattern(),
	}
	return list
}

// program looks for a program of the distribution, where a sandbox sees it.
func program(name, use, remedy string) finding {
	for _, dir := range []string{"/usr/sbin", "/usr/bin", "/sbin", "/bin"} {
		if st, err := os.Stat(filepath.Join(dir, name)); err == nil && st.Mode()&0o111 != 0 {
			return finding{Name: name, OK: true, Detail: use}
		}
	}
	return finding{Name: name, Detail: "missing, for " + use, Remedy: remedy}
}

// wantRoom is the free space from which a server is comfortable: some sandboxes with the default
// disk limit.
const wantRoom = 8 << 30

func room() finding {
	dir := server.DefaultDataDir
	for {
		var st syscall.Statfs_t
		if syscall.Statfs(dir, &st) == nil {
			free := int64(st.Bavail) * st.Bsize
			return finding{
				Name: "disk", OK: free >= wantRoom, Detail: formatSize(free) + " free at " + dir,
				Remedy: "choose a --data-dir with more room",
			}
		}
		if dir == "/" {
			return finding{Name: "disk", Detail: "free space is unknown"}
		}
		dir = filepath.Dir(dir)
	}
}

// corePattern looks at where core dumps go: a program that they are piped to is started by the
// kernel outside of every sandbox, and RLIMIT_CORE does not stop it (core(5)).
func corePattern() finding {
	raw, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	if err != nil {
		return finding{Name: "core dumps", Detail: err.Error()}
	}
	pattern := strings.TrimSpace(string(raw))
	if strings.HasPrefix(pattern, "|") {
		return finding{
			Name: "core dumps", Detail: "are piped to " + strings.Fields(pattern[1:] + " ?")[0] + ", outside of every sandbox",
			Remedy: "sysctl kernel.core_pattern=core",
		}
	}
	return finding{Name: "core dumps", OK: true, Detail: "go to files, which sandboxes may not write"}
}

func (a *app) printDoctor(host *client.Host, local []finding) {
	color := a.color(a.stdout)
	fmt.Fprintf(a.stdout, "Linux %s, %d CPUs\n", clean(host.GetKernel()), runtime.NumCPU())
	for _, b := range host.GetBackends() {
		fmt.Fprintln(a.stdout, paint("isolation "+clean(b.GetName()), bold, color))
		t := &table{indent: "  "}
		for _, c := range b.GetCapabilities() {
			required := c.GetRequired() && b.GetDefault() // what another one lacks keeps only that one from being used
			addFinding(t, finding{c.GetName(), c.GetOk(), required, c.GetDetail(), c.GetRemedy()})
		}
		a.table(t)
	}
	fmt.Fprintln(a.stdout, paint("this machine", bold, color))
	t := &table{indent: "  "}
	for _, f := range local {
		addFinding(t, f)
	}
	a.table(t)
}

func addFinding(t *table, f finding) {
	mark := cell{"ok", green}
	switch {
	case !f.OK && f.Required:
		mark = cell{"MISSING", red}
	case !f.OK:
		mark = cell{"warning", yellow}
	}
	remedy := ""
	if !f.OK && f.Remedy != "" {
		remedy = "→ " + f.Remedy
	}
	t.add(mark, f.Name, f.Detail, remedy)
}
