package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
)

// Template base is a Debian root file system of its own, for both profiles. Its files have inside-ids:
// they belong to root, 0, and are shown to each sandbox through its id map. Setuid bits are kept, so
// that sudo works inside; the store's directory and mounts keep them from the host's users.

// baseVersion changes when what is built here changes.
const baseVersion = 1

// baseSuite is the Debian release.
const baseSuite = "bookworm"

// basePackages come on top of debootstrap's minbase.
const basePackages = "bash,ca-certificates,curl,file,git,jq,less,libnss-myhostname,patch,procps," +
	"python-is-python3,python3,python3-pip,python3-venv,sudo,unzip,wget,xz-utils,zip"

// baseTemplate is a built Debian root file system.
type baseTemplate struct {
	dir  string
	meta meta
}

func (t *baseTemplate) plan() Plan {
	return Plan{
		Lowers: []string{t.dir + "/root"},
		Env: map[string]string{
			"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8",
		},
		User: defaultUser, Dir: "/home/" + defaultUser,
	}
}

// openBase finds the newest complete build; nil where there is none.
func (s *Store) openBase() (*baseTemplate, error) {
	dirs, err := filepath.Glob(filepath.Join(s.templateDir(), "base-*"))
	if err != nil {
		return nil, err
	}
	var newest *baseTemplate
	for _, dir := range dirs {
		m, err := readMeta(dir)
		if err != nil || m.Version != baseVersion {
			continue
		}
		if newest == nil || m.BuiltAt.After(newest.meta.BuiltAt) {
			newest = &baseTemplate{dir: dir, meta: m}
		}
	}
	return newest, nil
}

// Progress is called while a template is built: step names what is done, fraction says how much of the
// whole is done, line is one line of output or "".
type Progress func(step string, fraction float64, line string)

// Build builds a template that is not built yet, or with force again. It downloads packages, takes a
// minute or two, and leaves nothing behind where it fails. A second call while one runs is refused.
// Kinds: NotFound, FailedPrecondition (being built), Unsupported (debootstrap is missing).
func (s *Store) Build(ctx context.Context, name string, force bool, progress func(step string, fraction float64, line string)) (Template, error) {
	if progress == nil {
		progress = func(string, float64, string) {}
	}
	switch name {
	case "base":
		if err := s.buildBase(ctx, force, progress); err != nil {
			return Template{}, err
		}
	case "host":
		if s.templates.host == nil {
			return Template{}, errs.Wrap(s.templates.hostErr, errs.Unsupported, "template host is not available on this machine")
		}
	default:
		return Template{}, errs.New(errs.NotFound, "no template %q", name)
	}
	all, err := s.Templates(ctx)
	if err != nil {
		return Template{}, err
	}
	for _, t := range all {
		if t.Name == name {
			return t, nil
		}
	}
	return Template{}, errs.New(errs.NotFound, "no template %q", name)
}

func (s *Store) buildBase(ctx context.Context, force bool, progress Progress) error {
	t := &s.templates
	t.mu.Lock()
	switch {
	case t.building:
		t.mu.Unlock()
		return errs.New(errs.FailedPrecondition, "template base is being built")
	case t.base != nil && !force:
		t.mu.Unlock()
		return nil
	}
	t.building = true
	t.mu.Unlock()
	built, err := s.makeBase(ctx, progress)
	t.mu.Lock()
	t.building = false
	if err == nil {
		t.base = built
	}
	t.mu.Unlock()
	if err != nil {
		return err
	}
	s.dropTemplates()
	progress("done", 1, "")
	return nil
}

// makeBase builds in a directory of its own, and gives it its name when all is done.
func (s *Store) makeBase(ctx context.Context, progress Progress) (*baseTemplate, error) {
	tmp, err := os.MkdirTemp(s.templateDir(), "tmp-base-")
	if err != nil {
		return nil, err
	}
	undo := cleanup.New(func() { s.warnIf("remove a build's leftovers", os.RemoveAll(tmp)) })
	defer undo.Run()
	root := filepath.Join(tmp, "root")
	sources := readAptSources("/etc/apt")
	if err := bootstrap(ctx, root, sources, progress); err != nil {
		return nil, err
	}
	progress("configure", 0.96, "")
	if err := configureBase(root, sources); err != nil {
		return nil, fmt.Errorf("configure base: %w", err)
	}
	progress("measure", 0.98, "")
	size, err := treeSize(root)
	if err != nil {
		return nil, err
	}
	m := meta{Version: baseVersion, SizeBytes: size, BuiltAt: time.Now().UTC(), Source: "Debian " + baseSuite}
	if err := writeMeta(tmp, m); err != nil {
		return nil, err
	}
	dir := filepath.Join(s.templateDir(), fmt.Sprintf("base-%d", m.BuiltAt.UnixNano()))
	if err := os.Rename(tmp, dir); err != nil {
		return nil, err
	}
	undo.Release()
	return &baseTemplate{dir: dir, meta: m}, nil
}

