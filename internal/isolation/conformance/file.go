package conformance

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation"
)

func fileCases() []testCase {
	return []testCase{
		{name: "write and read", run: testWriteRead},
		{name: "parts of files", run: testParts},
		{name: "directories", run: testDirectories},
		{name: "whole or nothing", run: testWholeOrNothing},
		{name: "symbolic links", run: testSymlinks},
		{name: "who owns files", run: testOwners},
		{name: "files in place, with attributes", run: testInPlace},
		{name: "files without permission", run: testPrivileged},
		{name: "watch", run: testWatch},
	}
}

func at(path string) guestwire.PathRequest { return guestwire.PathRequest{Path: path} }

func (b *box) write(path, text string) guestwire.FileInfo {
	b.t.Helper()
	info, err := b.client.Write(limited(b.t), guestwire.WriteRequest{PathRequest: at(path), Offset: -1, Size: int64(len(text))}, strings.NewReader(text))
	if err != nil {
		b.t.Fatalf("write %s: %v", path, err)
	}
	return info
}

func (b *box) readFile(r guestwire.ReadRequest) (string, error) {
	b.t.Helper()
	_, in, err := b.client.Read(limited(b.t), r)
	if err != nil {
		return "", err
	}
	defer func() { _ = in.Close() }()
	text, err := io.ReadAll(in)
	return string(text), err
}

func (b *box) wantFile(path, want string) {
	b.t.Helper()
	if got, err := b.readFile(guestwire.ReadRequest{PathRequest: at(path), Length: -1}); err != nil || got != want {
		b.t.Errorf("%s holds %d bytes (%v), want %d", path, len(got), err, len(want))
	}
}

func testWriteRead(t *testing.T, h Harness) {
	b := startBox(t, h)
	big := strings.Repeat("0123456789abcdef", 40000)
	for _, tt := range []struct{ path, text string }{
		{"/home/user/empty", ""},
		{"small.txt", "text\n"}, // relative to the home directory
		{"/tmp/报告 ü '\"$.pdf", "name"},
		{"/tmp/big", big},
	} {
		info := b.write(tt.path, tt.text)
		if info.Size != int64(len(tt.text)) || info.Type != guestwire.TypeFile || info.Mode != 0o644 {
			t.Errorf("write %s: got %+v", tt.path, info)
		}
		b.wantFile(tt.path, tt.text)
	}
	b.prints("cat small.txt", "text\n")
	b.prints("wc -c < /tmp/big", fmt.Sprintln(len(big)))
	b.runScript("echo from a process > made")
	b.wantFile("/home/user/made", "from a process\n")
	_, err := b.readFile(guestwire.ReadRequest{PathRequest: at("/tmp/nothing"), Length: -1})
	wantKind(t, "a file that is not there", err, errs.NotFound)
	_, err = b.readFile(guestwire.ReadRequest{PathRequest: at("/tmp"), Length: -1})
	wantKind(t, "reading a directory", err, errs.FailedPrecondition, errs.InvalidArgument)
}

func testParts(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.write("f", "0123456789")
	for _, tt := range []struct {
		offset, length int64
		want           string
	}{{0, 3, "012"}, {7, -1, "789"}, {4, 2, "45"}, {10, -1, ""}, {8, 100, "89"}} {
		got, err := b.readFile(guestwire.ReadRequest{PathRequest: at("f"), Offset: tt.offset, Length: tt.length})
		if err != nil || got != tt.want {
			t.Errorf("%d bytes from %d: got %q, %v", tt.length, tt.offset, got, err)
		}
	}
	_, err := b.client.Write(limited(t), guestwire.WriteRequest{PathRequest: at("f"), Offset: 3, Size: 2}, strings.NewReader("XY"))
	if err != nil {
		t.Errorf("write into a file: %v", err)
	}
	b.wantFile("f", "012XY56789")
	_, err = b.client.Write(limited(t), guestwire.WriteRequest{PathRequest: at("f"), Offset: -1, Append: true, Size: 1}, strings.NewReader("!"))
	if err != nil {
		t.Errorf("append: %v", err)
	}
	b.wantFile("f", "012XY56789!")
}

