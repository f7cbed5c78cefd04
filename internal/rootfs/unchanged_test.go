package rootfs

import (
	"os"
	"testing"
)

// A layer stands for a sandbox's files until anything in them, in a workspace or in what is kept beside them
// changes, whoever serves them meanwhile.
func TestUnchanged(t *testing.T) {
	cfg := Config{DataDir: t.TempDir(), Mechanism: byBtrfs, ImageBytes: 1 << 30}
	s := open(t, cfg)
	source := t.TempDir()
	id, p := plan(t, s, Request{DiskBytes: 64 << 20, Workspaces: []WorkspaceRequest{{Source: source, Target: "/workspace"}}})
	if err := os.WriteFile(p.Upper+"/f", []byte("text"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := s.PutEnv(id, map[string]string{"A": "1"}); err != nil {
		t.Fatal(err)
	}
	first := commit(t, s, id, p)
	if err := s.PutEnv(id, map[string]string{"A": "1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadFile(p.Upper + "/f"); err != nil {
		t.Fatal(err)
	}
	if !s.Unchanged(id, first.ID) {
		t.Error("nothing changed, and it is not certain")
	}
	if s.Unchanged(id, "none") || s.Unchanged("none", first.ID) {
		t.Error("unchanged from what is not there")
	}
	last := first
	for what, change := range map[string]func() error{
		"a file":           func() error { return os.WriteFile(p.Upper+"/f", []byte("texT"), 0o644) },
		"a workspace":      func() error { return os.WriteFile(p.Workspaces[0].Upper+"/f", nil, 0o644) },
		"the environment":  func() error { return s.PutEnv(id, map[string]string{"A": "2"}) },
		"attributes of it": func() error { return os.Chmod(p.Upper, 0o700) },
	} {
		if !s.Unchanged(id, last.ID) {
			t.Errorf("before %s: not certain", what)
		}
		if err := change(); err != nil {
			t.Fatal(err)
		}
		if s.Unchanged(id, last.ID) {
			t.Errorf("%s changed, and it is taken for unchanged", what)
		}
		last = commit(t, s, id, p)
	}
	if s.Unchanged(id, first.ID) {
		t.Error("an older layer is taken for what is there")
	}
	other, _ := plan(t, s, Request{Layer: last.ID, DiskBytes: 64 << 20, Workspaces: []WorkspaceRequest{{Source: source, Target: "/workspace"}}})
	if s.Unchanged(other, last.ID) {
		t.Error("what a sandbox stands on is taken for its own layer")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, cfg)
	if !s.Unchanged(id, last.ID) {
		t.Error("not certain after a restart")
	}
	if err := os.WriteFile(p.Upper+"/later", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if s.Unchanged(id, last.ID) {
		t.Error("after a restart a change is not seen")
	}
}

// Copies say nothing of what they were made of.
func TestUnchangedIsNotKnownOfCopies(t *testing.T) {
	s := open(t, Config{Mechanism: byTmpfs})
	id, p := plan(t, s, Request{DiskBytes: 8 << 20})
	if l := commit(t, s, id, p); s.Unchanged(id, l.ID) {
		t.Error("a copy is taken for what is there")
	}
}
