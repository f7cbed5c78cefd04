package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// applyOptions say what apply takes.
type applyOptions struct {
	workspace                string
	yes, dry, force, withGit bool
}

func (a *app) applyCmd() *cobra.Command {
	var o applyOptions
	cmd := &cobra.Command{
		Use:   "apply [flags] SANDBOX [PATH…]",
		Short: "Take what a sandbox changed in its workspace back to the host",
		Long: `Take what a sandbox changed in its workspace back to the host folder, after showing the list and asking.

Every file is replaced at once and keeps the host's owner and mode; of the sandbox's mode only "executable"
is taken. Nothing is run, and nothing is written outside the folder: links that lead out of it are refused.
Held back are a repository's .git (unless --with-git), and files that changed here since the sandbox was
made (unless --force).

Exit codes: 0 when all was applied, 1 when something was held back or declined, 125 on failure.`,
		Example: `  casemate apply fix
  casemate apply fix --yes src README.md`,
		Args:              atLeast(1, "a sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			r, err := a.openReview(ctx, c, args[0], o.workspace, args[1:])
			if err != nil {
				return cannot(err, "apply sandbox %s", args[0])
			}
			defer r.close()
			return a.apply(ctx, r, o)
		}),
	}
	fl := cmd.Flags()
	fl.StringVar(&o.workspace, "workspace", "", "which workspace, where there are several: its path inside")
	fl.BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	fl.BoolVarP(&o.dry, "dry-run", "n", false, "show what would be done, and do nothing")
	fl.BoolVar(&o.force, "force", false, "also files that changed here since the sandbox was made")
	fl.BoolVar(&o.withGit, "with-git", false, "also a repository's .git, whose configuration and hooks git runs")
	return cmd
}

func (a *app) apply(ctx context.Context, r *review, o applyOptions) error {
	take, left := r.choose(o)
	if !a.json {
		changeTable(r.changes).write(a.stderr, a.color(a.stderr))
	}
	done := func(applied int) error {
		if a.json {
			return errors.Join(a.printJSON(map[string]any{"applied": applied, "held_back": left, "changes": r.forJSON()}), heldBack(left))
		}
		fmt.Fprintf(a.stdout, "%d applied, %d held back\n", applied, left)
		return heldBack(left)
	}
	if len(take) == 0 || o.dry {
		return done(0)
	}
	if !o.yes {
		ok, err := a.confirm(fmt.Sprintf("Apply %s to %s?", plural(int64(len(take)), "change", "changes"), r.ws.GetSource()))
		if err != nil {
			return err
		}
		if !ok {
			return &exitError{code: 1, text: "nothing was applied"}
		}
	}
	for i, c := range take {
		err := r.take(ctx, c)
		if err == nil {
			r.remember(c)
			continue
		}
		return cannot(errors.Join(err, r.applied.save()), "apply %s after %d of %d changes", c.path, i, len(take))
	}
	if err := r.applied.save(); err != nil {
		a.warn("what was applied is not noted: %s", err)
	}
	return done(len(take))
}

// remember notes what a file looks like now, so that the next round knows it as apply's own.
func (r *review) remember(c *change) {
	delete(r.applied.Files, r.inside(c.path))
	if st, err := r.root.Lstat(c.path); err == nil && !st.IsDir() {
		r.applied.Files[r.inside(c.path)] = stampOf(st)
	}
}

func heldBack(n int) error {
	if n == 0 {
		return nil
	}
	return &exitError{code: 1}
}

// choose splits the changes into those to take, in an order that works, and the number left.
func (r *review) choose(o applyOptions) (take []*change, left int) {
	replaced := map[string]bool{}
	for _, c := range r.changes { // sorted, so that what lies above comes first
		if o.withGit && c.git {
			c.held = ""
		}
		if o.force {
			c.newer = false
		}
		if c.held == "" && c.via != "" && !replaced[c.via] {
			c.held = "here " + c.via + " is a link, and it would be written where that leads"
		}
		if c.held != "" || c.newer {
			left++
			continue
		}
		replaced[c.path] = c.kind == "dir" && c.op != "removed"
		take = append(take, c)
	}
	// Removals first, the deepest first, so that a file can take a directory's name; then what is
	// added, parents first.
	slices.SortStableFunc(take, func(x, y *change) int {
		rx, ry := x.op == "removed", y.op == "removed"
		switch {
		case rx && ry:
			return strings.Compare(y.path, x.path)
		case rx:
			return -1
		case ry:
			return 1
		}
		return strings.Compare(x.path, y.path)
	})
	return take, left
}

// take brings one change to the host.
func (r *review) take(ctx context.Context, c *change) error {
	if c.op == "removed" {
		if c.kind == "dir" || c.host != nil && c.host.IsDir() {
			return r.root.RemoveAll(c.path)
		}
		if err := r.root.Remove(c.path); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	// A rename can't put a file in a directory's place, nor a directory in a file's.
	if c.host != nil && c.host.IsDir() != (c.kind == "dir") {
		if err := r.root.RemoveAll(c.path); err != nil {
			return err
		}
		c.host = nil
	}
	switch c.kind {
	case "dir":
		err := r.root.Mkdir(c.path, 0o777)
		if errors.Is(err, fs.ErrExist) {
			return nil
		}
		return errors.Join(err, r.own(c))
	case "symlink":
		return errors.Join(replaceLink(r.root, c.path, c.target), r.own(c))
	}
	return r.takeFile(ctx, c)
}

func (r *review) takeFile(ctx context.Context, c *change) error {
	f, err := r.client.Files.Open(ctx, r.sandbox.GetId(), r.inside(c.path), client.ReadOptions{})
	if err != nil {
		return err
	}
	defer f.Close()
	mode := fs.FileMode(0o666) // less the umask, as for any new file
	if executable(c.mode) {
		mode = 0o777
	}
	if _, err := replaceFile(r.root, c.path, f, mode); err != nil {
		return err
	}
	if c.host != nil && c.host.Mode().IsRegular() {
		keep := c.host.Mode().Perm()
		switch {
		case executable(c.mode) && !executable(keep):
			keep |= keep & 0o444 >> 2 // whoever may read it may run it
		case !executable(c.mode):
			keep &^= 0o111
		}
		if err := r.root.Chmod(c.path, keep); err != nil {
			return err
		}
	}
	return r.own(c)
}

// own gives a new file the owner that the host's file had, or its directory has: apply runs as root
// more often than the folder is root's.
func (r *review) own(c *change) error {
	if os.Geteuid() != 0 {
		return nil
	}
	st := c.host
	if st == nil {
		var err error
		if st, err = r.root.Lstat(path.Dir(c.path)); err != nil {
			return err
		}
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	return r.root.Lchown(c.path, int(sys.Uid), int(sys.Gid))
}

// confirm asks a person a question; without one there is no answer.
func (a *app) confirm(question string) (bool, error) {
	if _, tty := terminal(a.stdin); !tty {
		return false, errs.New(errs.InvalidArgument, "nobody is here to ask").WithHint("use --yes to apply without asking")
	}
	fmt.Fprintf(a.stderr, "%s [y/N] ", clean(question))
	// Without a whole line the answer is no.
	line, _ := bufio.NewReader(a.stdin).ReadString('\n')
	if !strings.HasSuffix(line, "\n") {
		fmt.Fprintln(a.stderr)
		return false, nil
	}
	answer := strings.ToLower(strings.TrimSpace(line))
	return answer == "y" || answer == "yes", nil
}
