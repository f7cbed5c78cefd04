package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// Exit codes. A child's own code passes through, so a script can't tell a child that exits 125 from
// a failure of Casemate; docker and env share that ambiguity.
const (
	exitTimeout  = 124 // the time limit ended the process, as timeout(1) says it
	exitCasemate = 125 // Casemate could not do it
	exitKilled   = 137 // out of memory, or killed with SIGKILL
)

// exitCodes is the paragraph about exit codes in the help of commands that run something.
const exitCodes = `Exit codes: the process's own, or 128+N where signal N ended it; 124 when a time limit
ended it; 137 when it was killed or ran out of memory; 125 when Casemate itself failed.`

// exitError ends the program with a code. With an empty text nothing more is printed: the child
// has said what there was to say.
type exitError struct {
	code int
	text string
	hint string
}

// Error implements error.
func (e *exitError) Error() string {
	if e.text == "" {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.text
}

// usageError is a wrong use of a command; its hint names the command's help.
func usageError(format string, args ...any) error {
	return errs.New(errs.InvalidArgument, format, args...)
}

// cannot is an error at the edge: "cannot <what>: <reason>", keeping err's kind and hint.
func cannot(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	what := fmt.Sprintf(format, args...)
	text, hint := reason(err)
	if !strings.HasPrefix(text, "cannot ") {
		text = "cannot " + what + ": " + text
	}
	return &errs.Error{Kind: kindOf(err), Public: text, Hint: hint, Err: err}
}

// kindOf is errs.KindOf that knows the client's errors too; their words are the same.
func kindOf(err error) errs.Kind {
	if k, ok := errs.FromCode(string(client.KindOf(err))); ok {
		return k
	}
	return errs.KindOf(err)
}

// reason returns what to tell a person about err. Unlike the server, the CLI hides nothing of its
// own errors: it runs as the person who reads them.
func reason(err error) (text, hint string) {
	var e *errs.Error
	if errors.As(err, &e) && e.Public != "" {
		return e.Public, e.Hint
	}
	var c *client.Error
	if errors.As(err, &c) {
		return c.Message, c.Hint
	}
	switch {
	case errors.Is(err, context.Canceled):
		return "interrupted", ""
	case errors.Is(err, context.DeadlineExceeded):
		return "it took too long", ""
	case errors.Is(err, os.ErrPermission):
		return err.Error(), "run as root (sudo)"
	}
	return err.Error(), ""
}

// report prints err to w and returns the program's exit code.
func report(w io.Writer, err error, color bool) int {
	if err == nil {
		return 0
	}
	var x *exitError
	if errors.As(err, &x) {
		if x.text != "" {
			printError(w, x.text, x.hint, color)
		}
		return x.code
	}
	// Whoever closed our stdout (head, a pager) needs no message.
	if errors.Is(err, syscall.EPIPE) {
		return 128 + int(syscall.SIGPIPE)
	}
	if errors.Is(err, context.Canceled) {
		return 128 + int(syscall.SIGINT)
	}
	text, hint := reason(err)
	printError(w, text, hint, color)
	return kindOf(err).Map().Exit
}

func printError(w io.Writer, text, hint string, color bool) {
	fmt.Fprintf(w, "%s %s\n", paint("casemate:", red, color), cleanLines(text))
	for _, h := range strings.Split(hint, "\n") {
		if h != "" {
			fmt.Fprintf(w, "%s %s\n", paint("hint:", cyan, color), clean(h))
		}
	}
}
