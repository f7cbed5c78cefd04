package namespace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/mount"
	"casemate.dev/internal/linux/userns"
	"casemate.dev/internal/rootfs"
)

// layerAttr is what every copy of a layer is mounted with. Only the overlay's own flags count for the
// sandbox, so programs in it still run; but nothing in a layer can be executed, followed or opened as
// a device through the copy itself (HARDENING 9).
const layerAttr = mount.NoSuid | mount.NoDev | mount.NoExec | mount.NoSymFollow

// bindAttr is what a bind is mounted with: the programs of /usr must run.
const bindAttr = mount.ReadOnly | mount.NoSuid | mount.NoDev

// maxLowers bounds the layers of one overlay: what fits with the other files into one message.
const maxLowers = 64

// checkPlan refuses what can't be mounted safely, before anything is made.
func checkPlan(s isolation.Spec) error {
	bad := func(format string, args ...any) error { return errs.New(errs.InvalidArgument, format, args...) }
	r := s.Root
	if s.Profile != isolation.Locked && s.Profile != isolation.Standard {
		return bad("profile %q is none of locked and standard", s.Profile)
	}
	if len(r.Lowers) == 0 || len(r.Lowers) > maxLowers {
		return bad("root has %d layers, between 1 and %d are possible", len(r.Lowers), maxLowers)
	}
	hosts := append([]string{r.Upper, r.Work}, r.Lowers...)
	targets := make([]string, 0, len(r.Binds)+len(r.Workspaces))
	for _, b := range r.Binds {
		hosts, targets = append(hosts, b.Source), append(targets, b.Target)
	}
	for _, w := range r.Workspaces {
		hosts, targets = append(hosts, w.Source, w.Upper, w.Work), append(targets, w.Target)
		hosts = append(hosts, w.Lowers...)
		if len(w.Lowers) >= maxLowers {
			return bad("workspace %s has %d layers, at most %d are possible", w.Target, len(w.Lowers), maxLowers-1)
		}
	}
	for _, f := range s.Files {
		targets = append(targets, f.Path)
	}
	for _, p := range hosts {
		if !filepath.IsAbs(p) || filepath.Clean(p) != p {
			return bad("path %q of the root is not absolute and clean", p)
		}
	}
	for _, t := range targets {
		if !path.IsAbs(t) || path.Clean(t) != t || t == "/" {
			return bad("mount target %q is not an absolute, clean path below /", t)
		}
		if first, _, _ := strings.Cut(t[1:], "/"); first == "proc" || first == "sys" || first == "dev" {
			return bad("mount target %q lies in what the kernel provides", t)
		}
	}
	return nil
}

// builder turns a Plan into a launch and the files that go with it.
type builder struct {
	spec   isolation.Spec
	first  uint32   // of the sandbox's id range
	userNS *os.File // maps the range
	launch guestwire.Launch
	files  []*os.File
	own    []*os.File // those of files that close closes
}

// add takes over a file and returns its index in the message.
func (b *builder) add(f *os.File) int {
	b.own = append(b.own, f)
	return b.lend(f)
}

// lend is add for a file that stays the caller's.
func (b *builder) lend(f *os.File) int {
	b.files = append(b.files, f)
	return len(b.files) - 1
}

func (b *builder) close() {
	for _, f := range b.own {
		_ = f.Close()
	}
	b.own, b.files = nil, nil
}

// root adds the root overlay, the binds and the workspaces.
func (b *builder) root(ctx context.Context) error {
	r := b.spec.Root
	var err error
	if b.launch.Root, err = b.overlay(mapped(r.Lowers, b.userNS), r.Upper, r.Work); err != nil {
		return err
	}
	for _, bind := range r.Binds {
		if err := b.bind(bind); err != nil {
			return err
		}
	}
	if len(r.Workspaces) == 0 {
		return nil
	}
	uid, gid, err := lookupUser(r.Lowers, r.User)
	if err != nil {
		return err
	}
	for _, w := range r.Workspaces {
		if err := b.workspace(ctx, w, uid, gid); err != nil {
			return err
		}
	}
	return nil
}

// lowerLayer is a read-only layer and what maps its ids.
type lowerLayer struct {
	dir string
	ns  *os.File
}

func mapped(dirs []string, ns *os.File) []lowerLayer {
	all := make([]lowerLayer, len(dirs))
	for i, dir := range dirs {
		all[i] = lowerLayer{dir, ns}
	}
	return all
}

// overlay adds the layers of one overlay; the upper is mapped through the range.
func (b *builder) overlay(lowers []lowerLayer, upper, work string) (guestwire.Overlay, error) {
	var o guestwire.Overlay
	for _, l := range lowers {
		m, err := layer(l.dir, l.ns, layerAttr|mount.ReadOnly)
		if err != nil {
			return o, err
		}
		o.Lowers = append(o.Lowers, b.add(m))
	}
	// overlayfs wants upper and work on one mount, so the directory above both is what is copied.
	top, err := commonParent(upper, work)
	if err != nil {
		return o, err
	}
	m, err := layer(top, b.userNS, layerAttr)
	if err != nil {
		return o, err
	}
	o.Upper = b.add(m)
	o.UpperDir, o.WorkDir = upper[len(top)+1:], work[len(top)+1:]
	for _, name := range []string{o.UpperDir, o.WorkDir} {
		if strings.ContainsAny(name, ",:\\") {
			return o, errs.New(errs.InvalidArgument, "directory name %q can't be an overlay's option", name)
		}
	}
	return o, nil
}

