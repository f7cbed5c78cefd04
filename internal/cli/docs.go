package cli

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// docsCmd writes the reference of the command line. It is hidden: only the build uses it.
func (a *app) docsCmd() *cobra.Command {
	return &cobra.Command{
		Use:    "docs DIR",
		Short:  "Write the reference of the command line",
		Hidden: true,
		Args:   exactly(1, "a directory"),
		RunE: func(cmd *cobra.Command, args []string) error {
			pages := Reference()
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			for name, text := range pages {
				if err := os.WriteFile(filepath.Join(args[0], name), text, 0o644); err != nil {
					return err
				}
			}
			return nil
		},
	}
}

// Reference returns the pages of the command line's reference by file name, as docs/cli holds them.
func Reference() map[string][]byte {
	a := &app{getenv: func(string) string { return "" }}
	root := a.root()
	root.InitDefaultHelpCmd()
	pages := map[string][]byte{}
	var index bytes.Buffer
	fmt.Fprintf(&index, "# Command line\n\n%s\n\n| command | what it does |\n|---|---|\n", codeBlock(root.Long))
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		for _, sub := range c.Commands() {
			if sub.Hidden || sub.Name() == "help" {
				continue
			}
			name := strings.ReplaceAll(sub.CommandPath(), " ", "_") + ".md"
			pages[name] = page(sub)
			fmt.Fprintf(&index, "| [%s](%s) | %s |\n", sub.CommandPath(), name, sub.Short)
			walk(sub)
		}
	}
	walk(root)
	fmt.Fprintf(&index, "\n## Flags of every command\n\n%s", flagTable(root.PersistentFlags()))
	pages["README.md"] = index.Bytes()
	return pages
}

func page(c *cobra.Command) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "# %s\n\n%s.\n\n", c.CommandPath(), c.Short)
	fmt.Fprintf(&b, "```\n%s\n```\n\n", c.UseLine())
	long := c.Long
	if long == "" {
		long = c.Short
	}
	fmt.Fprintf(&b, "%s\n", codeBlock(long))
	if len(c.Aliases) > 0 {
		fmt.Fprintf(&b, "\nAlso: %s\n", strings.Join(c.Aliases, ", "))
	}
	if c.Example != "" {
		fmt.Fprintf(&b, "\n## Examples\n\n```\n%s\n```\n", strings.Trim(dedent(c.Example), "\n"))
	}
	if t := flagTable(c.NonInheritedFlags()); t != "" {
		fmt.Fprintf(&b, "\n## Flags\n\n%s", t)
	}
	return b.Bytes()
}

// codeBlock keeps paragraphs as they are and puts indented lines into code blocks.
func codeBlock(text string) string {
	var b strings.Builder
	in := false
	for _, line := range strings.Split(text, "\n") {
		code := strings.HasPrefix(line, "  ")
		if code != in {
			b.WriteString("```\n")
			in = code
		}
		b.WriteString(strings.TrimPrefix(line, "  ") + "\n")
	}
	if in {
		b.WriteString("```\n")
	}
	return strings.TrimRight(b.String(), "\n")
}

func dedent(text string) string {
	lines := strings.Split(text, "\n")
	for i, l := range lines {
		lines[i] = strings.TrimPrefix(l, "  ")
	}
	return strings.Join(lines, "\n")
}

func flagTable(fs *pflag.FlagSet) string {
	var b strings.Builder
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		if b.Len() == 0 {
			b.WriteString("| flag | what it does |\n|---|---|\n")
		}
		kind, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if kind != "" {
			name += " " + kind
		}
		fmt.Fprintf(&b, "| `%s` | %s |\n", name, strings.ReplaceAll(usage, "|", `\|`))
	})
	return b.String()
}
