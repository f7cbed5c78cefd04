package rootfs

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"casemate.dev/internal/errs"
)

// Template host shows the host's own /usr, read-only, below a made-up rest. Nothing of the host's
// /etc shows but what is listed here: public files that programs in /usr need. /usr/local and
// /usr/etc, where hosts keep settings and programs of their own, are covered by an empty directory.
// It is for profile locked only: /usr is mounted without id mapping, so its files belong to nobody
// inside, and nothing in it could be changed by a root inside either.

// hostVersion changes when what is made up here changes.
const hostVersion = 1

// hostCovered are the parts of /usr that don't show.
func hostCovered() []string { return []string{"/usr/local", "/usr/etc"} }

// hostCopied are files and directories of the host's /etc that are the same on every machine of a
// distribution, or public: no settings, no keys, no names of people.
func hostCopied() []string {
	return []string{
		"alternatives", "debian_version", "fonts", "java-17-openjdk", "java-21-openjdk", "mime.types", "protocols", "rpc",
		"services", "ssl/certs", "ssl/openssl.cnf",
	}
}

// hostTemplate is the made-up layer.
type hostTemplate struct {
	dir  string
	meta meta
}

func (t *hostTemplate) plan(empty string) Plan {
	p := Plan{
		Lowers: []string{t.dir + "/root"},
		Binds:  []Bind{{Source: "/usr", Target: "/usr"}},
		Env:    map[string]string{"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"},
		User:   defaultUser, Dir: "/home/" + defaultUser,
	}
	for _, dir := range hostCovered() {
		if st, err := os.Lstat(dir); err == nil && st.IsDir() {
			p.Binds = append(p.Binds, Bind{Source: empty, Target: dir, Mapped: true})
		}
	}
	return p
}

// openHost finds the layer, or makes it. What it holds depends on the host, so its name tells of what
// it was made: after an update of the host the next start of the server makes another one, and
// sandboxes that still run keep theirs.
func (s *Store) openHost(ctx context.Context) (*hostTemplate, error) {
	if st, err := os.Stat("/usr/bin/sh"); err != nil || !st.Mode().IsRegular() {
		return nil, errs.Wrap(err, errs.Unsupported, "this machine has no /usr/bin/sh")
	}
	key, err := hostFingerprint()
	if err != nil {
		return nil, err
	}
	place := filepath.Join(s.templateDir(), "host-"+key)
	if m, err := readMeta(place); err == nil {
		return &hostTemplate{dir: place, meta: m}, nil
	}
	tmp, err := os.MkdirTemp(s.templateDir(), "tmp-host-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	root := filepath.Join(tmp, "root")
	if err := makeHostRoot(ctx, root); err != nil {
		return nil, err
	}
	size, err := treeSize(root)
	if err != nil {
		return nil, err
	}
	m := meta{Version: hostVersion, SizeBytes: size, BuiltAt: time.Now().UTC(), Source: "host"}
	if err := writeMeta(tmp, m); err != nil {
		return nil, err
	}
	if err := os.RemoveAll(place); err != nil { // of a server that was killed half way
		return nil, err
	}
	if err := os.Rename(tmp, place); err != nil {
		return nil, err
	}
	return &hostTemplate{dir: place, meta: m}, nil
}

// hostFingerprint changes with everything that the layer is made of: names, sizes and times of what is
// copied, and of the directories that the linker's cache lists.
func hostFingerprint() (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "version %d\n%s", hostVersion, profile)
	note := func(path string, d fs.DirEntry, err error) error {
		if notThere(err) {
			return nil
		}
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%q %v %d %d\n", path, st.Mode(), st.Size(), st.ModTime().UnixNano())
		return nil
	}
	for _, name := range hostCopied() {
		if err := filepath.WalkDir("/etc/"+name, note); err != nil {
			return "", err
		}
	}
	dirs, err := filepath.Glob("/usr/lib/*-linux-gnu*")
	if err != nil {
		return "", err
	}
	for _, dir := range append(dirs, "/usr/lib", "/lib", "/lib64") {
		if st, err := os.Lstat(dir); err == nil {
			fmt.Fprintf(h, "%q %d\n", dir, st.ModTime().UnixNano())
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8]), nil
}

