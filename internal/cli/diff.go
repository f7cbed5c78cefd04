package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/diff"
	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// maxText is the size up to which a change shows as text.
const maxText = 1 << 20

func (a *app) diffCmd() *cobra.Command {
	var v diffView
	cmd := &cobra.Command{
		Use:   "diff [flags] SANDBOX|COMMIT [SANDBOX|COMMIT] [PATH…]",
		Short: "Show what a sandbox changed, or what differs between two states",
		Long: `Show what differs between two states, each of which is a commit or a sandbox as it is now: contents of text
as unified diffs, modes, owners, attributes and targets, in the root file system and in workspaces. With
one commit alone, show what it changed since its parent.

With one sandbox alone, show what it changed in its workspace, compared with the host folder it came from,
as a unified diff. A sandbox without a workspace, or --root, shows which files of its root file system
differ from what it started from.

The second name is a state where there is a sandbox or a commit of that name, and a path if not; what
stands behind -- is a path in any case. Of two states, paths are absolute inside, and --workspace and --root
leave one part of what differs.

On a terminal, what a sandbox wrote shows without what could steer the terminal. Nothing is run and no link
is followed out of the folder, whatever the sandbox wrote.

Exit codes: 0 whether or not there are changes, 125 on failure.`,
		Example: `  casemate diff fix
  casemate diff fix --name-only
  casemate diff fix src > fix.patch
  casemate diff web/ready web --stat
  casemate diff cmt_3f9a cmt_77b0 -- /etc
  casemate diff cmt_77b0`,
		Args:              atLeast(1, "a sandbox or a commit"),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			return a.diff(ctx, c, args, cmd.ArgsLenAtDash(), v)
		})(cmd, args)
	}
	v.flags(cmd)
	return cmd
}

// diff shows what the arguments ask for; those from dash on are paths, if it is not negative.
func (a *app) diff(ctx context.Context, c *client.Client, args []string, dash int, v diffView) error {
	if len(args) > 1 && dash != 1 {
		is, err := isState(ctx, c, args[1])
		if err != nil {
			return cannot(err, "compare with %s", args[1])
		}
		if is {
			return a.diffStates(ctx, c, args[0], args[1], v, args[2:])
		}
	}
	sb, err := c.Sandboxes.Get(ctx, args[0])
	if unnamed(err) {
		return a.diffStates(ctx, c, "", args[0], v, args[1:])
	}
	if err == nil {
		err = a.diffSandbox(ctx, c, sb, v, args[1:])
	}
	return cannot(err, "compare sandbox %s", args[0])
}

// isState reports whether a name is that of a sandbox or a commit.
func isState(ctx context.Context, c *client.Client, name string) (bool, error) {
	_, err := c.Sandboxes.Get(ctx, name)
	if unnamed(err) {
		_, err = c.Commits.Get(ctx, name)
	}
	if unnamed(err) {
		return false, nil
	}
	return err == nil, err
}

// unnamed reports whether an error says that nothing has a name, or that nothing can have it.
func unnamed(err error) bool {
	return client.KindOf(err) == client.NotFound || client.KindOf(err) == client.InvalidArgument
}

// diffSandbox shows what a sandbox changed, in a workspace where it has one.
func (a *app) diffSandbox(ctx context.Context, c *client.Client, sb *client.Sandbox, v diffView, paths []string) error {
	if v.stat {
		return errs.New(errs.InvalidArgument, "--stat needs two states").
			WithHint("name a commit first: casemate log shows them; a sandbox alone shows with --name-only, or as a diff")
	}
	if v.root || v.workspace == "" && len(sb.GetWorkspaces()) == 0 {
		return a.diffRoot(ctx, c, sb.GetId(), paths)
	}
	r, err := a.openReview(ctx, c, sb.GetId(), v.workspace, paths)
	if err != nil {
		return err
	}
	defer r.close()
	switch {
	case a.json:
		return a.printJSON(map[string]any{"changes": r.forJSON()})
	case v.nameOnly:
		a.noteNothing(len(r.changes), paths)
		a.table(changeTable(r.changes))
		return nil
	}
	a.noteNothing(len(r.changes), paths)
	return a.writeDiffs(ctx, r)
}

// diffRoot lists what differs from the template. Contents of the template are the server's, so that
// only names and sizes can be told.
func (a *app) diffRoot(ctx context.Context, c *client.Client, sandbox string, only []string) error {
	list, err := c.Sandboxes.Changes(ctx, sandbox, "")
	if err != nil {
		return err
	}
	return a.printChanges(list, only)
}

// printChanges lists changes of a root file system, those below the paths in only if there are any.
func (a *app) printChanges(list []*client.Change, only []string) error {
	kept := list[:0]
	for _, ch := range list {
		if selected(strings.TrimPrefix(ch.GetPath(), "/"), only) {
			kept = append(kept, ch)
		}
	}
	if a.json {
		return printList(a, "changes", kept)
	}
	a.noteNothing(len(kept), only)
	t := &table{}
	for _, ch := range kept {
		mark, st := (&change{op: ch.GetOp()}).mark()
		name, size := ch.GetPath(), ""
		switch {
		case ch.GetType() == "dir":
			name += "/"
		case ch.GetOp() != "removed":
			size = formatSize(ch.GetSize())
		}
		t.add(cell{mark, st}, name, cell{size, faint})
	}
	a.table(t)
	return nil
}

