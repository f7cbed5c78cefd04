package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/server"
)

func (a *app) pullCmd() *cobra.Command {
	var name, secret string
	cmd := &cobra.Command{
		Use:   "pull [flags] IMAGE",
		Short: "Make a template of an image in a registry",
		Long: `Fetch an image from a registry and make a template of it, in the place of one that has its name. Its
environment, user and working directory hold in every sandbox that starts from it. What is here already is not
fetched again, and a pull that broke off goes on where it was.

IMAGE is NAME, NAME:TAG, HOST/NAME:TAG or HOST/NAME@sha256:DIGEST; names without a host are Docker Hub's. The
server fetches it, over TLS, with the credentials of --secret, or those of its --docker-config.

Exit codes: 0, or 125 when it could not be pulled.`,
		Example: `  casemate pull python:3.12-slim
  casemate run --template python:3.12-slim -- python3 -V
  casemate pull registry.example.org/tool:1 --name tool --secret registry`,
		Args: exactly(1, "one image"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			start := time.Now()
			bar := a.newProgress()
			img, warnings, err := c.Images.Pull(ctx, &client.PullImageRequest{Image: args[0], Name: name, Secret: secret}, bar.image)
			bar.done()
			if err != nil {
				return cannot(err, "pull %s", args[0])
			}
			return a.gotImage(img, warnings, start)
		}),
	}
	cmd.Flags().StringVar(&name, "name", "", "the template's name (default the image's)")
	cmd.Flags().StringVar(&secret, "secret", "", "`NAME` of a secret with USER:PASSWORD, or a token, for the registry")
	return cmd
}

// image shows how far a pull or a push is.
func (p *progress) image(m *client.ImageProgress) {
	if m.GetStep() == "" {
		return // a keep-alive
	}
	fraction, line := -1.0, ""
	if total := m.GetTotalBytes(); total > 0 {
		fraction = float64(m.GetDoneBytes()) / float64(total)
	}
	var size, fetched int64
	missing := 0
	for _, l := range m.GetLayers() {
		if !l.GetPresent() {
			size, fetched, missing = size+l.GetSizeBytes(), fetched+l.GetFetchedBytes(), missing+1
		}
	}
	if size > 0 {
		line = fmt.Sprintf("%s of %s, %d of %d layers", formatSize(fetched), formatSize(size), missing, len(m.GetLayers()))
	}
	p.update(m.GetStep(), fraction, line)
}

// gotImage tells of an image that came in.
func (a *app) gotImage(img *client.Image, warnings []string, start time.Time) error {
	for _, w := range warnings {
		a.note("warning: %s", clean(w))
	}
	if a.json {
		return a.printJSON(img)
	}
	fmt.Fprintf(a.stdout, "template %s is ready: %s, %s, in %s\n", clean(img.GetName()), clean(img.GetDigest()), formatSize(img.GetSizeBytes()),
		formatDuration(time.Since(start)))
	return nil
}

func (a *app) pushCmd() *cobra.Command {
	var secret string
	cmd := &cobra.Command{
		Use:   "push [flags] COMMIT|TEMPLATE IMAGE",
		Short: "Put a commit or a template into a registry as an image",
		Long: `Put a commit or a template into a registry as an OCI image, which any container tool runs. Each layer of the
commit is a layer of the image; what was pulled goes out as it came, and what the registry has is not sent
again.

Template host, and what stands on it, can't leave this machine: its files are this machine's own.

Exit codes: 0, or 125 when it could not be pushed.`,
		Example: `  casemate push web/ready registry.example.com/team/web:1 --secret registry`,
		Args:    exactly(2, "a commit or a template, and an image"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			bar := a.newProgress()
			p, err := c.Images.Push(ctx, &client.PushImageRequest{Source: args[0], Image: args[1], Secret: secret}, bar.image)
			bar.done()
			if err != nil {
				return cannot(err, "push %s", args[0])
			}
			if a.json {
				return a.printJSON(p)
			}
			fmt.Fprintf(a.stdout, "%s: %s, %d layers, %s\n", clean(args[1]), clean(p.GetDigest()), p.GetLayers(), formatSize(p.GetSizeBytes()))
			return nil
		}),
	}
	cmd.Flags().StringVar(&secret, "secret", "", "`NAME` of a secret with USER:PASSWORD, or a token, for the registry")
	return cmd
}

func (a *app) imagesCmd() *cobra.Command {
	list := func(cmd *cobra.Command, args []string) error {
		return a.withClient(func(ctx context.Context, c *client.Client, _ []string) error {
			all, err := c.Images.List(ctx)
			if err != nil {
				return cannot(err, "list images")
			}
			if a.json {
				return printList(a, "images", all)
			}
			t := &table{head: []string{"NAME", "DIGEST", "SIZE", "MADE", "USER", "SOURCE"}}
			for _, img := range all {
				user := img.GetSettings().GetUser()
				if user == "" {
					user = "root"
				}
				t.add(img.GetName(), fmt.Sprintf("%.19s", img.GetDigest()), formatSize(img.GetSizeBytes()), ago(when(img.GetMadeAt()), time.Now()), user, img.GetSource())
			}
			a.table(t)
			return nil
		})(cmd, args)
	}
	cmd := &cobra.Command{
		Use:     "images",
		Aliases: []string{"image"},
		Short:   "List and remove templates that were made of images",
		Long:    "List templates that were made of images: by pull, or by import.\n\nExit codes: 0, or 125 on failure.",
		Args:    noneButCommands,
		RunE:    list,
	}
	ls := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List templates that were made of images",
		Long:    "List templates that were made of images.\n\nExit codes: 0, or 125 on failure.",
		Args:    exactly(0, "no arguments"),
		RunE:    list,
	}
	rm := &cobra.Command{
		Use:   "rm NAME...",
		Short: "Remove templates that were made of images",
		Long: `Remove templates that were made of images. Sandboxes and commits that stand on one keep what they need; the
rest of its files goes.

Exit codes: 0, or 125 when one could not be removed.`,
		Example: "  casemate images rm python:3.12-slim",
		Args:    atLeast(1, "names of templates"),
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			for _, name := range args {
				if _, err := c.Images.Delete(ctx, name); err != nil {
					return cannot(err, "remove image %s", name)
				}
			}
			return nil
		}),
	}
	cmd.AddCommand(ls, rm)
	return cmd
}

// unpackCmd is the process that unpacks a layer. It is hidden: only the server starts it.
func (a *app) unpackCmd() *cobra.Command {
	return &cobra.Command{
		Use:    server.UnpackVerb,
		Short:  "The process that unpacks a layer of an image",
		Hidden: true,
		RunE:   func(_ *cobra.Command, args []string) error { return server.UnpackLayer(args) },
	}
}
