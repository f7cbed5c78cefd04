package template

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"casemate.dev/test/stage"
)

// What instructions make of files is what docker build makes of them: the listings are of the trees that it gave for the
// same Dockerfiles.
func testTrees(t *testing.T, s *stage.Stage) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"a.txt": "a", "b.txt": "b", "dir/x": "x", "dir/sub/y": "yy", "t.tgz": string(tgz(t, [2]string{"in/f", "f"})), "priv/f": "f",
		"one": "1", ".dockerignore": "skip\n**/*.pyc\n!keep.pyc\n", "skip": "", "dir/z.pyc": "", "keep.pyc": "",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(dir+"/priv", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(dir+"/one", dir+"/two"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("a.txt", dir+"/ln"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, lines, want string }{
		{"files", "COPY a.txt /w/f\nCOPY a.txt b.txt /w/d/\nCOPY dir /w/e\nCOPY ln /w/ln\nCOPY priv /w/priv", `
drwxr-xr-x 0/0 w/
drwxr-xr-x 0/0 w/d/
-rw-r--r-- 0/0 w/d/a.txt
-rw-r--r-- 0/0 w/d/b.txt
drwxr-xr-x 0/0 w/e/
drwxr-xr-x 0/0 w/e/sub/
-rw-r--r-- 0/0 w/e/sub/y
-rw-r--r-- 0/0 w/e/x
-rw-r--r-- 0/0 w/f
-rw-r--r-- 0/0 w/ln
drwxr-xr-x 0/0 w/priv/
-rw-r--r-- 0/0 w/priv/f`},
		{"owners", "COPY --chown=5:6 a.txt /w/n/f\nCOPY --chown=7 --chmod=750 dir /w/d\nUSER 8:9\nWORKDIR /w/mine\nCOPY a.txt .", `
drwxr-xr-x 5/6 w/
drwxr-xr-x 7/7 w/d/
drwxr-x--- 7/7 w/d/sub/
-rwxr-x--- 7/7 w/d/sub/y
-rwxr-x--- 7/7 w/d/x
drwxr-xr-x 8/9 w/mine/
-rw-r--r-- 0/0 w/mine/a.txt
drwxr-xr-x 5/6 w/n/
-rw-r--r-- 5/6 w/n/f`},
		{"archives", "ADD t.tgz /w/t\nADD --chown=5:6 t.tgz a.txt /w/c/\nADD --unpack=false t.tgz /w/whole", `
drwxr-xr-x 0/0 w/
drwxr-xr-x 5/6 w/c/
-rw-r--r-- 5/6 w/c/a.txt
drwxr-xr-x 0/0 w/c/in/
-rw-r--r-- 0/0 w/c/in/f
drwxr-xr-x 0/0 w/t/
drwxr-xr-x 0/0 w/t/in/
-rw-r--r-- 0/0 w/t/in/f
-rw-r--r-- 0/0 w/whole`},
		{"links", "RUN mkdir -p /w/real && echo old > /w/file && ln -s file /w/l && ln -s real /w/d\nCOPY a.txt /w/l\nCOPY a.txt /w/d/\nCOPY one two /w/h/", `
drwxr-xr-x 0/0 w/
lrwxrwxrwx 0/0 w/d -> real
-rw-r--r-- 0/0 w/file
drwxr-xr-x 0/0 w/h/
-rw-r--r-- 0/0 w/h/one
hrw-r--r-- 0/0 w/h/two link to w/h/one
lrwxrwxrwx 0/0 w/l -> file
drwxr-xr-x 0/0 w/real/
-rw-r--r-- 0/0 w/real/a.txt`},
		{"patterns", "COPY *.txt /w/\nCOPY none* /never/\nCOPY --exclude=sub dir /w/x\nCOPY --parents dir/*/y /w/p/\nCOPY *.pyc /w/pyc/\nCOPY dir /w/dir", `
drwxr-xr-x 0/0 w/
-rw-r--r-- 0/0 w/a.txt
-rw-r--r-- 0/0 w/b.txt
drwxr-xr-x 0/0 w/dir/
drwxr-xr-x 0/0 w/dir/sub/
-rw-r--r-- 0/0 w/dir/sub/y
-rw-r--r-- 0/0 w/dir/x
drwxr-xr-x 0/0 w/p/
drwxr-xr-x 0/0 w/p/dir/
drwxr-xr-x 0/0 w/p/dir/sub/
-rw-r--r-- 0/0 w/p/dir/sub/y
drwxr-xr-x 0/0 w/pyc/
-rw-r--r-- 0/0 w/pyc/keep.pyc
drwxr-xr-x 0/0 w/x/
-rw-r--r-- 0/0 w/x/x`},
		{"heredocs", "ARG V=v\nCOPY --chmod=600 <<A <<'B' /w/\n$V\nA\n$V long\nB\nRUN <<END\nset -e\necho 123 > /w/c\nEND\nRUN cat <<END > /w/d\nword\nEND", `
drwxr-xr-x 0/0 w/
-rw------- 0/0 w/A
-rw------- 0/0 w/B
-rw-r--r-- 0/0 w/c
-rw-r--r-- 0/0 w/d`},
		{"mounts", "RUN --mount=type=bind,target=/m cat /m/a.txt > /f && cat /m/dir/x >> /f && test ! -e /m/skip\n" +
			"RUN --mount=type=cache,target=/w/cache --mount=type=tmpfs,target=/w/tmp echo > /w/cache/x && echo > /w/tmp/y\nRUN mkdir -p /w && echo > /w/f", `
drwxr-xr-x 0/0 w/
-rw-r--r-- 0/0 w/f`},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "Dockerfile")
			text := "FROM small\n" + c.lines + "\nUSER root\nRUN tar -C / --sort=name -c w | tar -tv --numeric-owner\n"
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			out, err := s.CLI("", "template", "build", "-t", c.name, "--no-lock", "-f", file, dir)
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if got := listing(out); got != c.want {
				t.Errorf("the tree is %s\nand should be %s", got, c.want)
			}
		})
	}
}

