package layer

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// Result is what an archive was unpacked to. Paths are relative to the root, which is ".".
type Result struct {
	// DiffID is the digest of the archive itself: sha256:….
	DiffID string `json:"diff_id"`
	// Bytes are the sizes of the files together, Files how many entries there were.
	Bytes int64 `json:"bytes"`
	Files int64 `json:"files"`
	// Implied are directories that had to be made and that the archive does not describe, each after the one
	// above it, and Whiteouts the whiteouts that were made.
	Implied   []string `json:"implied,omitempty"`
	Whiteouts []string `json:"whiteouts,omitempty"`
	// Nobodies counts the files whose owner or group is above 65,535: no sandbox has such ids, so these
	// files belong to nobody. Devices counts those that were left out, and Attributes the extended attributes.
	Nobodies   int64 `json:"nobodies,omitempty"`
	Devices    int64 `json:"devices,omitempty"`
	Attributes int64 `json:"attributes,omitempty"`
}

// maxID is the largest id inside a sandbox, and nobody who owns what no id of a sandbox can.
const (
	maxID  = 65535
	nobody = 65534
)

// unpacker unpacks one archive.
type unpacker struct {
	ctx    context.Context //nolint:containedctx // of the one run
	lim    Limits
	tree   *tree
	result Result
	// described are the directories that the archive has an entry for, with the times that they get at the
	// end: filling them changes these.
	described map[string]times
	opaque    map[string]bool
	whiteouts map[string]bool
	// defaults are the default lists of access of directories, which they get at the end: what is made in
	// one that has it inherits it.
	defaults map[string][]byte
	buf      []byte
}

type times struct{ sec, nsec int64 }

// Unpack fills root, an empty directory that nobody else changes, from the archive that r holds, of size
// compressed bytes. The caller sees to it that r is not read further after an error.
// Kinds: InvalidArgument (a damaged or hostile archive), TooLarge (a limit), ResourceExhausted (the disk), Unsupported.
func Unpack(ctx context.Context, r io.Reader, compressed int64, root *os.File, lim Limits) (Result, error) {
	lim = lim.Filled()
	plain, err := Decompress(r)
	if err != nil {
		return Result{}, err
	}
	defer func() { _ = plain.Close() }()
	ratio := errs.New(errs.TooLarge, "the layer unpacks to more than %d times its size: %d bytes hold at least %d MB",
		lim.Ratio, compressed, lim.archive(compressed)>>20).
		WithHint("if you trust it, start the server with a larger --max-image-ratio")
	var why error = ratio
	if lim.archive(compressed) == lim.Bytes {
		why = errBytes(lim)
	}
	sum := sha256.New()
	in := io.TeeReader(&bounded{plain, lim.archive(compressed), why}, sum)
	u := &unpacker{
		ctx: ctx, lim: lim, tree: newTree(root), described: map[string]times{}, opaque: map[string]bool{},
		whiteouts: map[string]bool{}, defaults: map[string][]byte{}, buf: make([]byte, bufferSize/4),
	}
	defer u.tree.close()
	if err := u.all(tar.NewReader(in)); err != nil {
		return Result{}, corruptUnless(err)
	}
	// What follows the archive's end belongs to its digest, too.
	if _, err := io.Copy(io.Discard, in); err != nil {
		return Result{}, corrupt(err)
	}
	u.result.DiffID = "sha256:" + hex.EncodeToString(sum.Sum(nil))
	return u.result, nil
}

// corruptUnless takes errors of files for what they are, and others for those of the archive.
func corruptUnless(err error) error {
	var path *fs.PathError
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return errs.Wrap(err, errs.ResourceExhausted, "the disk is full").WithHint("make room in the server's data directory")
	case errors.Is(err, syscall.ENAMETOOLONG):
		return errs.Wrap(err, errs.InvalidArgument, "the layer holds a name that is too long for a file system")
	case errors.As(err, &path), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	return corrupt(err)
}

func (u *unpacker) all(in *tar.Reader) error {
	for {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if u.result.Files++; u.result.Files > u.lim.Files {
			return errFiles(u.lim)
		}
		if err := u.entry(h, in); err != nil {
			return fmt.Errorf("entry %q: %w", short(h.Name), err)
		}
	}
	return u.finish()
}

