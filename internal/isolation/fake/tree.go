package fake

import (
	"path"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

// maxLinks bounds how many symbolic links one path may pass, as the kernel does (path_resolution(7)).
const maxLinks = 40

// node is a file in memory.
type node struct {
	kind     guestwire.FileType
	mode     uint32
	uid, gid int
	mtime    time.Time
	data     []byte
	kids     map[string]*node
	target   string
	attrs    map[string]string // extended attributes
}

// tree is a file system in memory with a limit on its bytes.
type tree struct {
	// mu guards the fields below and every node.
	mu       sync.Mutex
	root     *node
	limit    int64
	used     int64
	watchers map[*watcher]bool
}

func newTree(limit int64) *tree {
	return &tree{root: newDir(0, 0o755), limit: limit, watchers: map[*watcher]bool{}}
}

func newDir(uid int, mode uint32) *node {
	return &node{kind: guestwire.TypeDir, mode: mode, uid: uid, gid: uid, mtime: time.Now(), kids: map[string]*node{}}
}

// fill makes what a template has.
func (t *tree) fill(root isolation.Root) {
	root0 := user{name: "root", home: "/root"}
	for _, d := range []struct {
		path string
		uid  int
		mode uint32
	}{
		{"/bin", 0, 0o755},
		{"/etc", 0, 0o755},
		{"/home", 0, 0o755},
		{"/home/user", userID, 0o755},
		{"/root", 0, 0o700},
		{"/tmp", 0, 0o1777},
		{"/usr/bin", 0, 0o755},
	} {
		_, _ = t.mkdir(root0, d.path, d.mode, true)
		_ = t.chown(d.path, d.uid, d.mode)
	}
	_, _ = t.write(root0, "/etc/passwd", []byte("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"), writeOptions{mode: 0o644})
	for _, w := range root.Workspaces {
		_, _ = t.mkdir(root0, w.Target, 0o755, true)
		_ = t.chown(w.Target, userID, 0o755)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.used = 0 // what the template holds counts for nobody
}

func (t *tree) chown(p string, uid int, mode uint32) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, _, err := t.findLocked(p, true)
	if err == nil {
		n.uid, n.gid, n.mode = uid, uid, mode
	}
	return err
}

func (t *tree) size() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.used
}

func (t *tree) setLimit(n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.limit = n
}

func (t *tree) isDir(p string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, _, err := t.findLocked(p, true)
	return err == nil && n.kind == guestwire.TypeDir
}

// findLocked resolves an absolute path. It returns the node and its real path.
func (t *tree) findLocked(p string, follow bool) (*node, string, error) {
	todo := strings.Split(path.Clean("/"+p), "/")[1:]
	n, at, links := t.root, "/", 0
	trail := []*node{t.root}
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		if name == "" {
			continue
		}
		if name == ".." {
			if len(trail) > 1 {
				trail = trail[:len(trail)-1]
			}
			n, at = trail[len(trail)-1], path.Dir(at)
			continue
		}
		if n.kind != guestwire.TypeDir {
			return nil, "", syscall.ENOTDIR
		}
		kid := n.kids[name]
		if kid == nil {
			return nil, "", syscall.ENOENT
		}
		if kid.kind == guestwire.TypeSymlink && (follow || len(todo) > 0) {
			if links++; links > maxLinks {
				return nil, "", syscall.ELOOP
			}
			if strings.HasPrefix(kid.target, "/") {
				n, at, trail = t.root, "/", trail[:1]
			}
			todo = append(strings.Split(kid.target, "/"), todo...)
			continue
		}
		n, at = kid, path.Join(at, name)
		trail = append(trail, n)
	}
	return n, at, nil
}

// parentLocked returns the directory that holds p's last element, and its real path.
func (t *tree) parentLocked(p string) (*node, string, error) {
	n, at, err := t.findLocked(path.Dir(p), true)
	if err == nil && n.kind != guestwire.TypeDir {
		err = syscall.ENOTDIR
	}
	return n, at, err
}