// listing takes the lines of tar's listing out of a build's log, without sizes and times.
func listing(log string) string {
	got := ""
	for line := range strings.Lines(log) {
		_, entry, ok := strings.Cut(line, "| ")
		f := strings.Fields(entry)
		if ok && len(f) >= 6 && len(f[0]) == 10 && strings.Contains(f[1], "/") {
			got += "\n" + f[0] + " " + f[1] + " " + strings.Join(f[5:], " ")
		}
	}
	return got
}

// A build FROM scratch holds what is copied, and the directories that every sandbox mounts something on; a stage that only an ONBUILD copies from is built for it.
func testScratch(t *testing.T, s *stage.Stage) {
	dir := t.TempDir()
	build := func(name, text string) string {
		t.Helper()
		if err := os.WriteFile(dir+"/Dockerfile", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := s.CLI("", "template", "build", "-t", name, "--no-lock", dir)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return out
	}
	var big bytes.Buffer
	w := tar.NewWriter(&big)
	if err := w.WriteHeader(&tar.Header{Name: "f", Typeflag: tar.TypeReg, Mode: 0o644, Uid: 1 << 20, Gid: 7}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(w.Close(), os.WriteFile(dir+"/big.tar", big.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	out := build("owners", "FROM small\nADD big.tar /w/\nRUN tar -C / -c w | tar -tv --numeric-owner\n")
	if !strings.Contains(out, "1 files belong to ids above 65535") || !strings.Contains(listing(out), " 65534/7 w/f") {
		t.Errorf("of an owner that no sandbox has:\n%s", out)
	}
	build("empty", "FROM small AS tools\nFROM scratch\nCOPY --from=tools --chown=5 /usr/bin/cat /bin/\nENV A=b\n")
	build("parent", "FROM small\nONBUILD COPY --from=late /made /copied\nONBUILD RUN cat /copied\n")
	if out := build("child", "FROM small AS late\nRUN echo of late > /made\nFROM parent\n"); !strings.Contains(out, "| of late\n") {
		t.Errorf("the trigger did not see the stage:\n%s", out)
	}
	out = build("look", "FROM small\nRUN --mount=from=empty,target=/w tar -C / --sort=name -c w | tar -tv --numeric-owner\n")
	if got, want := listing(out), "\ndrwxr-xr-x 0/0 w/\ndrwxr-xr-x 5/5 w/bin/\n-rwxr-xr-x 5/5 w/bin/cat"+
		"\ndrwxr-xr-x 0/0 w/dev/\ndrwxr-xr-x 0/0 w/proc/\ndrwxr-xr-x 0/0 w/sys/"; got != want {
		t.Errorf("the tree is %s", got)
	}
}