// short bounds a name in an error.
func short(s string) string {
	if len(s) > 200 {
		return s[:200] + "…"
	}
	return s
}

// finish marks what is opaque, sets the times of directories, and gathers what was made. Only now it is known
// what came of a path: entries may have been replaced by later ones.
func (u *unpacker) finish() error {
	for path := range u.opaque {
		if i, err := fd.Lstat(u.tree.root, path); err == nil && i.IsDir() {
			if err := u.tree.markOpaque(path); err != nil {
				return err
			}
		}
	}
	for path, list := range u.defaults {
		if i, err := fd.Lstat(u.tree.root, path); err != nil || !i.IsDir() {
			continue
		}
		dir, err := u.tree.open(path)
		if err != nil {
			return err
		}
		if err := setXattr(dir, defaultList, list); err != nil {
			return err
		}
	}
	for path, t := range u.described {
		if i, err := fd.Lstat(u.tree.root, path); err == nil && i.IsDir() {
			if err := u.tree.touch(path, t); err != nil {
				return err
			}
		}
	}
	for path := range u.whiteouts {
		if i, err := fd.Lstat(u.tree.root, path); err == nil && i.IsWhiteout() {
			u.result.Whiteouts = append(u.result.Whiteouts, path)
		}
	}
	for path := range u.tree.made {
		if _, ok := u.described[path]; ok {
			continue
		}
		if i, err := fd.Lstat(u.tree.root, path); err == nil && i.IsDir() {
			u.result.Implied = append(u.result.Implied, path)
			if err := u.tree.touch(path, times{}); err != nil { // an archive always gives the same tree
				return err
			}
		}
	}
	if _, ok := u.described["."]; !ok {
		u.result.Implied = append(u.result.Implied, ".")
		if err := u.tree.touch(".", times{}); err != nil {
			return err
		}
	}
	slices.Sort(u.result.Implied) // a directory before what is in it
	slices.Sort(u.result.Whiteouts)
	return nil
}

// entry puts one entry of the archive into the tree.
func (u *unpacker) entry(h *tar.Header, in io.Reader) error {
	switch h.Typeflag {
	case tar.TypeXGlobalHeader:
		return nil
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeFifo,
		tar.TypeChar, tar.TypeBlock, tar.TypeCont:
	default:
		return errs.New(errs.Unsupported, "the layer holds an entry of the unknown type %q: %q", string(rune(h.Typeflag)), short(h.Name))
	}
	names, err := split(h.Name)
	if err != nil {
		return err
	}
	if len(names) == 0 {
		if h.Typeflag != tar.TypeDir {
			return refuse("the layer's root is described as something else than a directory")
		}
		return u.describe(".", h)
	}
	if name, ok := strings.CutPrefix(names[len(names)-1], whiteoutPrefix); ok {
		return u.whiteout(names[:len(names)-1], name)
	}
	if h.Typeflag == tar.TypeChar || h.Typeflag == tar.TypeBlock {
		u.result.Devices++
		return nil
	}
	parent, path, err := u.tree.parent(names, true)
	if err == nil {
		err = reserved(path, h.Typeflag)
	}
	if err != nil {
		return err
	}
	name := names[len(names)-1]
	if h.Typeflag == tar.TypeDir {
		return u.directory(h, parent, path, name)
	}
	if h.Typeflag == tar.TypeLink {
		return u.link(h, names)
	}
	if err := u.clear(parent, path, name); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeSymlink:
		err = u.symlink(h, parent, name)
	case tar.TypeFifo:
		err = fd.Fifo(parent, name)
	default:
		return u.file(h, in, parent, name)
	}
	if err != nil {
		return err
	}
	return u.attributes(h, parent, name, nil)
}

func refuse(format string, args ...any) error { return errs.New(errs.InvalidArgument, format, args...) }

// reserved refuses what would put something else in the place of the directories on which every sandbox has
// the kernel's own file systems.
func reserved(path string, kind byte) error {
	if kind != tar.TypeDir && slices.Contains([]string{"dev", "proc", "sys"}, path) {
		return refuse("the layer makes /%s something else than a directory", path)
	}
	return nil
}