func (n *node) info(p string) guestwire.FileInfo {
	i := guestwire.FileInfo{
		Path: p, Name: path.Base(p), Type: n.kind, Size: int64(len(n.data)), Mode: n.mode,
		UID: n.uid, GID: n.gid, Owner: userName(n.uid), Group: userName(n.gid), MTime: n.mtime.UnixNano(), Target: n.target,
	}
	if n.kind == guestwire.TypeSymlink {
		i.Size = int64(len(n.target))
	}
	return i
}

// may checks permission bits: r is 4, w is 2, x is 1.
func (n *node) may(u user, bits uint32) bool {
	switch {
	case u.id == 0 || u.privileged:
		return true
	case u.id == n.uid:
		return n.mode>>6&bits == bits
	}
	return n.mode&bits == bits
}

func (t *tree) stat(p string, follow bool) (guestwire.FileInfo, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, at, err := t.findLocked(p, follow)
	if err != nil {
		return guestwire.FileInfo{}, err
	}
	return n.info(at), nil
}

func (t *tree) list(u user, p string, depth int) ([]guestwire.FileInfo, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, at, err := t.findLocked(p, true)
	switch {
	case err != nil:
		return nil, err
	case n.kind != guestwire.TypeDir:
		return nil, syscall.ENOTDIR
	case !n.may(u, 4):
		return nil, syscall.EACCES
	}
	return listNode(n, at, max(1, depth)), nil
}

func listNode(n *node, at string, depth int) []guestwire.FileInfo {
	names := make([]string, 0, len(n.kids))
	for name := range n.kids {
		names = append(names, name)
	}
	slices.Sort(names)
	var out []guestwire.FileInfo
	for _, name := range names {
		kid := n.kids[name]
		p := path.Join(at, name)
		out = append(out, kid.info(p))
		if kid.kind == guestwire.TypeDir && depth > 1 {
			out = append(out, listNode(kid, p, depth-1)...)
		}
	}
	return out
}

func (t *tree) read(u user, p string) ([]byte, guestwire.FileInfo, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, at, err := t.findLocked(p, true)
	switch {
	case err != nil:
		return nil, guestwire.FileInfo{}, err
	case n.kind == guestwire.TypeDir:
		return nil, guestwire.FileInfo{}, syscall.EISDIR
	case !n.may(u, 4):
		return nil, guestwire.FileInfo{}, syscall.EACCES
	}
	return slices.Clone(n.data), n.info(at), nil
}

type writeOptions struct {
	mode    uint32
	offset  int64 // with inPlace
	inPlace bool
	appends bool
	parents bool
	// prefix names the extended attributes that attrs replaces; "" none.
	prefix string
	attrs  map[string]string
}

// setAttrs replaces the extended attributes that begin with o.prefix.
func (n *node) setAttrs(o writeOptions) {
	if o.prefix == "" {
		return
	}
	for name := range n.attrs {
		if strings.HasPrefix(name, o.prefix) {
			delete(n.attrs, name)
		}
	}
	for name, value := range o.attrs {
		if n.attrs == nil {
			n.attrs = map[string]string{}
		}
		n.attrs[o.prefix+name] = value
	}
}

// more adds to a file's description what a request wants to know beyond it.
func (t *tree) more(i guestwire.FileInfo, r guestwire.PathRequest) guestwire.FileInfo {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, at, err := t.findLocked(i.Path, true)
	if err != nil {
		return i
	}
	if r.Resolve && i.Type == guestwire.TypeSymlink {
		i.LeadsTo = &guestwire.LinkEnd{Path: at, Type: n.kind, Mode: n.mode}
	}
	for name, value := range n.attrs {
		rest, ok := strings.CutPrefix(name, r.Attributes)
		if !ok || r.Attributes == "" {
			continue
		}
		if i.Attributes == nil {
			i.Attributes = map[string]string{}
		}
		i.Attributes[rest] = value
	}
	return i
}

