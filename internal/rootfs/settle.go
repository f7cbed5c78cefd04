package rootfs

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/linux/fd"
)

// Two builds of one template run the same programs at different times, and what these write tells when. To be
// comparable, a layer is settled: what only tells the time of the build goes.

// emptied are files that hold nothing but what happened while they were written, or the identity of the one
// machine that wrote them. They stay, empty.
func emptied(p string) bool {
	switch p {
	case "etc/machine-id":
		return true
	}
	return strings.HasPrefix(p, "var/log/")
}

// dropped are what their programs make again: caches that hold times or inode numbers, and what is random.
func dropped(p string) bool {
	switch p {
	case "var/cache/ldconfig/aux-cache", "var/cache/apt/pkgcache.bin", "var/cache/apt/srcpkgcache.bin", "var/lib/systemd/random-seed",
		"var/lib/dbus/machine-id":
		return true
	}
	return false
}

// Settle returns a layer that holds what a committed layer does, but for what tells when and how it was made: no file
// bears a later time than until, logs are empty, caches that hold times are gone, as are directories in which something
// was made and removed again, and Python's compiled files name the time that their source has now. The layer that it
// was made of goes. Nobody may use that one.
func (s *Store) Settle(ctx context.Context, layer string, until time.Time) (Layer, error) {
	l, err := s.settled(ctx, layer, until)
	if err != nil {
		return Layer{}, fmt.Errorf("settle layer %s: %w", layer, err)
	}
	s.kept.change.RLock() // nobody uses it, so none but Collect has to wait
	defer s.kept.change.RUnlock()
	s.warnIf("remove a layer that was settled", s.forgetKept(layer))
	return l, nil
}

func (s *Store) settled(ctx context.Context, layer string, until time.Time) (Layer, error) {
	s.kept.change.RLock()
	defer s.kept.change.RUnlock()
	old, err := s.Layer(layer)
	if err != nil {
		return Layer{}, err
	}
	dirs, _, err := s.layersOf(State{Layer: layer})
	if err != nil {
		return Layer{}, err
	}
	work := filepath.Join(s.area("snapshots"), rand.Text())
	defer func() { s.warnIf("remove a settled layer's leftovers", ignoreMissing(s.disk.dropKept(work))) }()
	if err := s.disk.grow(ctx, s.keptPath(layer), work); err != nil {
		return Layer{}, err
	}
	if err := settleTree(ctx, work+"/upper", dirs[1:], until); err != nil {
		return Layer{}, err
	}
	out := old
	out.ID = rand.Text()
	return s.keepWork(ctx, work, out)
}

// settleTree settles the files of one layer, which nobody else sees. It lies on those of below.
func settleTree(ctx context.Context, dir string, below []string, until time.Time) error {
	root, err := fd.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	t, err := OpenTree(below)
	if err != nil {
		return err
	}
	defer t.Close()
	limit := until.Unix()
	var dirs, drop, compiled []string
	err = fd.Walk(ctx, root, func(e fd.Entry) error {
		switch {
		case e.Info.IsDir():
			dirs = append(dirs, e.Path)
			return nil
		case e.Info.IsWhiteout():
			return nil
		case dropped(e.Path):
			drop = append(drop, e.Path)
			return nil
		case e.Info.IsRegular() && e.Info.Size > 0 && emptied(e.Path):
			if err := empty(root, e.Path); err != nil {
				return err
			}
			return fd.SetTime(e.Dir, e.Name, limit)
		case e.Info.IsRegular() && strings.HasSuffix(e.Name, ".pyc"):
			compiled = append(compiled, e.Path)
		}
		if e.Info.Modified.Sec <= limit {
			return nil
		}
		return fd.SetTime(e.Dir, e.Name, limit)
	})
	if err != nil {
		return err
	}
	for _, p := range compiled {
		if err := settleCompiled(root, p, limit); err != nil {
			return fmt.Errorf("%s: %w", p, err)
		}
	}
	c := fd.NewCopier(root)
	defer c.Close()
	for _, p := range drop {
		if err := c.Remove(p); err != nil {
			return err
		}
	}
	if dirs, err = dropUntouched(ctx, root, t.view, dirs, c); err != nil {
		return err
	}
	for _, p := range append(dirs, ".") {
		if err := settleDir(root, p, limit); err != nil {
			return err
		}
	}
	return nil
}