// noteNothing says that nothing lies at the paths, where there are any: one of them may have been meant for a state.
func (a *app) noteNothing(found int, paths []string) {
	if found == 0 && len(paths) > 0 {
		a.note("nothing differs at or below the path %s", strings.Join(paths, ", "))
	}
}

func changeTable(changes []*change) *table {
	t := &table{}
	for _, c := range changes {
		mark, st := c.mark()
		name := c.path
		switch c.kind {
		case "dir":
			name += "/"
		case "symlink":
			name += " → " + c.target
		}
		note, noteStyle := c.note()
		t.add(cell{mark, st}, name, cell{note, noteStyle})
	}
	return t
}

// changeJSON is one change as diff and apply print it with --json.
type changeJSON struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Type  string `json:"type"`
	Size  int64  `json:"size"`
	Held  string `json:"held_back,omitempty"`
	Newer bool   `json:"changed_here,omitempty"`
}

func (r *review) forJSON() []changeJSON {
	out := make([]changeJSON, len(r.changes))
	for i, c := range r.changes {
		out[i] = changeJSON{c.op, c.path, c.kind, c.size, c.held, c.newer}
	}
	return out
}

// writeDiffs prints every change as a unified diff, for eyes on a terminal and exact elsewhere.
func (a *app) writeDiffs(ctx context.Context, r *review) error {
	_, tty := terminal(a.stdout)
	color := a.color(a.stdout)
	for _, c := range r.changes {
		text, err := r.text(ctx, c)
		if err != nil {
			return err
		}
		if tty {
			text = prettyDiff(text, color)
		}
		if _, err := io.WriteString(a.stdout, text); err != nil {
			return err
		}
		if c.newer {
			a.warn("%s changed here since the sandbox was made", c.path)
		}
	}
	return nil
}

// text is one change as a unified diff.
func (r *review) text(ctx context.Context, c *change) (string, error) {
	mark, _ := c.mark()
	switch {
	case c.held != "":
		return fmt.Sprintf("%s %s (%s)\n", mark, clean(c.path), c.held), nil
	case c.kind == "dir":
		return fmt.Sprintf("%s %s/\n", mark, clean(c.path)), nil
	case c.kind == "symlink" && c.op != "removed":
		return fmt.Sprintf("%s %s → %s\n", mark, clean(c.path), clean(c.target)), nil
	}
	before, ok1, err := r.before(c)
	if err != nil {
		return "", err
	}
	after, ok2, err := r.after(ctx, c)
	if err != nil {
		return "", err
	}
	if !ok1 || !ok2 || !isText(before) || !isText(after) {
		return fmt.Sprintf("%s %s (binary or large, %s)\n", mark, clean(c.path), formatSize(c.size)), nil
	}
	oldName, newName := "a/"+clean(c.path), "b/"+clean(c.path)
	switch c.op {
	case "added":
		oldName = "/dev/null"
	case "removed":
		newName = "/dev/null"
	}
	d := diff.Diff(oldName, before, newName, after)
	if d == nil { // nothing but the mode
		return fmt.Sprintf("%s %s (executable: %v)\n", mark, clean(c.path), executable(c.mode)), nil
	}
	// The library heads its output with a line of its own that patch(1) does not need.
	_, d, _ = bytes.Cut(d, []byte("\n"))
	return string(d), nil
}

// before is what the host has; ok is false where it is too large or no file.
func (r *review) before(c *change) (b []byte, ok bool, err error) {
	if c.host == nil {
		return nil, true, nil
	}
	if !c.host.Mode().IsRegular() || c.host.Size() > maxText {
		return nil, false, nil
	}
	b, err = r.root.ReadFile(c.path)
	return b, true, err
}

// after is what the sandbox has.
func (r *review) after(ctx context.Context, c *change) (b []byte, ok bool, err error) {
	if c.op == "removed" {
		return nil, true, nil
	}
	if c.size > maxText {
		return nil, false, nil
	}
	f, err := r.client.Files.Open(ctx, r.sandbox.GetId(), r.inside(c.path), client.ReadOptions{})
	if err != nil {
		return nil, false, err
	}
	defer f.Close()
	// It may have grown since it was listed.
	b, err = io.ReadAll(io.LimitReader(f, maxText+1))
	return b, len(b) <= maxText, err
}

func isText(b []byte) bool { return utf8.Valid(b) && !bytes.ContainsRune(b, 0) }

// prettyDiff colours a diff and escapes what could steer the terminal.
func prettyDiff(text string, color bool) string {
	var out strings.Builder
	for line := range strings.Lines(text) {
		line = cleanLines(strings.TrimSuffix(line, "\n"))
		st := plain
		switch {
		case strings.HasPrefix(line, "+++"), strings.HasPrefix(line, "---"):
			st = bold
		case strings.HasPrefix(line, "@@"):
			st = cyan
		case strings.HasPrefix(line, "+"):
			st = green
		case strings.HasPrefix(line, "-"):
			st = red
		}
		out.WriteString(paint(line, st, color))
		out.WriteByte('\n')
	}
	return out.String()
}
