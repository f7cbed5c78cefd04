// Package probe finds out what the running kernel can do, by trying rather than by its version.
//
// What belongs here: one probe per kernel feature, with the kernel that brought it and what to do
// where it is missing. What does not: which features a sandbox needs; that is the backend's.
//
// A probe has three outcomes: the feature works, the kernel has none (an UnsupportedError), or the
// answer could not be had. Only the first two are conclusive and cached.
package probe

import (
	"errors"
	"fmt"
	"sync"

	"casemate.dev/internal/errs"
)

// ErrNotSupported is what a probe returns where the kernel says that it lacks the feature.
var ErrNotSupported = errors.New("not supported")

// Feature is one thing that a kernel or host may lack.
type Feature struct {
	Name string
	// MinKernel is the first version that has it, as "5.12".
	MinKernel string
	// Remedy tells what to do where it is missing.
	Remedy string
	// Probe returns nil where the feature works, an error that is ErrNotSupported where the kernel has
	// none, and any other error where it could not tell. It leaves nothing behind.
	Probe func() error
}

// UnsupportedError says that a feature is missing. It is of kind errs.Unsupported.
type UnsupportedError struct {
	Feature   string
	MinKernel string
	Remedy    string
	Err       error // what the kernel said
}

// Error names the feature and the kernel that has it.
func (e *UnsupportedError) Error() string {
	return fmt.Sprintf("%s is not available (requires Linux %s or newer): %v", e.Feature, e.MinKernel, e.Err)
}

// Unwrap makes the error one of kind errs.Unsupported, with the remedy as its hint.
func (e *UnsupportedError) Unwrap() error {
	return errs.Wrap(e.Err, errs.Unsupported, "this host lacks %s", e.Feature).WithHint("%s", e.Remedy)
}

// Set remembers conclusive answers. It is safe for concurrent use.
type Set struct {
	mu      sync.Mutex       // guards the field below
	answers map[string]error // by feature
}

// NewSet returns a set that knows nothing yet.
func NewSet() *Set { return &Set{answers: map[string]error{}} }

// Check probes f, or returns what an earlier probe found out.
func (s *Set) Check(f Feature) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err, known := s.answers[f.Name]; known {
		return err
	}
	err := f.Probe()
	switch {
	case err == nil:
	case errors.Is(err, ErrNotSupported):
		err = &UnsupportedError{Feature: f.Name, MinKernel: f.MinKernel, Remedy: f.Remedy, Err: err}
	default:
		return fmt.Errorf("probe %s: %w", f.Name, err)
	}
	s.answers[f.Name] = err
	return err
}