func testDirectories(t *testing.T, h Harness) {
	b := startBox(t, h)
	ctx := limited(t)
	if _, err := b.client.MakeDir(ctx, guestwire.MakeDirRequest{PathRequest: at("a/b/c"), Parents: true}); err != nil {
		t.Fatal(err)
	}
	_, err := b.client.MakeDir(ctx, guestwire.MakeDirRequest{PathRequest: at("a")})
	wantKind(t, "a directory that is there", err, errs.AlreadyExists)
	_, err = b.client.MakeDir(ctx, guestwire.MakeDirRequest{PathRequest: at("x/y")})
	wantKind(t, "a directory without its parent", err, errs.NotFound)
	b.write("a/b/f", "1")
	if got := b.list("a", 1); got != "b" {
		t.Errorf("depth 1: %s", got)
	}
	if got := b.list("a", 3); got != "b b/c b/f" {
		t.Errorf("depth 3: %s", got)
	}
	if _, err := b.client.Move(ctx, guestwire.MoveRequest{PathRequest: at("a/b"), To: "moved"}); err != nil {
		t.Errorf("move: %v", err)
	}
	b.wantFile("moved/f", "1")
	b.write("other", "2")
	_, err = b.client.Move(ctx, guestwire.MoveRequest{PathRequest: at("other"), To: "moved/f"})
	wantKind(t, "move onto a file", err, errs.AlreadyExists)
	if _, err := b.client.Move(ctx, guestwire.MoveRequest{PathRequest: at("other"), To: "moved/f", Overwrite: true}); err != nil {
		t.Errorf("move onto a file on purpose: %v", err)
	}
	wantKind(t, "remove a full directory", b.client.Remove(ctx, guestwire.RemoveRequest{PathRequest: at("moved")}), errs.FailedPrecondition)
	if err := b.client.Remove(ctx, guestwire.RemoveRequest{PathRequest: at("moved"), Recursive: true}); err != nil {
		t.Errorf("remove a tree: %v", err)
	}
	wantKind(t, "remove nothing", b.client.Remove(ctx, guestwire.RemoveRequest{PathRequest: at("moved")}), errs.NotFound)
}

// list returns the names below a directory, relative to it, joined by spaces.
func (b *box) list(path string, depth int) string {
	b.t.Helper()
	s, err := b.client.ListDir(limited(b.t), guestwire.ListRequest{PathRequest: at(path), Depth: depth})
	if err != nil {
		b.t.Fatalf("list %s: %v", path, err)
	}
	defer s.Close()
	var names []string
	for {
		f, err := s.Next()
		if err == io.EOF {
			return strings.Join(names, " ")
		}
		if err != nil {
			b.t.Fatalf("list %s: %v", path, err)
		}
		names = append(names, strings.TrimPrefix(f.Path, "/home/user/"+path+"/"))
	}
}

// testWholeOrNothing sends less than it announced: nobody may see a part.
func testWholeOrNothing(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.write("f", "as it was")
	_, err := b.client.Write(limited(t), guestwire.WriteRequest{PathRequest: at("f"), Offset: -1, Size: 1000}, strings.NewReader("short"))
	if err == nil {
		t.Error("a write that ended early was taken")
	}
	b.wantFile("f", "as it was")
	b.prints("ls", "f\n")
	sum := sha256.New()
	var whole bytes.Buffer
	for i := range 20000 {
		fmt.Fprintf(io.MultiWriter(sum, &whole), "%d\n", i*i)
	}
	b.write("g", whole.String())
	got, err := b.readFile(guestwire.ReadRequest{PathRequest: at("g"), Length: -1})
	if want := [32]byte(sum.Sum(nil)); err != nil || sha256.Sum256([]byte(got)) != want {
		t.Errorf("what came back differs (%v)", err)
	}
}

// testSymlinks plants links that lead out; whatever the answer, it is the sandbox's own file.
func testSymlinks(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.write("real", "inside")
	b.runScript("ln -s real soft; ln -s ../../../../../../etc/passwd out; ln -s loop loop")
	info, err := b.client.Stat(limited(t), at("soft"))
	if err != nil || info.Type != guestwire.TypeSymlink || info.Target != "real" {
		t.Errorf("a link itself: %+v, %v", info, err)
	}
	follow := at("soft")
	follow.Follow = true
	if info, err = b.client.Stat(limited(t), follow); err != nil || info.Type != guestwire.TypeFile || info.Size != 6 {
		t.Errorf("what a link leads to: %+v, %v", info, err)
	}
	inside := b.runScript("cat /etc/passwd").stdout.String()
	for name, want := range map[string]string{"soft": "inside", "out": inside} {
		follow.Path = name
		if got, err := b.readFile(guestwire.ReadRequest{PathRequest: follow, Length: -1}); err != nil || got != want {
			t.Errorf("%s leads to %d bytes (%v), want %d", name, len(got), err, len(want))
		}
	}
	follow.Path = "loop"
	if _, err = b.readFile(guestwire.ReadRequest{PathRequest: follow, Length: -1}); err == nil {
		t.Error("a link to itself could be read")
	}
}

func testOwners(t *testing.T, h Harness) {
	b := startBox(t, h)
	info, err := b.client.Write(limited(t), guestwire.WriteRequest{PathRequest: at("deep/er/f"), Offset: -1, Parents: true, Size: 1, Mode: 0o600}, strings.NewReader("x"))
	if err != nil || info.UID != 1000 || info.Mode != 0o600 {
		t.Errorf("a file with parents: %+v, %v", info, err)
	}
	if info, err = b.client.Stat(limited(t), at("deep")); err != nil || info.UID != 1000 {
		t.Errorf("its parent: %+v, %v", info, err)
	}
	mode := uint32(0o755)
	if info, err = b.client.Chmod(limited(t), guestwire.ChmodRequest{PathRequest: at("deep/er/f"), Mode: &mode, UID: -1, GID: -1}); err != nil || info.Mode != mode {
		t.Errorf("chmod: %+v, %v", info, err)
	}
	_, err = b.client.Write(limited(t), guestwire.WriteRequest{PathRequest: at("/etc/passwd"), Offset: -1, Size: 1}, strings.NewReader("x"))
	wantKind(t, "write a file of root", err, errs.PermissionDenied)
	_, err = b.client.MakeDir(limited(t), guestwire.MakeDirRequest{PathRequest: at("/bin/new")})
	wantKind(t, "make a directory of root", err, errs.PermissionDenied, errs.FailedPrecondition)
}

