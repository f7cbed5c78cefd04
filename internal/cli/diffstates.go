package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"casemate.dev/client"
)

// diffView says what is compared and how differences are shown.
type diffView struct {
	stat, nameOnly, root bool
	workspace            string
}

func (v *diffView) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.BoolVar(&v.stat, "stat", false, "how many lines changed in which file")
	f.BoolVar(&v.nameOnly, "name-only", false, "which files changed, without what changed in them")
	f.StringVar(&v.workspace, "workspace", "", "only the workspace at this path inside")
	f.BoolVar(&v.root, "root", false, "only the root file system")
	cmd.MarkFlagsMutuallyExclusive("stat", "name-only")
	cmd.MarkFlagsMutuallyExclusive("workspace", "root")
}

// part is the part of two states that is compared, as the API names it.
func (v diffView) part() string {
	if v.root {
		return "/"
	}
	return v.workspace
}

// patches reports whether the view needs the lines.
func (v diffView) patches() bool { return !v.nameOnly }

// insidePaths makes paths absolute, as the API has them.
func insidePaths(paths []string) []string {
	out := make([]string, len(paths))
	for i, p := range paths {
		out[i] = path.Clean("/" + p)
	}
	return out
}

// diffStates shows what differs between two states.
func (a *app) diffStates(ctx context.Context, c *client.Client, from, to string, v diffView, paths []string) error {
	d, err := c.History.Diff(ctx, &client.DiffRequest{From: from, To: to, Paths: insidePaths(paths), Patches: v.patches(), Part: v.part()})
	if err != nil && from == "" {
		return cannot(err, "compare %s with what it comes from", to)
	}
	if err != nil {
		return cannot(err, "compare %s with %s", to, from)
	}
	if a.json {
		return a.printJSON(d)
	}
	a.noteNothing(len(d.GetFiles()), paths)
	return a.writeFileDiffs(d.GetFiles(), v)
}

// writeFileDiffs prints differences. Names and, on a terminal, contents are shown without what could steer
// the terminal; elsewhere contents stay exact, for patch(1).
func (a *app) writeFileDiffs(files []*client.FileDiff, v diffView) error {
	switch {
	case v.nameOnly:
		for _, f := range files {
			if _, err := fmt.Fprintln(a.stdout, shownName(f)); err != nil {
				return err
			}
		}
		return nil
	case v.stat:
		a.table(statTable(files))
		return nil
	}
	_, tty := terminal(a.stdout)
	for _, f := range files {
		text := fileDiffText(f)
		if tty {
			head, patch, _ := strings.Cut(text, "\n")
			_, st := (&change{op: f.GetOp()}).mark()
			text = paint(cleanLines(head), st, a.color(a.stdout)) + "\n" + prettyDiff(patch, a.color(a.stdout))
		}
		if _, err := io.WriteString(a.stdout, text); err != nil {
			return err
		}
	}
	return nil
}

// shownName is a file's path; that of a directory ends in a slash.
func shownName(f *client.FileDiff) string {
	is := f.GetAfter()
	if is == nil {
		is = f.GetBefore()
	}
	if is.GetType() == "dir" {
		return clean(f.GetPath()) + "/"
	}
	return clean(f.GetPath())
}

// statBar is how wide the bar of a file with the most changed lines is.
const statBar = 40

func statTable(files []*client.FileDiff) *table {
	t := &table{}
	most := int32(1)
	for _, f := range files {
		most = max(most, f.GetLinesAdded()+f.GetLinesRemoved())
	}
	bar := func(n int32, sign string) string {
		if n == 0 {
			return ""
		}
		return strings.Repeat(sign, int(max(1, int64(n)*statBar/int64(max(most, statBar)))))
	}
	var added, removed int64
	for _, f := range files {
		mark, st := (&change{op: f.GetOp()}).mark()
		what := f.GetLeftOut()
		if f.GetLinesAdded()+f.GetLinesRemoved() > 0 {
			what = fmt.Sprint(f.GetLinesAdded() + f.GetLinesRemoved())
		} else if what == "" {
			what = strings.Join(metadataChanges(f), ", ")
		}
		t.add(cell{mark, st}, shownName(f), what, cell{bar(f.GetLinesAdded(), "+"), green}, cell{bar(f.GetLinesRemoved(), "-"), red})
		added, removed = added+int64(f.GetLinesAdded()), removed+int64(f.GetLinesRemoved())
	}
	t.add("", fmt.Sprintf("%s, %s added, %s removed", plural(int64(len(files)), "file", "files"),
		plural(added, "line", "lines"), plural(removed, "line", "lines")))
	return t
}

// metadataChanges tells what changed beside the contents.
func metadataChanges(f *client.FileDiff) (what []string) {
	before, after := f.GetBefore(), f.GetAfter()
	switch {
	case before == nil && after == nil:
		return nil
	case before == nil:
		return []string{fmt.Sprintf("new %s, mode %04o", after.GetType(), after.GetMode())}
	case after == nil:
		return []string{before.GetType()}
	}
	if before.GetType() != after.GetType() {
		what = append(what, before.GetType()+" became "+after.GetType())
	}
	if before.GetMode() != after.GetMode() {
		what = append(what, fmt.Sprintf("mode %04o to %04o", before.GetMode(), after.GetMode()))
	}
	if before.GetUid() != after.GetUid() || before.GetGid() != after.GetGid() {
		what = append(what, fmt.Sprintf("owner %d:%d to %d:%d", before.GetUid(), before.GetGid(), after.GetUid(), after.GetGid()))
	}
	for _, x := range f.GetAttributes() {
		what = append(what, "attribute "+x)
	}
	if f.GetTargetBefore() != f.GetTargetAfter() {
		what = append(what, fmt.Sprintf("target %s to %s", f.GetTargetBefore(), f.GetTargetAfter()))
	}
	return what
}

// fileDiffText is one file as a unified diff, with what else changed above it.
func fileDiffText(f *client.FileDiff) string {
	var b strings.Builder
	name := clean(f.GetPath())
	mark, _ := (&change{op: f.GetOp()}).mark()
	fmt.Fprintf(&b, "%s %s", mark, shownName(f))
	if f.GetTargetAfter() != "" {
		fmt.Fprintf(&b, " → %s", clean(f.GetTargetAfter()))
	}
	notes := metadataChanges(f)
	if f.GetLeftOut() != "" {
		notes = append(notes, fmt.Sprintf("%s, %s", f.GetLeftOut(), formatSize(max(f.GetBefore().GetSize(), f.GetAfter().GetSize()))))
	}
	if len(notes) > 0 {
		fmt.Fprintf(&b, " (%s)", clean(strings.Join(notes, ", ")))
	}
	b.WriteByte('\n')
	if f.GetPatch() == "" {
		return b.String()
	}
	before, after := "a"+name, "b"+name
	if f.GetBefore() == nil {
		before = "/dev/null"
	}
	if f.GetAfter() == nil {
		after = "/dev/null"
	}
	fmt.Fprintf(&b, "--- %s\n+++ %s\n%s", before, after, f.GetPatch())
	return b.String()
}

// rawJSON is a message in the form that the API gives it.
func rawJSON(m proto.Message) json.RawMessage {
	raw, err := protojson.Marshal(m)
	if err != nil {
		return json.RawMessage("null")
	}
	return raw
}

func rawList[M proto.Message](all []M) []json.RawMessage {
	out := make([]json.RawMessage, len(all))
	for i, m := range all {
		out[i] = rawJSON(m)
	}
	return out
}
