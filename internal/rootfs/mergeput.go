package rootfs

import (
	"errors"
	"fmt"
	"io/fs"

	"casemate.dev/internal/linux/fd"
)

// put writes the steps into the layer at dir, which lies on ours'.
func (p *mergePart) put(dir string) error {
	if len(p.steps) == 0 {
		return nil
	}
	to, err := fd.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer to.Close()
	c := fd.NewCopier(to)
	defer c.Close()
	c.Skip(ownMark)
	for _, s := range p.steps {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		if err := p.putStep(c, s); err != nil {
			return fmt.Errorf("%.200q: %w", s.path, err)
		}
	}
	return nil
}

func (p *mergePart) putStep(c *fd.Copier, s step) error {
	parent, _ := fd.Split(s.path)
	if err := p.way(c, parent); err != nil {
		return err
	}
	switch s.kind {
	case stepRemove:
		return c.Whiteout(s.path)
	case stepDir:
		if s.path != "" {
			if err := c.Mkdir(s.path); err != nil {
				return err
			}
		}
		return c.SetAttr(s.path, *s.attr)
	case stepText:
		return p.putText(c, s)
	}
	return p.putFile(c, s)
}

// way makes the directories that lead to what a step puts: as ours has them, or theirs, where ours has none.
func (p *mergePart) way(c *fd.Copier, path string) error {
	if path == "" {
		return nil
	}
	if _, err := c.Lstat(path); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	above, _ := fd.Split(path)
	if err := p.way(c, above); err != nil {
		return err
	}
	f, err := p.find(path)
	if err != nil {
		return err
	}
	dir := f.o
	if !isDir(dir) {
		dir = f.t
	}
	if !isDir(dir) {
		return fmt.Errorf("no side has a directory %q", path)
	}
	a, err := p.attrOf(path, dir)
	if err != nil {
		return err
	}
	if err := c.Mkdir(path); err != nil {
		return err
	}
	return c.SetAttr(path, a)
}

// putFile copies a side's file, which shares its blocks, and gives it what attributes the merge has found.
func (p *mergePart) putFile(c *fd.Copier, s step) error {
	f, err := p.find(s.path)
	if err != nil {
		return err
	}
	from := f.o
	if s.from == Theirs {
		from = f.t
	}
	dirPath, name := fd.Split(s.path)
	dir, err := dirIn(from.root, dirPath)
	if err != nil {
		return err
	}
	defer dir.Close()
	e := fd.Entry{Path: s.path, Name: name, Dir: dir, Info: from.info}
	if !s.linked {
		e.Info.Links = 1 // a file of its own, whatever it was
	}
	if err := c.Copy(e); err != nil {
		return err
	}
	switch {
	case s.attr != nil:
		return c.SetAttr(s.path, *s.attr)
	case p.source != "" && from.root == p.roots[p.source]:
		a, err := p.attrOf(s.path, from)
		if err != nil {
			return err
		}
		return c.SetAttr(s.path, a)
	}
	return nil
}

func (p *mergePart) putText(c *fd.Copier, s step) error {
	f, err := p.find(s.path)
	if err != nil {
		return err
	}
	text, ok, err := p.mergedText(s.path, f)
	if err == nil && !ok {
		err = errors.New("the text could be merged and can't be any more")
	}
	if err != nil {
		return err
	}
	if err := c.Write(s.path, text); err != nil {
		return err
	}
	return c.SetAttr(s.path, *s.attr)
}
