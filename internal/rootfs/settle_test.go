package rootfs

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A settled layer holds what was made, and nothing that tells when or in which ways.
func TestSettle(t *testing.T) {
	every(t, func(t *testing.T, s *Store) {
		until := time.Unix(1_000_000_000, 0)
		old := time.Unix(900_000_000, 0)
		put := func(p Plan, name, text string, at time.Time) {
			t.Helper()
			path := filepath.Join(p.Upper, name)
			must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			must(t, os.WriteFile(path, []byte(text), 0o644))
			must(t, os.Chtimes(path, at, at))
		}
		below, p := plan(t, s, Request{})
		put(p, "etc/app.d/conf", "x", old)
		must(t, os.MkdirAll(p.Upper+"/srv/empty", 0o755))
		must(t, os.MkdirAll(p.Upper+"/srv/mode", 0o755))
		first := commit(t, s, below, p)
		must(t, s.Release(t.Context(), below))

		box, p := plan(t, s, Request{Layer: first.ID})
		now := time.Now()
		put(p, "srv/app.py", "print()", now)
		put(p, "srv/old.py", "print()", old)
		var head [16]byte
		copy(head[2:], "\r\n")
		binary.LittleEndian.PutUint32(head[8:], uint32(now.Unix()))
		put(p, "srv/__pycache__/app.cpython-311.pyc", string(head[:]), now)
		put(p, "var/log/app.log", "once upon a time", now)
		put(p, "var/cache/ldconfig/aux-cache", "times", now)
		put(p, "etc/machine-id", "0123", now)
		// What a copy-up leaves where something was made and removed again; and what is something.
		must(t, os.MkdirAll(p.Upper+"/etc/app.d", 0o755))
		must(t, os.MkdirAll(p.Upper+"/srv/empty", 0o755))
		must(t, os.MkdirAll(p.Upper+"/srv/mode", 0o755))
		must(t, os.Chmod(p.Upper+"/srv/mode", 0o700))
		must(t, os.MkdirAll(p.Upper+"/srv/new", 0o755))
		l, err := s.Settle(t.Context(), commit(t, s, box, p).ID, until)
		must(t, err)
		must(t, s.Release(t.Context(), box))

		dir := s.keptPath(l.ID) + "/upper/"
		for name, there := range map[string]bool{
			"etc/app.d": false, "srv/empty": false, "srv/mode": true, "srv/new": true, "var/cache/ldconfig/aux-cache": false,
			"srv/app.py": true, "var/log/app.log": true,
		} {
			if _, err := os.Lstat(dir + name); (err == nil) != there {
				t.Errorf("%s: %v; it should be there: %v", name, err, there)
			}
		}
		for name, size := range map[string]int64{"var/log/app.log": 0, "etc/machine-id": 0, "srv/app.py": 7} {
			if i, err := os.Lstat(dir + name); err != nil || i.Size() != size || !i.ModTime().Equal(until) {
				t.Errorf("%s: %v, %v", name, i, err)
			}
		}
		if i, err := os.Lstat(dir + "srv/old.py"); err != nil || !i.ModTime().Equal(old) {
			t.Errorf("an older file bears %v, %v", i, err)
		}
		pyc, err := os.ReadFile(dir + "srv/__pycache__/app.cpython-311.pyc")
		if err != nil || int64(binary.LittleEndian.Uint32(pyc[8:])) != until.Unix() {
			t.Errorf("a compiled file names %x, %v", pyc, err)
		}
		for _, name := range []string{".", "srv", "srv/mode", "srv/new", "etc"} {
			if i, err := os.Lstat(dir + name); err != nil || i.ModTime().After(until) {
				t.Errorf("directory %s bears %v, %v", name, i, err)
			}
		}
	})
}
