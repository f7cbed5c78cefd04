package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/mcp"
)

// mcpFlags say how the Model Context Protocol is served, and what sandbox a session gets.
type mcpFlags struct {
	box        sandboxFlags
	sandbox    string
	http       string
	allowHosts []string
}

func (a *app) mcpCmd() *cobra.Command {
	var f mcpFlags
	cmd := &cobra.Command{
		Use:   "mcp [flags]",
		Short: "Give an agent sandboxes as tools (Model Context Protocol)",
		Long: `Serve the Model Context Protocol, so that an agent can use sandboxes as tools: run commands and
background processes, read and write files, make and delete sandboxes.

On standard input and output it serves one session, for the program that started it. With --http it
serves any number, at http://ADDR/mcp, each with the API key that its client sends as
"Authorization: Bearer KEY"; a server that runs answers at its own /mcp in the same way.

A session has a sandbox of its own: made when a tool first needs it, deleted with its files when the
session ends. The flags of "create" shape it. --sandbox uses an existing one instead, which stays.

Exit codes: 0 when the client has left, or 125.`,
		Example: `  claude mcp add casemate -- casemate mcp --template base --profile standard
  casemate mcp --workspace ~/src/app            # the agent works on a copy; then: casemate diff, apply
  casemate mcp --sandbox web                    # in a sandbox that stays
  casemate --url http://127.0.0.1:7433 mcp --http 127.0.0.1:7434`,
		Args: exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			cfg, err := f.config(a)
			if err != nil {
				return err
			}
			if f.http != "" {
				return a.mcpHTTP(ctx, cfg, f)
			}
			return a.mcpStdio(ctx, cfg)
		},
	}
	f.box.register(cmd)
	cmd.Flags().StringVar(&f.sandbox, "sandbox", "", "use this existing sandbox, by id or name, instead of one per session")
	cmd.Flags().StringVar(&f.http, "http", "", "serve streamable HTTP at `HOST:PORT` instead of standard input and output")
	cmd.Flags().StringArrayVar(&f.allowHosts, "allow-host", nil, "with --http, host `NAME` under which browsers may reach it, beside addresses and localhost (repeatable)")
	cmd.MarkFlagsMutuallyExclusive("sandbox", "template")
	return cmd
}

// config turns the flags into what the protocol's server needs.
func (f *mcpFlags) config(a *app) (mcp.Config, error) {
	box, err := f.box.request(a.getenv)
	if err != nil {
		return mcp.Config{}, err
	}
	return mcp.Config{
		Version: a.version, Box: box, Sandbox: f.sandbox, Log: a.logger(false),
		Connect: func(string) (*client.Client, error) { return a.connect() },
	}, nil
}

// mcpStdio serves the program at the other end of standard input and output. Nothing else may be
// written there.
func (a *app) mcpStdio(ctx context.Context, cfg mcp.Config) error {
	in, ok := a.stdin.(io.ReadCloser)
	if !ok {
		in = io.NopCloser(a.stdin)
	}
	return cannot(mcp.New(cfg).RunStdio(ctx, in, nopWriteCloser{a.stdout}), "serve on standard input")
}

// nopWriteCloser leaves standard output open for what comes after.
type nopWriteCloser struct{ io.Writer }

// Close implements io.Closer.
func (nopWriteCloser) Close() error { return nil }

// mcpHTTP serves sessions over HTTP until ctx ends. Each acts with the key of its client.
func (a *app) mcpHTTP(ctx context.Context, cfg mcp.Config, f mcpFlags) error {
	url, err := a.mcpServer()
	if err != nil {
		return err
	}
	cfg.Connect = func(key string) (*client.Client, error) {
		return client.New(url, key, client.WithUserAgent("casemate/"+a.version))
	}
	s := mcp.New(cfg)
	defer s.Close()
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", f.http)
	if err != nil {
		return cannot(err, "listen on %s", f.http)
	}
	mux := http.NewServeMux()
	mux.Handle("/mcp", s.Handler(mcp.HTTPConfig{Hosts: f.allowHosts, Verify: verifyAt(url)}))
	h := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10}
	context.AfterFunc(ctx, func() {
		s.Close()
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		if h.Shutdown(drain) != nil {
			h.Close()
		}
	})
	fmt.Fprintf(a.stdout, "http://%s/mcp\n", l.Addr())
	if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return cannot(err, "serve on %s", f.http)
	}
	return nil
}

// mcpServer returns the URL of the server that callers' keys are for.
func (a *app) mcpServer() (string, error) {
	url := a.url
	if url == "" {
		url = a.getenv(client.EnvURL)
	}
	if !strings.HasPrefix(url, "http://") && !strings.HasPrefix(url, "https://") {
		// The socket takes no keys: whoever reached us would act as its owner.
		return "", errs.New(errs.InvalidArgument, "--http passes its callers' keys on, and the server's socket takes none").
			WithHint("name a TCP address of the server: casemate --url http://127.0.0.1:7433 mcp --http %s", "127.0.0.1:7434")
	}
	return url, nil
}

// verifyAt asks the server whether it takes a key.
func verifyAt(url string) func(context.Context, string) error {
	return func(ctx context.Context, key string) error {
		c, err := client.New(url, key)
		if err != nil {
			return err
		}
		defer c.Close()
		_, _, err = c.Sandboxes.List(ctx, &client.ListRequest{PageSize: 1})
		return cannot(err, "check the API key")
	}
}