// testInPlace writes into a file that somebody watches, and keeps attributes beside it.
func testInPlace(t *testing.T, h Harness) {
	b := startBox(t, h)
	put := func(text string, attributes map[string]string) guestwire.FileInfo {
		t.Helper()
		r := guestwire.WriteRequest{PathRequest: at("w/f"), Offset: -1, Size: int64(len(text)), Parents: true, InPlace: true, SetAttributes: attributes}
		r.Attributes = "user.test."
		info, err := b.client.Write(limited(t), r, strings.NewReader(text))
		if err != nil {
			t.Fatalf("write in place: %v", err)
		}
		return info
	}
	if info := put("the first", map[string]string{"a": "1", "b": "2"}); info.Size != 9 || len(info.Attributes) != 2 || info.Attributes["a"] != "1" {
		t.Errorf("a new file: %+v", info)
	}
	w, err := b.client.Watch(limited(t), guestwire.WatchRequest{PathRequest: at("w")})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if info := put("second", map[string]string{"b": "3"}); info.Size != 6 || len(info.Attributes) != 1 || info.Attributes["b"] != "3" {
		t.Errorf("written again: %+v", info)
	}
	b.wantFile("w/f", "second")
	for {
		e, err := w.Next()
		if err != nil {
			t.Fatalf("the watch ended with %v", err)
		}
		if e.Path != "/home/user/w/f" || e.Op == "create" {
			t.Errorf("writing in place shows as %s of %s", e.Op, e.Path)
		}
		if e.Op == "write" {
			break
		}
	}
	b.runScript("ln -s f w/link; ln -s nothing w/broken")
	s, err := b.client.ListDir(limited(t), guestwire.ListRequest{PathRequest: guestwire.PathRequest{Path: "w", Resolve: true, Attributes: "user.test."}, Depth: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for {
		f, err := s.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if want := f.Name != "broken"; want != (f.Attributes["b"] == "3") || (f.LeadsTo != nil) != (f.Name == "link") {
			t.Errorf("listed: %+v", f)
		}
		if f.LeadsTo != nil && (f.LeadsTo.Path != "/home/user/w/f" || f.LeadsTo.Type != guestwire.TypeFile || f.LeadsTo.Mode != 0o644) {
			t.Errorf("%s leads to %+v", f.Name, f.LeadsTo)
		}
	}
}

// testPrivileged works on files that the user may not touch: profile standard allows it, since its
// users become root when they like, and profile locked does not.
func testPrivileged(t *testing.T, h Harness) {
	for _, profile := range []isolation.Profile{isolation.Standard, isolation.Locked} {
		b := startProfile(t, h, profile)
		p := guestwire.PathRequest{Asker: guestwire.Asker{Privileged: true}, Path: "/made/by/f"}
		info, err := b.client.Write(limited(t), guestwire.WriteRequest{PathRequest: p, Offset: -1, Parents: true, Size: 1, InPlace: true}, strings.NewReader("x"))
		if profile == isolation.Locked {
			wantKind(t, "locked", err, errs.PermissionDenied)
			continue
		}
		if err != nil || info.UID != 1000 || info.Mode != 0o644 {
			t.Errorf("standard: %+v, %v", info, err)
		}
		if info, err = b.client.Stat(limited(t), at("/made/by")); err != nil || info.UID != 1000 {
			t.Errorf("a directory on the way: %+v, %v", info, err)
		}
		p.Path = "~/own"
		if info, err = b.client.MakeDir(limited(t), guestwire.MakeDirRequest{PathRequest: p}); err != nil || info.Path != "/home/user/own" || info.UID != 1000 {
			t.Errorf("a directory at home: %+v, %v", info, err)
		}
	}
}

func testWatch(t *testing.T, h Harness) {
	b := startBox(t, h)
	b.runScript("mkdir -p w/sub")
	w, err := b.client.Watch(limited(t), guestwire.WatchRequest{PathRequest: at("w"), Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	b.runScript("echo 1 > w/a; echo 2 > w/sub/b; rm w/a")
	wanted := map[string]bool{"create /home/user/w/a": true, "create /home/user/w/sub/b": true, "remove /home/user/w/a": true}
	for len(wanted) > 0 {
		e, err := w.Next()
		if err != nil {
			t.Fatalf("the watch ended with %v; still awaited: %v", err, wanted)
		}
		delete(wanted, e.Op+" "+e.Path)
	}
}