// split takes a path of the archive apart. It is relative to the root, whatever it begins with.
func split(path string) ([]string, error) {
	if strings.ContainsRune(path, 0) {
		return nil, refuse("the layer holds a name with a NUL byte")
	}
	var names []string
	for name := range strings.SplitSeq(path, "/") {
		switch name {
		case "", ".":
		case "..":
			return nil, refuse("the layer holds a path that leads out of it: %q", short(path))
		default:
			names = append(names, name)
		}
	}
	if len(names) > maxDepth {
		return nil, refuse("the layer holds a path of more than %d names", maxDepth)
	}
	return names, nil
}

// maxDepth bounds the directories on the way to a file: more than a path of the kernel's length has.
const maxDepth = 2048

// clear removes what has the name of an entry that comes.
func (u *unpacker) clear(parent *os.File, path, name string) error {
	i, err := fd.Lstat(parent, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if i.IsDir() {
		delete(u.described, path)
		delete(u.defaults, path)
		delete(u.tree.made, path)
	}
	return fd.RemoveAll(parent, name)
}

func (u *unpacker) directory(h *tar.Header, parent *os.File, path, name string) error {
	i, err := fd.Lstat(parent, name)
	switch {
	case err == nil && i.IsDir():
		return u.describe(path, h)
	case err == nil:
		hid := i.IsWhiteout()
		if err := u.clear(parent, path, name); err != nil {
			return err
		}
		if hid { // what it removed below must not show through it
			u.opaque[path] = true
		}
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if err := fd.Mkdir(parent, name, 0o755); err != nil {
		return err
	}
	u.tree.made[path] = true
	return u.describe(path, h)
}

// describe gives a directory what an entry says of it.
func (u *unpacker) describe(path string, h *tar.Header) error {
	if _, again := u.described[path]; !again && len(u.described) > int(u.lim.Files) {
		return errFiles(u.lim)
	}
	u.described[path] = timesOf(h)
	dir, err := u.tree.open(path)
	if err != nil {
		return err
	}
	delete(u.defaults, path)
	if list, ok := h.PAXRecords[xattrPrefix+defaultList]; ok {
		u.defaults[path] = []byte(list)
	}
	return u.attributes(h, dir, ".", dir)
}

func timesOf(h *tar.Header) times {
	return times{sec: h.ModTime.Unix(), nsec: int64(h.ModTime.Nanosecond())}
}

func (u *unpacker) symlink(h *tar.Header, parent *os.File, name string) error {
	if h.Linkname == "" || strings.ContainsRune(h.Linkname, 0) {
		return refuse("the layer holds a symbolic link that leads nowhere: %q", short(h.Name))
	}
	return fd.Symlink(h.Linkname, parent, name)
}

// link makes a hard link. What it leads to must be in this layer: it is a file of the layer's own, since every
// directory on the way is.
func (u *unpacker) link(h *tar.Header, names []string) error {
	to, err := split(h.Linkname)
	if err != nil {
		return err
	}
	missing := refuse("the layer holds a hard link from %q to %q, which is no file of the same layer", short(h.Name), short(h.Linkname))
	if len(to) == 0 || slices.Equal(to, names) {
		return missing
	}
	old, _, err := u.tree.parent(to, false)
	if errors.Is(err, fs.ErrNotExist) {
		return missing
	}
	if err != nil {
		return err
	}
	if old, err = fd.OpenDir(old, "."); err != nil { // the tree keeps one directory open at a time
		return err
	}
	defer old.Close()
	i, err := fd.Lstat(old, to[len(to)-1])
	if err != nil || i.IsDir() || i.IsWhiteout() {
		return missing
	}
	parent, path, err := u.tree.parent(names, true)
	if err != nil {
		return err
	}
	name := names[len(names)-1]
	if there, err := fd.Lstat(parent, name); err == nil && there.SameFile(i) {
		return nil
	}
	if err := u.clear(parent, path, name); err != nil {
		return err
	}
	return fd.Link(old, to[len(to)-1], parent, name)
}
