package cli

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// review is what a sandbox changed in one of its workspaces, beside the host folder it came from.
type review struct {
	client  *client.Client
	sandbox *client.Sandbox
	ws      *client.Workspace
	root    *os.Root
	changes []*change
	applied *applied
}

// change is one file that differs, and what apply would do about it.
type change struct {
	op, kind string // added, modified or removed; file, dir, symlink or other
	path     string // relative to the workspace
	mode     fs.FileMode
	size     int64
	target   string      // of a symlink
	host     fs.FileInfo // what the host has there now; nil: nothing
	// held says why apply leaves it alone, newer that the host's file changed meanwhile, and runs that
	// tools run such a file by themselves.
	held  string
	newer bool
	runs  bool
	// via is the link on the host that stands in the place of a directory above, git says that the change
	// is what git runs.
	via string
	git bool
}

// openReview compares a workspace of a sandbox with its host folder. target chooses among several
// workspaces; only names paths (or directories above them) to look at, and may be empty.
func (a *app) openReview(ctx context.Context, c *client.Client, name, target string, only []string) (*review, error) {
	sb, err := c.Sandboxes.Get(ctx, name)
	if err != nil {
		return nil, err
	}
	r := &review{client: c, sandbox: sb, applied: loadApplied(stateDir(a.getenv), sb.GetId())}
	if r.ws, err = chooseWorkspace(sb, target); err != nil {
		return nil, err
	}
	r.root, err = os.OpenRoot(r.ws.GetSource())
	if err != nil {
		return nil, errs.Wrap(err, errs.FailedPrecondition, "the workspace's folder %s can't be opened here", r.ws.GetSource()).
			WithHint("run this on the machine of the server, as somebody who may read that folder")
	}
	if err := r.load(ctx, only); err != nil {
		r.root.Close()
		return nil, err
	}
	return r, nil
}

func (r *review) close() { r.root.Close() }

func chooseWorkspace(sb *client.Sandbox, target string) (*client.Workspace, error) {
	all := sb.GetWorkspaces()
	if len(all) == 0 {
		return nil, errs.New(errs.FailedPrecondition, "sandbox %s has no workspace", handle(sb)).
			WithHint("make one with: casemate create --workspace DIR")
	}
	if target == "" {
		if len(all) > 1 {
			return nil, errs.New(errs.InvalidArgument, "sandbox %s has %d workspaces", handle(sb), len(all)).
				WithHint("choose one with --workspace, as %s", all[0].GetTarget())
		}
		return all[0], nil
	}
	for _, w := range all {
		if w.GetTarget() == path.Clean(target) {
			return w, nil
		}
	}
	return nil, errs.New(errs.NotFound, "sandbox %s has no workspace at %s", handle(sb), target)
}

func (r *review) load(ctx context.Context, only []string) error {
	list, err := r.client.Sandboxes.Changes(ctx, r.sandbox.GetId(), r.ws.GetTarget())
	if err != nil {
		return err
	}
	for _, ch := range list {
		rel := strings.TrimPrefix(path.Clean("/"+ch.GetPath()), "/")
		if rel == "" || !selected(rel, only) {
			continue
		}
		c := &change{op: ch.GetOp(), kind: ch.GetType(), path: rel, mode: fs.FileMode(ch.GetMode()) & 0o777, size: ch.GetSize()}
		if err := r.judge(ctx, c); err != nil {
			return err
		}
		same, err := r.same(ctx, c)
		if err != nil {
			return err
		}
		if !same {
			r.changes = append(r.changes, c)
		}
	}
	slices.SortFunc(r.changes, func(x, y *change) int { return strings.Compare(x.path, y.path) })
	r.holdRepositories()
	return nil
}

// holdRepositories holds back what would make a directory a repository of its own: git takes one that
// holds HEAD, objects and refs for a bare repository, whose config says what it runs, and prompts and
// editors run git wherever one goes.
func (r *review) holdRepositories() {
	there := func(p string) bool {
		for _, c := range r.changes {
			if c.path == p {
				return c.op != "removed"
			}
		}
		_, err := r.root.Lstat(p)
		return err == nil
	}
	for _, c := range r.changes {
		dir, name := path.Split(c.path)
		if name == "HEAD" && c.op != "removed" && c.held == "" && there(dir+"objects") && there(dir+"refs") {
			c.held, c.git = "with it git takes the directory for a repository and runs what its config says; take it with --with-git", true
		}
	}
}

// linkAbove returns the first directory above p that is a symbolic link on the host, "" for none.
func (r *review) linkAbove(p string) string {
	for at := 0; ; at++ {
		next := strings.IndexByte(p[at:], '/')
		if next < 0 {
			return ""
		}
		at += next
		if st, err := r.root.Lstat(p[:at]); err != nil {
			return "" // nothing there, or Lstat of p itself says what is wrong
		} else if st.Mode()&fs.ModeSymlink != 0 {
			return p[:at]
		}
	}
}

