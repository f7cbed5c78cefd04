package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// peer is another program that runs a command in a sandbox of its kind.
type peer struct {
	name string
	// run runs a command that prints a line, to its end.
	run func(ctx context.Context) error
	// rounds is how often it is run for a row: as many as its slowness allows.
	rounds int
}

// peers returns those that work on this machine, each tried once.
func peers(ctx context.Context, dir string) ([]peer, error) {
	bundle, err := makeBundle(dir, "/bin/echo", "hello")
	if err != nil {
		return nil, err
	}
	all := []peer{{name: "bubblewrap", run: bubblewrap, rounds: 40}}
	for _, name := range []string{"runc", runscName} {
		all = append(all, peer{name: name, run: ociRuntime(name, bundle, dir), rounds: 10})
	}
	if image := dockerImage(ctx); image != "" {
		all = append(all, peer{name: "docker", rounds: 5, run: func(ctx context.Context) error {
			return output(ctx, "docker", "run", "--rm", "--network", "none", image, "echo", "hello")
		}})
	}
	var works []peer
	for _, p := range all {
		if p.run(ctx) == nil {
			works = append(works, p)
		}
	}
	return works, ctx.Err()
}

// output runs a program that must print hello.
func output(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if out.String() != "hello\n" {
		return fmt.Errorf("%s printed %q", name, out.String())
	}
	return nil
}

// bubblewrap asks for what a sandbox of template host has, as far as it can give it.
func bubblewrap(ctx context.Context) error {
	return output(ctx, "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv",
		"--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64",
		"--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--dir", "/home/user", "--", "/bin/echo", "hello")
}

// makeBundle makes an OCI bundle whose root shows the host's /usr, as template host does.
func makeBundle(dir string, args ...string) (string, error) {
	bundle := filepath.Join(dir, "bundle")
	root := filepath.Join(bundle, "rootfs")
	for _, d := range []string{"usr", "proc", "dev", "sys", "tmp", "home/user"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return "", err
		}
	}
	for _, l := range []string{"bin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+l, filepath.Join(root, l)); err != nil {
			return "", err
		}
	}
	mount := func(target, kind, source string, options ...string) map[string]any {
		return map[string]any{"destination": target, "type": kind, "source": source, "options": options}
	}
	namespaces := make([]map[string]string, 0, 6)
	for _, n := range []string{"pid", "network", "ipc", "uts", "mount", "cgroup"} {
		namespaces = append(namespaces, map[string]string{"type": n})
	}
	config, err := json.Marshal(map[string]any{
		"ociVersion": "1.0.2",
		"process": map[string]any{
			"args": args, "cwd": "/", "env": []string{"PATH=/usr/bin:/bin"}, "noNewPrivileges": true,
			"user": map[string]int{"uid": 1000, "gid": 1000},
		},
		"root": map[string]any{"path": "rootfs", "readonly": true},
		"mounts": []any{
			mount("/proc", "proc", "proc"), mount("/dev", "tmpfs", "tmpfs", "nosuid", "mode=755"),
			mount("/usr", "bind", "/usr", "rbind", "ro"), mount("/tmp", "tmpfs", "tmpfs", "nosuid", "nodev"),
		},
		"linux": map[string]any{"namespaces": namespaces},
	})
	if err != nil {
		return "", err
	}
	return bundle, os.WriteFile(filepath.Join(bundle, "config.json"), config, 0o600)
}

const runscName = "runsc"

// stateOf is the directory that a runtime keeps its state in.
func stateOf(runtime string) string { return runtime + "-state" }

// removeRunsc removes a directory in which runsc had one for its state: there it leaves a network namespace mounted.
func removeRunsc(dir, state string) {
	_ = syscall.Unmount(filepath.Join(dir, state, "null-netns"), 0) // fails where runsc made none
	_ = os.RemoveAll(dir)
}

// ociRuntime runs the bundle, each time under another name.
func ociRuntime(name, bundle, dir string) func(ctx context.Context) error {
	var serial atomic.Int64
	state := filepath.Join(dir, stateOf(name))
	return func(ctx context.Context) error {
		id := fmt.Sprintf("casemate-bench-%d-%d", os.Getpid(), serial.Add(1))
		args := []string{"--root", state, "run", "--bundle", bundle, id}
		if name == runscName {
			args = append([]string{"--network=none", "--ignore-cgroups"}, args...)
		}
		return output(ctx, name, args...)
	}
}

// dockerImage returns an image that is there already; nothing is pulled.
func dockerImage(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "docker", "image", "ls", "--quiet").Output()
	if err != nil {
		return ""
	}
	first, _, _ := strings.Cut(string(out), "\n")
	return first
}
