package envd_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

const fsPrefix = "/filesystem.Filesystem/"

func (h *harness) put(path, text string) {
	h.t.Helper()
	if resp, answer := h.do("POST", "/files?path="+path, text, "Content-Type", octets); resp.StatusCode != http.StatusOK {
		h.t.Fatalf("upload %s: %d %s", path, resp.StatusCode, answer)
	}
}

func testStat(t *testing.T, h *harness) {
	h.put("f.txt", "test")
	h.run("ln -s f.txt soft; ln -s nothing broken")
	e := h.must(fsPrefix+"Stat", object{"path": "f.txt"})["entry"].(object)
	when := e["modifiedTime"].(string)
	delete(e, "modifiedTime")
	want := object{
		"name": "f.txt", "type": "FILE_TYPE_FILE", "path": "/home/user/f.txt", "size": "4", "mode": 420.0, "permissions": "-rw-r--r--",
		"owner": "user", "group": "user",
	}
	if fmt.Sprint(e) != fmt.Sprint(want) || !strings.HasSuffix(when, "Z") {
		t.Errorf("file: %v, %s", e, when)
	}
	e = h.must(fsPrefix+"Stat", object{"path": "/home/user"})["entry"].(object)
	if e["type"] != "FILE_TYPE_DIRECTORY" || e["permissions"] != "drwxr-xr-x" || e["size"] == nil {
		t.Errorf("directory: %v", e)
	}
	e = h.must(fsPrefix+"Stat", object{"path": "soft"})["entry"].(object)
	if e["path"] != "/home/user/soft" || e["type"] != "FILE_TYPE_FILE" || e["symlinkTarget"] != "/home/user/f.txt" || e["mode"] != 420.0 || e["permissions"] != "Lrwxrwxrwx" {
		t.Errorf("link: %v", e)
	}
	e = h.must(fsPrefix+"Stat", object{"path": "broken"})["entry"].(object)
	if e["type"] != nil || e["symlinkTarget"] != "/home/user/broken" {
		t.Errorf("link to nothing: %v", e)
	}
	h.refused(fsPrefix+"Stat", object{"path": "/nope"}, 404, "not_found", "file not found: /nope")
	h.refused(fsPrefix+"Stat", object{"path": "/"}, 401, "unauthenticated", "invalid username: 'zz'", "Authorization", basic("zz"))
}

func testDirectories(t *testing.T, h *harness) {
	e := h.must(fsPrefix+"MakeDir", object{"path": "/top/sub"})["entry"].(object)
	if e["path"] != "/top/sub" || e["owner"] != "user" {
		t.Errorf("made: %v", e)
	}
	h.refused(fsPrefix+"MakeDir", object{"path": "/top/sub"}, 409, "already_exists", "directory already exists: /top/sub")
	h.put("/top/f", "x")
	h.refused(fsPrefix+"MakeDir", object{"path": "/top/f"}, 400, "invalid_argument", "path already exists but it is not a directory: /top/f")

	h.put("/top/sub/g", "y")
	names := func(depth int) string {
		var all []string
		for _, e := range h.must(fsPrefix+"ListDir", object{"path": "/top", "depth": depth})["entries"].([]any) {
			all = append(all, e.(object)["path"].(string))
		}
		return strings.Join(all, " ")
	}
	if got := names(0); got != "/top/f /top/sub" {
		t.Errorf("depth 0: %s", got)
	}
	if got := names(1000); got != "/top/f /top/sub /top/sub/g" {
		t.Errorf("deep: %s", got)
	}
	h.run("ln -s /top soft")
	if got := h.must(fsPrefix+"ListDir", object{"path": "soft"})["entries"].([]any); len(got) != 2 {
		t.Errorf("through a link: %v", got)
	}
	h.refused(fsPrefix+"ListDir", object{"path": "/top/f"}, 400, "invalid_argument", "path is not a directory: /top/f")
	h.run("ln -s loop /tmp/loop")
	h.refused(fsPrefix+"ListDir", object{"path": "/tmp/loop"}, 400, "failed_precondition", "path is a loop of symbolic links: /tmp/loop")
	h.refused(fsPrefix+"ListDir", object{"path": "/nope"}, 404, "not_found", "directory not found: /nope")
	if got := h.must(fsPrefix+"ListDir", object{})["entries"]; len(got.([]any)) != 1 {
		t.Errorf("the working directory: %v", got)
	}

	moved := h.must(fsPrefix+"Move", object{"source": "/top/f", "destination": "/other/dir/f"})["entry"].(object)
	if moved["path"] != "/other/dir/f" || moved["type"] != "FILE_TYPE_FILE" {
		t.Errorf("moved: %v", moved)
	}
	h.must(fsPrefix+"Move", object{"source": "/other/dir/f", "destination": "/top/sub/g"})
	if _, text := h.do("GET", "/files?path=/top/sub/g", ""); text != "x" {
		t.Errorf("moved onto a file: %q", text)
	}
	h.refused(fsPrefix+"Move", object{"source": "/top/f", "destination": "/x"}, 404, "not_found", "source file not found: /top/f")
	h.refused(fsPrefix+"Move", object{"source": "/top/f"}, 400, "invalid_argument", "destination")

	for range 2 {
		h.must(fsPrefix+"Remove", object{"path": "/top"})
	}
	h.refused(fsPrefix+"Stat", object{"path": "/top/sub/g"}, 404, "not_found", "")
}