func (t *tree) write(u user, p string, data []byte, o writeOptions) (guestwire.FileInfo, error) {
	if o.parents {
		if _, err := t.mkdir(u, path.Dir(p), 0o755, true); err != nil {
			return guestwire.FileInfo{}, err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if n, at, err := t.findLocked(p, true); err == nil {
		return t.overwriteLocked(u, n, at, data, o)
	}
	dir, at, err := t.parentLocked(p)
	switch {
	case err != nil:
		return guestwire.FileInfo{}, err
	case o.inPlace:
		return guestwire.FileInfo{}, syscall.ENOENT
	case !dir.may(u, 3):
		return guestwire.FileInfo{}, syscall.EACCES
	}
	if o.mode == 0 {
		o.mode = 0o644
	}
	n := &node{kind: guestwire.TypeFile, mode: o.mode, uid: u.id, gid: u.id}
	if err := t.setLocked(n, data); err != nil {
		return guestwire.FileInfo{}, err
	}
	n.setAttrs(o)
	name := path.Base(p)
	dir.kids[name] = n
	full := path.Join(at, name)
	t.notifyLocked("create", full)
	t.notifyLocked("write", full)
	return n.info(full), nil
}

func (t *tree) overwriteLocked(u user, n *node, at string, data []byte, o writeOptions) (guestwire.FileInfo, error) {
	switch {
	case n.kind == guestwire.TypeDir:
		return guestwire.FileInfo{}, syscall.EISDIR
	case !n.may(u, 2):
		return guestwire.FileInfo{}, syscall.EACCES
	}
	if o.appends {
		o.offset = int64(len(n.data))
		o.inPlace = true
	}
	if o.inPlace {
		whole := slices.Clone(n.data)
		if grow := o.offset + int64(len(data)) - int64(len(whole)); grow > 0 {
			whole = append(whole, make([]byte, grow)...)
		}
		copy(whole[o.offset:], data)
		data = whole
	}
	if err := t.setLocked(n, data); err != nil {
		return guestwire.FileInfo{}, err
	}
	if o.mode != 0 {
		n.mode = o.mode
	}
	if u.privileged {
		n.uid, n.gid = u.id, u.id
	}
	n.setAttrs(o)
	t.notifyLocked("write", at)
	return n.info(at), nil
}

func (t *tree) setLocked(n *node, data []byte) error {
	grow := int64(len(data) - len(n.data))
	if t.limit > 0 && t.used+grow > t.limit {
		return syscall.ENOSPC
	}
	t.used += grow
	n.data, n.mtime = slices.Clone(data), time.Now()
	return nil
}

func (t *tree) mkdir(u user, p string, mode uint32, parents bool) (guestwire.FileInfo, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p = path.Clean("/" + p)
	if n, at, err := t.findLocked(p, true); err == nil {
		if parents && n.kind == guestwire.TypeDir {
			return n.info(at), nil
		}
		return guestwire.FileInfo{}, syscall.EEXIST
	}
	if parents {
		return t.mkdirAllLocked(u, p, mode)
	}
	dir, at, err := t.parentLocked(p)
	if err != nil {
		return guestwire.FileInfo{}, err
	}
	return t.mkdirInLocked(u, dir, at, path.Base(p), mode)
}

func (t *tree) mkdirAllLocked(u user, p string, mode uint32) (guestwire.FileInfo, error) {
	dir, at := t.root, "/"
	for _, name := range strings.Split(p, "/")[1:] {
		if kid := dir.kids[name]; kid != nil {
			n, real, err := t.findLocked(path.Join(at, name), true)
			if err != nil {
				return guestwire.FileInfo{}, err
			}
			if n.kind != guestwire.TypeDir {
				return guestwire.FileInfo{}, syscall.ENOTDIR
			}
			dir, at = n, real
			continue
		}
		info, err := t.mkdirInLocked(u, dir, at, name, mode)
		if err != nil {
			return guestwire.FileInfo{}, err
		}
		dir, at = dir.kids[name], info.Path
	}
	return dir.info(at), nil
}

func (t *tree) mkdirInLocked(u user, dir *node, at, name string, mode uint32) (guestwire.FileInfo, error) {
	if !dir.may(u, 3) {
		return guestwire.FileInfo{}, syscall.EACCES
	}
	if mode == 0 {
		mode = 0o755
	}
	n := newDir(u.id, mode)
	dir.kids[name] = n
	p := path.Join(at, name)
	t.notifyLocked("create", p)
	return n.info(p), nil
}

func (t *tree) symlink(u user, target, p string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	dir, at, err := t.parentLocked(p)
	switch name := path.Base(p); {
	case err != nil:
		return err
	case dir.kids[name] != nil:
		return syscall.EEXIST
	case !dir.may(u, 3):
		return syscall.EACCES
	default:
		dir.kids[name] = &node{kind: guestwire.TypeSymlink, mode: 0o777, uid: u.id, gid: u.id, mtime: time.Now(), target: target}
		t.notifyLocked("create", path.Join(at, name))
	}
	return nil
}

func (t *tree) move(u user, from, to string, overwrite bool) (guestwire.FileInfo, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	src, srcAt, err := t.parentLocked(from)
	if err != nil {
		return guestwire.FileInfo{}, err
	}
	dst, dstAt, err := t.parentLocked(to)
	if err != nil {
		return guestwire.FileInfo{}, err
	}
	n, old := src.kids[path.Base(from)], dst.kids[path.Base(to)]
	switch {
	case n == nil:
		return guestwire.FileInfo{}, syscall.ENOENT
	case old != nil && !overwrite:
		return guestwire.FileInfo{}, syscall.EEXIST
	case old != nil && old.kind == guestwire.TypeDir && len(old.kids) > 0:
		return guestwire.FileInfo{}, syscall.ENOTEMPTY
	case !src.may(u, 3) || !dst.may(u, 3):
		return guestwire.FileInfo{}, syscall.EACCES
	}
	if old != nil {
		t.used -= int64(len(old.data))
	}
	delete(src.kids, path.Base(from))
	dst.kids[path.Base(to)] = n
	t.notifyLocked("rename", path.Join(srcAt, path.Base(from)))
	p := path.Join(dstAt, path.Base(to))
	t.notifyLocked("create", p)
	return n.info(p), nil
}

func (t *tree) remove(u user, p string, recursive bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if path.Clean(p) == "/" {
		return syscall.EBUSY
	}
	dir, at, err := t.parentLocked(p)
	if err != nil {
		return err
	}
	n := dir.kids[path.Base(p)]
	switch {
	case n == nil:
		return syscall.ENOENT
	case len(n.kids) > 0 && !recursive:
		return syscall.ENOTEMPTY
	case !dir.may(u, 3):
		return syscall.EACCES
	}
	t.used -= total(n)
	delete(dir.kids, path.Base(p))
	t.notifyLocked("remove", path.Join(at, path.Base(p)))
	return nil
}

func total(n *node) int64 {
	sum := int64(len(n.data))
	for _, kid := range n.kids {
		sum += total(kid)
	}
	return sum
}

func (t *tree) chmod(u user, p string, follow bool, mode *uint32, uid, gid int) (guestwire.FileInfo, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, at, err := t.findLocked(p, follow)
	switch {
	case err != nil:
		return guestwire.FileInfo{}, err
	case u.id != 0 && !u.privileged && (u.id != n.uid || uid >= 0 && uid != n.uid):
		return guestwire.FileInfo{}, syscall.EPERM
	}
	if mode != nil {
		n.mode = *mode & 0o7777
	}
	if uid >= 0 {
		n.uid = uid
	}
	if gid >= 0 {
		n.gid = gid
	}
	t.notifyLocked("chmod", at)
	return n.info(at), nil
}