// layer returns a detached copy of the mount at dir, with ids mapped through ns where that is not nil.
func layer(dir string, ns *os.File, attr mount.Attr) (*os.File, error) {
	m, err := mount.Clone(dir, false)
	if err != nil {
		return nil, err
	}
	if err := mount.SetAttr(m, mount.Change{Set: attr, UserNS: ns}); err != nil {
		_ = m.Close()
		if ns != nil {
			return nil, errs.Wrap(err, errs.Unsupported, "the data directory's file system has no idmapped mounts").
				WithHint("put the data directory on ext4, XFS or btrfs, with Linux 6.1 or newer")
		}
		return nil, err
	}
	return m, nil
}

// commonParent returns the closest directory above both paths, which it must lie strictly above.
func commonParent(a, c string) (string, error) {
	dir := path.Dir(a)
	for dir != "/" && !strings.HasPrefix(c, dir+"/") {
		dir = path.Dir(dir)
	}
	if dir == "/" || a == c {
		return "", errs.New(errs.InvalidArgument, "upper %q and work %q have no directory of their own above them", a, c)
	}
	return dir, nil
}

// bind adds a read-only bind. Without recursion: what the host mounted below stays the host's.
func (b *builder) bind(bind rootfs.Bind) error {
	var st unix.Stat_t
	if err := unix.Lstat(bind.Source, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: bind.Source, Err: err}
	}
	m := guestwire.Mount{Target: bind.Target}
	var err error
	switch isDir := st.Mode&unix.S_IFMT == unix.S_IFDIR; {
	case isDir:
		m.File, m.Overlay, err = b.hiddenBind(bind)
	// mountinfo shows where on its file system a mount begins. That tells nothing new only where the
	// path is the same inside.
	case bind.Source == bind.Target:
		m.Single = true
		m.File, err = b.plainBind(bind)
	default:
		err = errs.New(errs.InvalidArgument, "the single file %q can't show under another path", bind.Target)
	}
	if err != nil {
		return err
	}
	b.launch.Mounts = append(b.launch.Mounts, m)
	return nil
}

func (b *builder) plainBind(bind rootfs.Bind) (file int, err error) {
	var ns *os.File
	if bind.Mapped {
		ns = b.userNS
	}
	m, err := layer(bind.Source, ns, bindAttr)
	if err != nil {
		return 0, err
	}
	return b.add(m), nil
}

// hiddenBind shows a directory without saying where it lies: an empty one as another empty one, any
// other through an overlay, whose root is "/". Its files have inodes that no other sandbox has, nor the host: who could watch the very
// ones that all use (inotify(7)) would learn of every program that the host and the other sandboxes start.
func (b *builder) hiddenBind(bind rootfs.Bind) (file int, o *guestwire.Overlay, err error) {
	empty, err := isEmpty(bind.Source)
	if err != nil {
		return 0, nil, err
	}
	if empty {
		return guestwire.Prepared, nil, nil
	}
	var ns *os.File
	if bind.Mapped {
		ns = b.userNS
	}
	m, err := layer(bind.Source, ns, layerAttr|mount.ReadOnly)
	if err != nil {
		return 0, nil, err
	}
	return 0, &guestwire.Overlay{Lowers: []int{b.add(m)}, Upper: guestwire.NoUpper}, nil
}

func isEmpty(dir string) (bool, error) {
	f, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer func() { _ = f.Close() }()
	_, err = f.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		return true, nil
	}
	return false, err
}

// workspace adds an overlay over a directory of the host. The id map shows its owner as the sandbox's
// default user, and nobody else: files of others have no owner inside and can be neither changed nor,
// unless everybody may, read.
func (b *builder) workspace(ctx context.Context, w rootfs.Workspace, uid, gid uint32) error {
	var st unix.Stat_t
	if err := unix.Stat(w.Source, &st); err != nil {
		return errs.Wrap(err, errs.NotFound, "the workspace's directory is not there")
	}
	ns, err := userns.New(ctx,
		[]userns.Range{{Inside: uint32(w.OwnerUID), Outside: b.first + uid, Count: 1}},
		[]userns.Range{{Inside: uint32(w.OwnerGID), Outside: b.first + gid, Count: 1}})
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	// What was committed of it has inside-ids, its source those of its owner.
	o, err := b.overlay(append(mapped(w.Lowers, b.userNS), lowerLayer{w.Source, ns}), w.Upper, w.Work)
	if err != nil {
		return fmt.Errorf("workspace %s: %w", w.Target, err)
	}
	b.launch.Mounts = append(b.launch.Mounts, guestwire.Mount{
		Target: w.Target, Overlay: &o, UID: uid, GID: gid, Mode: st.Mode & 0o7777,
	})
	return nil
}
