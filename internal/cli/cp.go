package cli

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

func (a *app) cpCmd() *cobra.Command {
	var user string
	cmd := &cobra.Command{
		Use:   "cp [flags] SOURCE DESTINATION",
		Short: "Copy files and directories into and out of a sandbox",
		Long: `Copy a file or a directory between this host and a sandbox. One side is SANDBOX:PATH; a relative PATH
starts at the sandbox's default directory. A single "-" is standard input or output.

As with cp -r, a destination that is a directory takes the source into it; "dir/." copies what dir holds.
A file is replaced at once: nobody sees half of it. Out of a sandbox come regular files, directories and
symbolic links that stay within what is copied, with no more than rwx bits; anything else is skipped with a
warning. Into a sandbox, symbolic links are not copied.

Exit codes: 0, or 125 when something could not be copied.`,
		Example: `  casemate cp src web:/home/user/
  casemate cp web:/home/user/out ./out
  casemate cp web:/etc/os-release -`,
		Args: exactly(2, "a source and a destination"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			from, to := parsePlace(args[0]), parsePlace(args[1])
			cp := &copier{app: a, client: c, user: user}
			var err error
			switch {
			case from.sandbox != "" && to.sandbox == "":
				cp.sandbox = from.sandbox
				err = cp.out(ctx, from.path, to.path)
			case from.sandbox == "" && to.sandbox != "":
				cp.sandbox = to.sandbox
				err = cp.in(ctx, from.path, to.path)
			default:
				return usageError("exactly one of source and destination is SANDBOX:PATH")
			}
			if err != nil {
				return cannot(err, "copy %s to %s", args[0], args[1])
			}
			return cp.summary()
		}),
	}
	cmd.Flags().StringVar(&user, "user", "", "who reads and writes inside (default the sandbox's user)")
	return cmd
}

// place is one side of a copy.
type place struct{ sandbox, path string }

// parsePlace reads SANDBOX:PATH or a path of this host. What begins with / or . is of this host, as
// are names with a slash before the colon.
func parsePlace(s string) place {
	i := strings.IndexByte(s, ':')
	if i <= 0 || s[0] == '/' || s[0] == '.' || strings.Contains(s[:i], "/") {
		return place{path: s}
	}
	return place{s[:i], s[i+1:]}
}

// copier copies between this host and one sandbox.
type copier struct {
	app     *app
	client  *client.Client
	sandbox string
	user    string

	files   int
	bytes   int64
	skipped int
}

func (c *copier) skip(name, why string) {
	c.skipped++
	c.app.warn("%s is skipped: %s", name, why)
}

// summary tells a person how much was copied.
func (c *copier) summary() error {
	if c.app.json {
		return c.app.printJSON(map[string]any{"files": c.files, "bytes": c.bytes, "skipped": c.skipped})
	}
	if _, tty := terminal(c.app.stderr); tty {
		c.app.note("%s, %s", plural(int64(c.files), "file", "files"), formatSize(c.bytes))
	}
	return nil
}

// in copies source of this host to target inside.
func (c *copier) in(ctx context.Context, source, target string) error {
	if source == "-" {
		return c.putStdin(ctx, target)
	}
	st, err := os.Stat(source) // what a person names may be a link
	if err != nil {
		return err
	}
	contents := strings.HasSuffix(source, "/.") || source == "."
	if !contents {
		if target, err = c.inside(ctx, target, filepath.Base(filepath.Clean(source))); err != nil {
			return err
		}
	}
	switch {
	case st.IsDir():
		return c.putDir(ctx, source, target)
	case st.Mode().IsRegular():
		return c.putFile(ctx, source, target)
	}
	return errs.New(errs.InvalidArgument, "%s is neither a file nor a directory", source)
}

// inside returns the path that target means for something called name: within target where that is
// a directory or is written as one.
func (c *copier) inside(ctx context.Context, target, name string) (string, error) {
	if target == "" {
		target = "."
	}
	if strings.HasSuffix(target, "/") {
		return path.Join(target, name), nil
	}
	f, err := c.client.Files.Stat(ctx, c.sandbox, target, c.user, true)
	switch {
	case client.KindOf(err) == client.NotFound:
		return target, c.exists(ctx, err)
	case err != nil:
		return "", err
	case f.GetType() == "dir":
		return path.Join(target, name), nil
	}
	return target, nil
}

// exists tells a missing file from a missing sandbox.
func (c *copier) exists(ctx context.Context, notFound error) error {
	if _, err := c.client.Sandboxes.Get(ctx, c.sandbox); err != nil {
		return notFound
	}
	return nil
}

func (c *copier) putStdin(ctx context.Context, target string) error {
	f, err := c.client.Files.Write(ctx, c.sandbox, target, c.app.stdin, client.WriteOptions{User: c.user, Parents: true})
	if err != nil {
		return err
	}
	c.files, c.bytes = 1, f.GetSize()
	return nil
}

func (c *copier) putFile(ctx context.Context, source, target string) error {
	f, err := os.Open(source)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	w, err := c.client.Files.Write(ctx, c.sandbox, target, f, client.WriteOptions{
		User: c.user, Mode: uint32(st.Mode().Perm()), Parents: true, Size: st.Size(),
	})
	if err != nil {
		return fmt.Errorf("write %s: %w", target, err)
	}
	c.files++
	c.bytes += w.GetSize()
	return nil
}

func (c *copier) putDir(ctx context.Context, source, target string) error {
	st, err := os.Stat(source)
	if err != nil {
		return err
	}
	if _, err := c.client.Files.MakeDir(ctx, c.sandbox, target, c.user, uint32(st.Mode().Perm()), true); err != nil {
		return fmt.Errorf("make directory %s: %w", target, err)
	}
	entries, err := os.ReadDir(source)
	if err != nil {
		return err
	}
	for _, e := range entries {
		from, to := filepath.Join(source, e.Name()), path.Join(target, e.Name())
		switch {
		case e.IsDir():
			err = c.putDir(ctx, from, to)
		case e.Type().IsRegular():
			err = c.putFile(ctx, from, to)
		case e.Type()&os.ModeSymlink != 0:
			c.skip(from, "it is a symbolic link")
		default:
			c.skip(from, "it is neither a file nor a directory")
		}
		if err != nil {
			return err
		}
	}
	return nil
}
