package testenv

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// Module returns the directory that holds the repository's go.mod.
func Module(t testing.TB) string {
	t.Helper()
	dir, err := moduleDir()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Runsc returns the path of the program that `make runsc` builds, gVisor's; without it the test fails.
func Runsc(t testing.TB) string {
	t.Helper()
	path := filepath.Join(Module(t), ".cache", "runsc", "runsc")
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("run `make runsc` first: %v", err)
	}
	return path
}

func moduleDir() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no go.mod above the working directory")
}

// guest is built once per test binary; Go's build cache makes it fast from the second binary on.
var guest = sync.OnceValues(func() ([]byte, error) { return build("casemate-guest") })

// Guest returns the guest's program, built as the release builds it.
func Guest(t testing.TB) []byte {
	t.Helper()
	b, err := guest()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// build compiles a static command of this module and returns its bytes.
func build(command string) ([]byte, error) {
	module, err := moduleDir()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "cmt")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	out := filepath.Join(dir, command)
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", out, "./cmd/"+command)
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("build %s: %w\n%s", command, err, text.Bytes())
	}
	return os.ReadFile(out)
}
