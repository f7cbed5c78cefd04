// Command casemate-guest is the first process of every sandbox: it builds the sandbox around itself
// (guest/launch), then serves it (guest). With the argument "files" it is a worker that serves one
// user's files (guest/files).
//
// The server starts it; it is of no use from a shell.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"casemate.dev/internal/guest"
	"casemate.dev/internal/guest/files"
	"casemate.dev/internal/guest/launch"
	"casemate.dev/internal/guestwire"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "casemate-guest:", err)
		os.Exit(1)
	}
}

func run() error {
	if len(os.Args) > 1 && os.Args[1] == files.Arg {
		return files.Main()
	}
	start := launch.Run
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case guestwire.CellArg:
			err := launch.RunCell()
			if errors.Is(err, launch.ErrUnclaimed) {
				return nil
			}
			return err
		case guestwire.InsideArg:
			start = launch.Inside
		}
	}
	s, err := start()
	if errors.Is(err, launch.ErrUnclaimed) {
		return nil // the server went away while this was a spare
	}
	if err != nil {
		return err
	}
	return guest.Serve(context.Background(), s.Listener, guest.Config{
		Spawner:    s.Spawner,
		Bounds:     s.Bounds,
		Images:     s.Inside,
		SingleUser: !s.Launch.Walls.RootAllowed,
		User:       s.Launch.User, Dir: s.Launch.Dir, Env: s.Launch.Env,
	})
}