// configureBase turns what debootstrap left into a sandbox's root.
func configureBase(root string, sources aptSources) error {
	in := func(name string) string { return filepath.Join(root, name) }
	// Nothing of the build, and nothing of the host: its resolv.conf and hostname were copied in.
	for _, pattern := range []string{
		"dev/*", "var/cache/apt/*.bin", "var/cache/apt/archives/*.deb", "var/lib/apt/lists/*", "var/log/*", "tmp/*",
		"var/cache/debconf/*-old", "var/lib/dpkg/*-old", "etc/*-", "debootstrap",
		"usr/lib/python3*/EXTERNALLY-MANAGED", // there is no other user of this system's Python than the sandbox's
	} {
		paths, err := filepath.Glob(in(pattern))
		if err != nil {
			return err
		}
		for _, p := range paths {
			if err := os.RemoveAll(p); err != nil {
				return err
			}
		}
	}
	if err := writeFiles(root, map[string]string{
		"etc/hosts": hostFiles()["etc/hosts"], "etc/resolv.conf": "", "etc/hostname": "sandbox\n", "etc/machine-id": "",
		"etc/timezone": "Etc/UTC\n", "etc/profile": profile, "root/.profile": "",
		"etc/dpkg/dpkg.cfg.d/sandbox":  "# A sandbox that dies half way through is thrown away.\nforce-unsafe-io\n",
		"etc/apt/apt.conf.d/50sandbox": "APT::Install-Recommends \"false\";\nAcquire::Languages \"none\";\n",
		"etc/apt/sources.list":         sources.text(),
		"etc/sudoers.d/" + defaultUser: defaultUser + " ALL=(ALL:ALL) NOPASSWD: ALL\n",
	}); err != nil {
		return err
	}
	if err := os.Chmod(in("etc/sudoers.d/"+defaultUser), 0o440); err != nil {
		return err
	}
	if err := addUser(root); err != nil {
		return err
	}
	return stripImported(root)
}

// addUser adds the default user, with a home made from /etc/skel.
func addUser(root string) error {
	for name, line := range map[string]string{
		"etc/passwd":  defaultUser + ":x:1000:1000::/home/" + defaultUser + ":/bin/bash\n",
		"etc/group":   defaultUser + ":x:1000:\n",
		"etc/shadow":  defaultUser + ":!:20000:0:99999:7:::\n",
		"etc/gshadow": defaultUser + ":!::\n",
	} {
		f, err := os.OpenFile(filepath.Join(root, name), os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return err
		}
		_, err = f.WriteString(line)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	home := filepath.Join(root, "home", defaultUser)
	if err := copyPublic(filepath.Join(root, "etc/skel"), home); err != nil {
		return err
	}
	return filepath.WalkDir(home, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, defaultUID, defaultUID)
	})
}

// treeSize sums the sizes of regular files in a tree of our own making.
func treeSize(root string) (int64, error) {
	var size int64
	err := filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if st, err := d.Info(); err != nil {
			return err
		} else if st.Mode().IsRegular() {
			size += st.Size()
		}
		return nil
	})
	return size, err
}

// dropTemplates removes layers of templates that are not the newest and that no sandbox uses, and what
// builds left that were killed.
func (s *Store) dropTemplates() {
	t := &s.templates
	t.mu.Lock()
	defer t.mu.Unlock()
	used := map[string]bool{filepath.Base(s.emptyDir()): true}
	if t.host != nil {
		used[filepath.Base(t.host.dir)] = true
	}
	if t.base != nil {
		used[filepath.Base(t.base.dir)] = true
	}
	uses, err := s.uses()
	if err != nil {
		s.warn("list templates in use", err)
		return
	}
	for _, u := range uses {
		used[u.base] = true
	}
	for _, base := range s.keptBases() {
		used[base] = true
	}
	entries, err := os.ReadDir(s.templateDir())
	s.warnIf("list templates", err)
	for _, e := range entries {
		if used[e.Name()] || strings.HasPrefix(e.Name(), "tmp-") && t.building {
			continue
		}
		s.warnIf("remove old template", os.RemoveAll(filepath.Join(s.templateDir(), e.Name())))
	}
}