// selected reports whether rel is one of only, or lies below one.
func selected(rel string, only []string) bool {
	if len(only) == 0 {
		return true
	}
	for _, o := range only {
		o = strings.TrimPrefix(path.Clean("/"+o), "/")
		if o == "" || rel == o || strings.HasPrefix(rel, o+"/") {
			return true
		}
	}
	return false
}

// judge fills in what the host has, and whether the change may be taken.
func (r *review) judge(ctx context.Context, c *change) error {
	c.via = r.linkAbove(c.path)
	st, err := r.root.Lstat(c.path)
	switch {
	case c.via != "": // what it leads to is not what the sandbox changed
	case err == nil:
		c.host = st
	case !errors.Is(err, fs.ErrNotExist):
		c.held = "a link on its way leads out of the folder"
		return nil
	}
	if c.kind == "symlink" && c.op != "removed" {
		f, err := r.client.Files.Stat(ctx, r.sandbox.GetId(), r.inside(c.path), "", false)
		if err != nil {
			return err
		}
		c.target = f.GetTarget()
		if !staysBelow(".", c.path, c.target) {
			c.held = "it is a link that leads out of the folder"
		}
		if inGit(path.Join(path.Dir(c.path), c.target)) {
			c.held, c.git = "it is a link into a repository's own folder; take it with --with-git", true
		}
	}
	if c.kind == "other" && c.op != "removed" {
		c.held = "it is neither a file nor a directory"
	}
	if inGit(c.path) {
		c.git = true
		c.held = "git runs what its configuration and hooks say; take it with --with-git"
	}
	c.runs = runsByItself(c.path) && c.op != "removed"
	// The sandbox saw the host's file as it was; a later change of it would be lost.
	if c.host != nil && !c.host.IsDir() && c.host.ModTime().After(when(r.sandbox.GetCreatedAt()).Add(time.Millisecond)) {
		c.newer = !r.applied.wrote(r.inside(c.path), c.host)
	}
	return nil
}

// inGit reports whether a path lies in a repository's own folder. Letters of either case count: some
// file systems do not tell them apart.
func inGit(p string) bool {
	for _, el := range strings.Split(p, "/") {
		if strings.EqualFold(el, ".git") {
			return true
		}
	}
	return false
}

// runsByItself reports whether editors, shells or git run such a file without being asked to.
func runsByItself(p string) bool {
	for _, el := range strings.Split(p, "/") {
		switch strings.ToLower(el) {
		case ".envrc", ".vscode", ".idea", ".husky", ".githooks", ".gitattributes", ".gitmodules", ".pre-commit-config.yaml":
			return true
		}
	}
	return false
}

// inside is a path of the workspace as the sandbox sees it.
func (r *review) inside(rel string) string { return path.Join(r.ws.GetTarget(), rel) }

// same reports whether the host has what the sandbox has, so that nothing is left to do.
func (r *review) same(ctx context.Context, c *change) (bool, error) {
	switch {
	case c.held != "":
		return false, nil
	case c.op == "removed":
		return c.host == nil, nil
	case c.host == nil:
		return false, nil
	case c.kind == "dir":
		// A directory's own mode and times are no change worth a question.
		return c.host.IsDir(), nil
	case c.kind == "symlink":
		if c.host.Mode()&fs.ModeSymlink == 0 {
			return false, nil
		}
		target, err := r.root.Readlink(c.path)
		return target == c.target, err
	case !c.host.Mode().IsRegular() || c.host.Size() != c.size || executable(c.host.Mode()) != executable(c.mode):
		return false, nil
	}
	return r.sameBytes(ctx, c)
}

// executable is all that apply takes of a file's mode, as git does.
func executable(m fs.FileMode) bool { return m&0o100 != 0 }

func (r *review) sameBytes(ctx context.Context, c *change) (bool, error) {
	old, err := r.root.Open(c.path)
	if err != nil {
		return false, err
	}
	defer old.Close()
	now, err := r.client.Files.Open(ctx, r.sandbox.GetId(), r.inside(c.path), client.ReadOptions{})
	if err != nil {
		return false, err
	}
	defer now.Close()
	x, y := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, err := io.ReadFull(old, x)
		m, err2 := io.ReadFull(now, y)
		if n != m || !bytes.Equal(x[:n], y[:m]) {
			return false, nil
		}
		if ended(err) || ended(err2) {
			return ended(err) && ended(err2), nil
		}
		if err = errors.Join(err, err2); err != nil {
			return false, err
		}
	}
}

func ended(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }

// mark is the letter and the colour of a change.
func (c *change) mark() (string, style) {
	switch c.op {
	case "added":
		return "A", green
	case "removed":
		return "D", red
	}
	return "M", yellow
}

// note tells what a person should know of a change beside its path.
func (c *change) note() (string, style) {
	switch {
	case c.held != "":
		return "held back: " + c.held, yellow
	case c.newer:
		return "changed here since the sandbox was made", red
	case c.host != nil && c.host.IsDir() && (c.kind != "dir" || c.op == "removed"):
		return "a directory here, with all it holds", yellow
	case c.runs:
		return "tools run this by themselves: read it", yellow
	}
	return "", plain
}
