// Package guestbin holds the guest's program for the architecture that the server was built for.
//
// The program itself is not in the repository: `make build` puts it into the folder bin, from where
// it is embedded. A clean clone has only a placeholder there, so that everything compiles and a
// server without a guest can say so.
//
// What belongs here: the embedded program. What does not: making it a file that can be executed; that
// is the backend's.
package guestbin

import (
	"embed"
	"runtime"

	"casemate.dev/internal/errs"
)

// The folder's README is the placeholder.
//
//go:embed bin
var files embed.FS

// Name returns the name of the guest's program in the folder bin.
func Name() string { return "guest-linux-" + runtime.GOARCH }

// Bytes returns the guest's program. Kind: FailedPrecondition where none was built in.
func Bytes() ([]byte, error) {
	b, err := files.ReadFile("bin/" + Name())
	if err != nil {
		return nil, errs.Wrap(err, errs.FailedPrecondition, "this server was built without a guest").
			WithHint("run make build in the repository and use bin/casemate")
	}
	return b, nil
}
