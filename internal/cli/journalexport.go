package cli

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"casemate.dev/client"
	"casemate.dev/internal/journal/trajectory"
	"casemate.dev/internal/otlp"
)

// The forms of an export.
const (
	formBundle = "bundle"
	formATIF   = "atif"
	formOTLP   = "otlp"
)

// journalExport says what is exported, and where to.
type journalExport struct {
	app           *app
	form, output  string
	to            string
	heads, header []string
	content       bool
}

func (a *app) journalExportCmd() *cobra.Command {
	x := &journalExport{app: a}
	cmd := &cobra.Command{
		Use:   "export [flags] SANDBOX",
		Short: "Export the record of a sandbox with its proofs, or for tools that read agents' traces",
		Long: `Write the record of a sandbox, in one of three forms (--format):

  bundle   its events, the content that they speak of, and the proofs that the server's log holds them;
           "casemate verify" checks it offline
  atif     one JSON document of the Agent Trajectory Interchange Format, version 1.7: each process, code run
           and file call as a tool call with its result
  otlp     OpenTelemetry spans of GenAI tool calls, sent to a collector over HTTP (--to), or written as JSON

Content may be secret: a bundle has it in the lines that begin with {"body", which may be taken out; spans
have it only with --content.

With --head a bundle proves that the log still begins as that checkpoint says; where it does not, the log
was cut or rewritten, and nothing is exported.

Exit codes: 0, or 125 when there is no such sandbox, a head does not fit or the collector takes not all.`,
		Example: `  casemate journal export web > web.bundle
  casemate journal export web --head head -o web.bundle
  casemate journal export web --format atif -o web.json
  casemate journal export web --format otlp --to http://localhost:4318`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			if err := x.check(); err != nil {
				return err
			}
			return cannot(x.run(ctx, c, args[0]), "export the journal of %s", args[0])
		}),
	}
	fl := cmd.Flags()
	fl.StringVar(&x.form, "format", formBundle, "bundle, atif or otlp")
	fl.StringVarP(&x.output, "output", "o", "", "write to `FILE`, whole or not at all")
	fl.StringArrayVar(&x.heads, "head", nil, "a `FILE` or URL with checkpoints that were given out before (repeatable)")
	fl.StringVar(&x.to, "to", "", "`URL` of a collector that takes OTLP over HTTP")
	fl.StringArrayVar(&x.header, "header", nil, "`NAME: VALUE` for the collector; NAME alone takes the value from the environment (repeatable)")
	fl.BoolVar(&x.content, "content", false, "spans hold what calls were given and said")
	_ = cmd.RegisterFlagCompletionFunc("format", cobra.FixedCompletions([]string{formBundle, formATIF, formOTLP}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (x *journalExport) check() error {
	switch x.form {
	case formBundle, formATIF, formOTLP:
	default:
		return usageError("--format %s is none of bundle, atif, otlp", clean(x.form))
	}
	switch {
	case x.form != formOTLP && (x.to != "" || len(x.header) > 0 || x.content):
		return usageError("--to, --header and --content go with --format otlp")
	case x.to != "" && x.output != "":
		return usageError("--to and --output exclude each other")
	case x.form != formBundle && len(x.heads) > 0:
		return usageError("--head goes with bundles, which alone prove something")
	}
	return nil
}

func (x *journalExport) run(ctx context.Context, c *client.Client, sandbox string) error {
	if x.form == formBundle {
		given, err := readHeads(ctx, x.heads)
		if err != nil {
			return err
		}
		notes := make([]string, len(given))
		for i, b := range given {
			notes[i] = string(b)
		}
		return x.write(func(w io.Writer) error { return c.Journal.Export(ctx, sandbox, notes, w) })
	}
	story, err := readStory(ctx, c, sandbox)
	if err != nil {
		return err
	}
	if x.form == formATIF {
		return x.write(story.WriteATIF)
	}
	requests, err := story.Spans(x.content)
	if err != nil {
		return err
	}
	if x.to == "" {
		return x.write(func(w io.Writer) error {
			for _, r := range requests {
				if _, err := fmt.Fprintf(w, "%s\n", r); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return x.send(ctx, requests)
}

// send sends spans to the collector.
func (x *journalExport) send(ctx context.Context, requests [][]byte) error {
	header := make(http.Header)
	for _, h := range x.header {
		name, value, ok := strings.Cut(h, ":")
		if value = strings.TrimSpace(value); !ok {
			value = x.app.getenv(name)
		}
		header.Add(strings.TrimSpace(name), value)
	}
	refused, err := otlp.Collector{URL: x.to, Header: header}.Send(ctx, requests)
	if err == nil && refused > 0 {
		x.app.warn("the collector refused %d spans", refused)
		return &exitError{code: exitCasemate}
	}
	return err
}

// write writes to where the export goes.
func (x *journalExport) write(put func(io.Writer) error) error {
	if x.output == "" {
		return put(x.app.stdout)
	}
	return saveWhole(x.output, 0o600, put)
}

// readStory reads a sandbox's record from the server.
func readStory(ctx context.Context, c *client.Client, sandbox string) (*trajectory.Story, error) {
	f, err := spoolFile()
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if err := c.Journal.Export(ctx, sandbox, nil, f); err != nil {
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read a temporary file: %w", err)
	}
	return trajectory.Read(f)
}