// dropUntouched removes directories that hold nothing of the layer and are as those below them: something was made
// there, and removed again. It returns the others.
func dropUntouched(ctx context.Context, root *os.File, below view, dirs []string, c *fd.Copier) (left []string, err error) {
	for _, p := range slices.Backward(dirs) { // what lies in a directory comes after it
		untouched, err := untouchedDir(ctx, root, below, p)
		if err == nil && untouched {
			err = c.Remove(p)
		} else {
			left = append(left, p)
		}
		if err != nil {
			return nil, err
		}
	}
	return left, nil
}

func untouchedDir(ctx context.Context, root *os.File, below view, p string) (bool, error) {
	dir, err := dirIn(root, p)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	if names, err := dir.Readdirnames(1); len(names) > 0 || !errors.Is(err, io.EOF) {
		return false, err
	}
	if opaque, err := opaqueDir(dir); opaque || err != nil {
		return false, err
	}
	was, err := below.find(p)
	if err != nil || was == nil || !was.info.IsDir() {
		return false, err
	}
	i, err := fd.Stat(dir)
	if err != nil {
		return false, err
	}
	return same(ctx, shownFile{info: i, root: root}, *was, p, false)
}

// settleDir sets a directory's time, after all that changes it.
func settleDir(root *os.File, p string, limit int64) error {
	dirPath, name := fd.Split(p)
	dir, err := dirIn(root, dirPath)
	if err != nil {
		return err
	}
	defer dir.Close()
	i, err := fd.Lstat(root, p)
	if p == "." {
		i, err = fd.Stat(root)
	}
	if err != nil || i.Modified.Sec <= limit {
		return err
	}
	return fd.SetTime(dir, name, limit)
}

func empty(root *os.File, p string) error {
	f, err := fd.EditFile(root, p)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(0), f.Close())
}

// pycHeader is the head of a compiled Python file (PEP 552): magic number, flags, and where these are 0 the time
// and the size of its source, 4 bytes each, little endian.
const pycHeader = 16

// settleCompiled makes a compiled file name the time that its source has after the layer was settled, where the
// source is of the same layer: else Python would compile it again at every start.
func settleCompiled(root *os.File, p string, limit int64) error {
	dir, name := path.Split(p)
	base, _, _ := strings.Cut(name, ".")
	source := path.Join(path.Dir(strings.TrimSuffix(dir, "/")), base+".py")
	if !strings.HasSuffix(dir, "__pycache__/") {
		return nil
	}
	i, err := fd.Lstat(root, source)
	if fd.Missing(err) {
		return nil
	}
	if err != nil || !i.IsRegular() {
		return err
	}
	f, err := fd.EditFile(root, p)
	if err != nil {
		return err
	}
	defer f.Close()
	var head [pycHeader]byte
	if _, err := io.ReadFull(f, head[:]); err != nil {
		return nil //nolint:nilerr // too short to be one
	}
	if !bytes.Equal(head[2:4], []byte("\r\n")) || binary.LittleEndian.Uint32(head[4:]) != 0 || int64(binary.LittleEndian.Uint32(head[8:])) <= limit {
		return nil
	}
	binary.LittleEndian.PutUint32(head[8:], uint32(i.Modified.Sec))
	if _, err := f.WriteAt(head[8:12], 8); err != nil {
		return err
	}
	dirFile, err := dirIn(root, strings.TrimSuffix(dir, "/"))
	if err != nil {
		return err
	}
	defer dirFile.Close()
	return fd.SetTime(dirFile, name, limit)
}
