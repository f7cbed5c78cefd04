package cli

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// applied remembers, on the host, which of its files apply itself wrote, so that a later round can
// tell these from files that somebody else changed meanwhile. It is a convenience: without it such a
// file counts as changed, and --force takes it.
type applied struct {
	path  string
	Files map[string]stamp `json:"files"` // by path inside the sandbox
}

// stamp is what a file looked like when apply had written it.
type stamp struct {
	Modified int64 `json:"modified"` // ns
	Size     int64 `json:"size"`
}

func stampOf(st fs.FileInfo) stamp { return stamp{st.ModTime().UnixNano(), st.Size()} }

// stateDir is where such records lie (XDG base directories), "" where the person has no home.
func stateDir(getenv func(string) string) string {
	if d := getenv("XDG_STATE_HOME"); filepath.IsAbs(d) {
		return filepath.Join(d, "casemate", "applied")
	}
	if h := getenv("HOME"); filepath.IsAbs(h) {
		return filepath.Join(h, ".local", "state", "casemate", "applied")
	}
	return ""
}

// loadApplied reads the record of a sandbox; one that is missing or unreadable is empty.
func loadApplied(dir, sandbox string) *applied {
	a := &applied{}
	if dir != "" {
		a.path = filepath.Join(dir, sandbox+".json")
		if raw, err := os.ReadFile(a.path); err == nil {
			_ = json.Unmarshal(raw, a)
		}
	}
	if a.Files == nil {
		a.Files = map[string]stamp{}
	}
	return a
}

// wrote reports whether apply left a file as it is now.
func (a *applied) wrote(name string, st fs.FileInfo) bool {
	s, ok := a.Files[name]
	return ok && s == stampOf(st)
}

// save writes the record.
func (a *applied) save() error {
	if a.path == "" {
		return nil
	}
	raw, err := json.Marshal(a)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(a.path), 0o700); err != nil {
		return err
	}
	return os.WriteFile(a.path, raw, 0o600)
}

// forgetApplied removes the record of a sandbox that is gone.
func forgetApplied(dir, sandbox string) {
	if dir == "" || sandbox != filepath.Base(sandbox) {
		return
	}
	if err := os.Remove(filepath.Join(dir, sandbox+".json")); errors.Is(err, fs.ErrNotExist) {
		return
	}
	os.Remove(dir) // where it was the last one
}