// makeHostRoot makes up everything but /usr. Ids are inside-ids.
func makeHostRoot(ctx context.Context, root string) error {
	if err := makeDirs(root, hostDirs()); err != nil {
		return err
	}
	// Where the host keeps programs outside of /usr, there is nothing to show them from.
	for _, name := range []string{"bin", "sbin", "lib", "lib32", "lib64", "libx32"} {
		target, err := os.Readlink("/" + name)
		switch {
		case notThere(err):
			continue
		case err != nil || target != "usr/"+name && target != "/usr/"+name:
			return errs.New(errs.Unsupported, "/%s of this machine is not a link into /usr", name)
		}
		if err := os.Symlink("usr/"+name, filepath.Join(root, name)); err != nil {
			return err
		}
	}
	if err := writeFiles(root, hostFiles()); err != nil {
		return err
	}
	for _, l := range [...][2]string{
		{"etc/os-release", "../usr/lib/os-release"},
		{"etc/localtime", "/usr/share/zoneinfo/Etc/UTC"},
		{"etc/mtab", "/proc/self/mounts"},
		{"var/run", "/run"},
		{"var/lock", "/run/lock"},
	} {
		if err := os.Symlink(l[1], filepath.Join(root, l[0])); err != nil {
			return err
		}
	}
	for _, name := range hostCopied() {
		if err := copyPublic("/etc/"+name, filepath.Join(root, "etc", name)); err != nil {
			return fmt.Errorf("copy /etc/%s: %w", name, err)
		}
	}
	return linkerCache(ctx, root)
}

// madeDir is one directory of a made-up tree.
type madeDir struct {
	path     string
	mode     fs.FileMode
	uid, gid int
}

func hostDirs() []madeDir {
	sticky := fs.ModeSticky | 0o777
	dirs := []madeDir{{path: "", mode: 0o755}}
	for _, p := range []string{
		"dev", "etc", "etc/ssl", "home", "media", "mnt", "opt", "proc", "run", "srv", "sys", "usr", "var",
		"var/cache", "var/lib", "var/log", "var/spool",
	} {
		dirs = append(dirs, madeDir{path: p, mode: 0o755})
	}
	return append(dirs,
		madeDir{path: "root", mode: 0o700},
		madeDir{path: "home/" + defaultUser, mode: 0o755, uid: defaultUID, gid: defaultUID},
		madeDir{path: "run/lock", mode: sticky},
		madeDir{path: "tmp", mode: sticky},
		madeDir{path: "var/tmp", mode: sticky})
}

func makeDirs(root string, dirs []madeDir) error {
	for _, d := range dirs {
		path := filepath.Join(root, d.path)
		if err := os.Mkdir(path, 0o700); err != nil {
			return err
		}
		if err := os.Chown(path, d.uid, d.gid); err != nil {
			return err
		}
		if err := os.Chmod(path, d.mode); err != nil { // whatever the umask
			return err
		}
	}
	return nil
}

func writeFiles(root string, files map[string]string) error {
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			return err
		}
		if err := os.Chmod(path, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// copyPublic copies regular files and symlinks that everybody on the host may read; the rest it leaves
// out, as it does what is not there.
func copyPublic(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if notThere(err) {
			return nil
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		dst := filepath.Join(to, rel)
		st, err := d.Info()
		if err != nil {
			return err
		}
		switch {
		case d.IsDir() && st.Mode().Perm()&0o005 == 0o005:
			return os.Mkdir(dst, 0o755)
		case d.IsDir():
			return fs.SkipDir
		case d.Type() == fs.ModeSymlink:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			return os.Symlink(target, dst)
		case d.Type().IsRegular() && st.Mode().Perm()&0o004 != 0:
			return copyFile(path, dst)
		}
		return nil
	})
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// linkerCache makes an ld.so.cache of the libraries that show inside. The host's own would name those
// of /usr/local, and what else its /etc/ld.so.conf lists.
func linkerCache(ctx context.Context, root string) error {
	conf := filepath.Join(root, "etc/ld.so.conf")
	var text string
	multiarch, err := filepath.Glob("/usr/lib/*-linux-gnu*")
	if err != nil {
		return err
	}
	for _, dir := range multiarch {
		text += dir + "\n"
	}
	if err := writeFiles(root, map[string]string{"etc/ld.so.conf": text}); err != nil {
		return err
	}
	ldconfig, err := findProgram("ldconfig")
	if err != nil {
		return nil // not glibc: its linker has no cache
	}
	cache := filepath.Join(root, "etc/ld.so.cache")
	cmd := exec.CommandContext(ctx, ldconfig, "-X", "-f", conf, "-C", cache)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ldconfig: %w: %s", err, out)
	}
	return os.Chmod(cache, 0o644)
}
