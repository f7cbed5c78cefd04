package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// app is what every verb needs: the streams, the environment and the flags that all share.
type app struct {
	stdin   io.Reader
	stdout  io.Writer
	stderr  io.Writer
	getenv  func(string) string
	version string

	url  string // --url
	json bool   // --json
}

// Main runs the command line args (without the program's name) and returns the exit code.
func Main(version string, args []string) int {
	a := &app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, getenv: os.Getenv, version: version}
	root := a.root()
	strict(root)
	root.SetArgs(args)
	// Who closes our stdout gets an error from the write instead of ending us on the spot: run still
	// has a sandbox to delete. Caught, not ignored, since programs that we start inherit the latter.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)
	return report(a.stderr, root.ExecuteContext(context.Background()), a.color(a.stderr))
}

// terminal returns the file descriptor of f where it is a terminal.
func terminal(f any) (int, bool) {
	file, ok := f.(*os.File)
	if !ok {
		return 0, false
	}
	fd := int(file.Fd())
	return fd, term.IsTerminal(fd)
}

// color reports whether to colour what goes to w (no-color.org; TERM as in terminfo).
func (a *app) color(w io.Writer) bool {
	_, tty := terminal(w)
	return tty && a.getenv("NO_COLOR") == "" && a.getenv("TERM") != "dumb"
}

// printJSON writes v as JSON for programs, on one line where stdout is no terminal. A message of the
// API keeps the form that the API itself gives it.
func (a *app) printJSON(v any) error {
	raw, err := marshalJSON(v)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if _, tty := terminal(a.stdout); tty {
		err = json.Indent(&b, raw, "", "  ")
	} else {
		// protojson varies its spaces from build to build on purpose.
		err = json.Compact(&b, raw)
	}
	if err != nil {
		return err
	}
	b.WriteByte('\n')
	_, err = a.stdout.Write(b.Bytes())
	return err
}

func marshalJSON(v any) ([]byte, error) {
	if m, ok := v.(proto.Message); ok {
		return protojson.Marshal(m)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // it is for people's eyes and jq, not for a page
	err := enc.Encode(v)
	return b.Bytes(), err
}

// printList prints messages as the API's list answers do, {"name": […]}.
func printList[M proto.Message](a *app, name string, items []M) error {
	list := make([]json.RawMessage, len(items))
	for i, m := range items {
		raw, err := protojson.Marshal(m)
		if err != nil {
			return err
		}
		list[i] = raw
	}
	return a.printJSON(map[string]any{name: list})
}

// note tells a person something beside the result.
func (a *app) note(format string, args ...any) {
	fmt.Fprintln(a.stderr, clean(fmt.Sprintf(format, args...)))
}

// warn tells a person something to heed.
func (a *app) warn(format string, args ...any) {
	fmt.Fprintln(a.stderr, paint("warning:", yellow, a.color(a.stderr)), clean(fmt.Sprintf(format, args...)))
}

// table prints t to stdout.
func (a *app) table(t *table) { t.write(a.stdout, a.color(a.stdout)) }