// changes reads events of a watch until it has seen each of want.
func changes(t *testing.T, s *stream, want ...string) {
	t.Helper()
	open := map[string]bool{}
	for _, w := range want {
		open[w] = true
	}
	for len(open) > 0 {
		msg := s.next()
		if msg == nil {
			t.Fatalf("the watch ended with %v; still awaited: %v", s.end, open)
		}
		if e, ok := msg["filesystem"].(object); ok {
			delete(open, fmt.Sprint(e["type"], " ", e["name"]))
			if entry, ok := e["entry"].(object); ok && entry["path"] != "/home/user/w/"+e["name"].(string) {
				t.Errorf("entry of %v", e)
			}
		}
	}
}

func testWatchDir(t *testing.T, h *harness) {
	h.must(fsPrefix+"MakeDir", object{"path": "w"})
	h.put("w/f", "1")
	s := h.open(fsPrefix+"WatchDir", object{"path": "w", "recursive": true, "includeEntry": true})
	if msg := s.next(); msg["start"] == nil {
		t.Fatalf("first: %v", msg)
	}
	h.put("w/f", "2")
	changes(t, s, "EVENT_TYPE_WRITE f")
	h.must(fsPrefix+"MakeDir", object{"path": "w/sub"})
	h.put("w/sub/g", "3")
	changes(t, s, "EVENT_TYPE_CREATE sub", "EVENT_TYPE_WRITE sub/g")
	h.must(fsPrefix+"Move", object{"source": "w/f", "destination": "w/h"})
	h.must(fsPrefix+"Remove", object{"path": "w/h"})
	changes(t, s, "EVENT_TYPE_RENAME f", "EVENT_TYPE_CREATE h", "EVENT_TYPE_REMOVE h")
	for msg := s.next(); msg["keepalive"] == nil; msg = s.next() {
		if msg == nil {
			t.Fatal("no sign of life")
		}
	}
	for path, code := range map[string]string{"nope": "not_found", "w/sub/g": "invalid_argument"} {
		bad := h.open(fsPrefix+"WatchDir", object{"path": path})
		if msg := bad.next(); msg != nil || bad.end["error"].(object)["code"] != code {
			t.Errorf("watch %s: %v %v", path, msg, bad.end)
		}
	}
}

func testWatchers(t *testing.T, h *harness) {
	h.must(fsPrefix+"MakeDir", object{"path": "w"})
	id := h.must(fsPrefix+"CreateWatcher", object{"path": "w"})["watcherId"]
	h.put("w/f", "1")
	seen := ""
	for !strings.Contains(seen, "EVENT_TYPE_WRITE f") {
		events, _ := h.must(fsPrefix+"GetWatcherEvents", object{"watcherId": id})["events"].([]any)
		for _, e := range events {
			seen += fmt.Sprint(e.(object)["type"], " ", e.(object)["name"], "\n")
		}
		if t.Context().Err() != nil {
			t.Fatalf("seen: %s", seen)
		}
	}
	h.must(fsPrefix+"RemoveWatcher", object{"watcherId": id})
	h.refused(fsPrefix+"GetWatcherEvents", object{"watcherId": id}, 404, "not_found", "not found")
	h.refused(fsPrefix+"RemoveWatcher", object{"watcherId": "none"}, 404, "not_found", "watcher with id none not found")
	h.refused(fsPrefix+"CreateWatcher", object{"path": "nope"}, 404, "not_found", "")
}
