package cli

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

func (a *app) importCmd() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "import [flags] FILE|DIR",
		Short: "Make a template of an image's archive",
		Long: `Make a template of an image in a file or a directory: an OCI layout, or what docker save, podman save,
buildah or skopeo write; a file may be compressed with gzip or zstd. - reads standard input.

Exit codes: 0, or 125 when it could not be imported.`,
		Example: `  docker save app:1 | casemate import - --name app
  casemate import layout/ --name app`,
		Args: exactly(1, "one file or directory"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			start := time.Now()
			in, size, err := a.openArchive(args[0])
			if err != nil {
				return err
			}
			defer func() { _ = in.Close() }()
			bar := a.newProgress()
			img, warnings, err := c.Images.Import(ctx, &shownReader{r: in, size: size, bar: bar, step: "send", after: "unpack"}, name)
			bar.done()
			if err != nil {
				return cannot(err, "import %s", args[0])
			}
			return a.gotImage(img, warnings, start)
		}),
	}
	cmd.Flags().StringVar(&name, "name", "", "the template's name (default the image's)")
	return cmd
}

// openArchive opens what is to be imported, and tells its size; 0: unknown.
func (a *app) openArchive(path string) (io.ReadCloser, int64, error) {
	if path == "-" {
		return io.NopCloser(a.stdin), 0, nil
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, 0, errs.Wrap(err, errs.NotFound, "cannot read %s: %v", path, errors.Unwrap(err))
	}
	if !st.IsDir() {
		f, err := os.Open(path)
		return f, st.Size(), err
	}
	if _, err := os.Stat(filepath.Join(path, "index.json")); err != nil {
		return nil, 0, errs.Wrap(err, errs.InvalidArgument, "the directory %s holds no OCI layout: it has no index.json", path)
	}
	r, w := io.Pipe()
	go func() {
		out := tar.NewWriter(w)
		err := out.AddFS(os.DirFS(path))
		if err == nil {
			err = out.Close()
		}
		_ = w.CloseWithError(err)
	}()
	return r, 0, nil
}

// shownReader shows how much was read.
type shownReader struct {
	r    io.Reader
	n    int64
	size int64
	bar  *progress
	// step is what is done with it, and after what follows once all is read.
	step, after string
}

// Read implements io.Reader.
func (s *shownReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.n += int64(n)
	switch {
	case s.size > 0 && s.n >= s.size, err != nil:
		s.bar.update(s.after, -1, "")
	case s.size > 0:
		s.bar.update(s.step, float64(s.n)/float64(s.size), formatSize(s.n)+" of "+formatSize(s.size))
	default:
		s.bar.update(s.step, -1, formatSize(s.n))
	}
	return n, err
}

func (a *app) exportCmd() *cobra.Command {
	var format, name string
	cmd := &cobra.Command{
		Use:   "export [flags] COMMIT|TEMPLATE FILE",
		Short: "Write a commit or a template as an image's archive",
		Long: `Write a commit or a template as an OCI image into an archive. With --format docker, docker load and podman
load read it; oci is a plain OCI layout, for skopeo and others. - writes standard output. The same commit
gives the same bytes every time.

Exit codes: 0, or 125 when it could not be written.`,
		Example: `  casemate export web/ready web.tar --format docker --name web:1
  casemate export web/ready - --format docker --name web:1 | docker load`,
		Args: exactly(2, "a commit or a template, and a file"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if _, tty := terminal(a.stdout); args[1] == "-" && tty {
				return errs.New(errs.InvalidArgument, "an archive is nothing for a terminal").WithHint("name a file, or lead it into another program")
			}
			bar := a.newProgress()
			bar.update("pack", -1, "")
			in, img, err := c.Images.Export(ctx, args[0], format, name)
			if err != nil {
				bar.done()
				return cannot(err, "export %s", args[0])
			}
			defer func() { _ = in.Close() }()
			n, err := a.saveArchive(in, args[1], bar)
			bar.done()
			if err != nil {
				return cannot(err, "export %s", args[0])
			}
			switch {
			case args[1] == "-":
			case a.json:
				return a.printJSON(map[string]any{"file": args[1], "digest": img.GetDigest(), "tree_digest": img.GetTreeDigest(), "bytes": n})
			default:
				fmt.Fprintf(a.stdout, "%s: %s, %s\n", args[1], clean(img.GetDigest()), formatSize(n))
			}
			return nil
		}),
	}
	cmd.Flags().StringVar(&format, "format", "oci", "oci, or docker for docker load")
	cmd.Flags().StringVar(&name, "name", "", "what the image is called in the archive (default the template's name)")
	return cmd
}

// saveArchive writes an archive to a file, which is there whole or not at all, or to standard output.
func (a *app) saveArchive(in io.Reader, path string, bar *progress) (int64, error) {
	shown := &shownReader{r: in, bar: bar, step: "write", after: "write"}
	if path == "-" {
		return io.Copy(a.stdout, shown)
	}
	var n int64
	err := saveWhole(path, 0o644, func(f io.Writer) (err error) {
		n, err = io.Copy(f, shown)
		return err
	})
	return n, err
}

// saveWhole writes a file, which is there whole or not at all.
func saveWhole(path string, mode os.FileMode, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // nothing, once it has its name
	if err = write(f); err == nil {
		err = f.Chmod(mode)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}
