package guest_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// leaf is an entry and its content.
type leaf struct {
	guestwire.Entry
	data string
}

func file(p, data string) leaf {
	return leaf{guestwire.Entry{Path: p, Type: guestwire.TypeFile, Mode: 0o644, Size: int64(len(data))}, data}
}

func link(p, target string) leaf {
	return leaf{Entry: guestwire.Entry{Path: p, Type: guestwire.TypeSymlink, Target: target}}
}

func folder(p string) leaf {
	return leaf{Entry: guestwire.Entry{Path: p, Type: guestwire.TypeDir, Mode: 0o755}}
}

func hard(p, first string) leaf {
	return leaf{Entry: guestwire.Entry{Path: p, Type: guestwire.TypeFile, Mode: 0o644, Hard: first}}
}

// unpack puts a tree below a directory as root, as a build does.
func (r *runner) unpack(dir, owner string, tree ...leaf) (guestwire.UnpackReply, error) {
	r.t.Helper()
	var b bytes.Buffer
	p := guestwire.NewPack(&b)
	for _, l := range tree {
		if err := p.Add(l.Entry, strings.NewReader(l.data)); err != nil {
			r.t.Fatal(err)
		}
	}
	return r.unpackRaw(dir, owner, &b)
}

func (r *runner) unpackRaw(dir, owner string, in io.Reader) (guestwire.UnpackReply, error) {
	req := guestwire.UnpackRequest{PathRequest: by("root", dir), Owner: owner}
	req.Privileged = true
	return r.Unpack(r.t.Context(), req, in)
}

// TestUnpackHostileTrees gives trees that want to write elsewhere than below their directory. The twin is what
// the plain kernel does with the same links.
func TestUnpackHostileTrees(t *testing.T) {
	r := newRunner(t, setup{})
	r.rootOut("mkdir -p /root/prey; echo kept > /root/prey/file; chmod 600 /root/prey/file; chmod 700 /root/prey")
	for name, c := range map[string]struct {
		want string
		tree []leaf
	}{
		"up":                      {"not clean", []leaf{file("../root/prey/file", "evil")}},
		"up inside":               {"not clean", []leaf{file("a/../../root/prey/file", "evil")}},
		"absolute":                {"not clean", []leaf{file("/root/prey/file", "evil")}},
		"empty":                   {"not clean", []leaf{file("", "evil")}},
		"dots":                    {"not clean", []leaf{file("..", "evil")}},
		"NUL":                     {"malformed", []leaf{file("a\x00b", "evil")}},
		"a file as top":           {"no directory", []leaf{file(".", "evil")}},
		"through a link":          {"symbolic link of the tree", []leaf{link("l", "/root/prey"), file("l/file", "evil")}},
		"through two":             {"symbolic link of the tree", []leaf{link("k", "/root"), link("l", "k/prey"), file("l/file", "evil")}},
		"through a link inwards":  {"symbolic link of the tree", []leaf{folder("d"), link("d/l", "../../root/prey"), file("d/l/file", "evil")}},
		"a directory over a link": {"symbolic link of the tree", []leaf{link("l", "/root/prey"), folder("l"), file("l/file", "evil")}},
		"hard link out":           {"not clean", []leaf{hard("h", "../root/prey/file")}},
		"hard link by a link":     {"symbolic link of the tree", []leaf{link("l", "/root/prey"), hard("h", "l/file"), file("h", "evil")}},
		"hard link to a link":     {"is a symbolic link", []leaf{link("l", "/root/prey/file"), hard("h", "l")}},
		"hard link to a folder":   {"is a directory", []leaf{folder("d"), hard("h", "d")}},
		"magic link":              {"symbolic link of the tree", []leaf{link("l", "/proc/self/fd"), file("l/3", "evil")}},
		"device":                  {"neither a file", []leaf{{Entry: guestwire.Entry{Path: "dev", Type: guestwire.TypeOther}}}},
		"over a directory":        {"is a directory", []leaf{folder("d"), file("d", "evil")}},
		"below a file":            {"not a directory", []leaf{file("f", "x"), file("f/g", "evil")}},
		"a long name":             {"too long", []leaf{file(strings.Repeat("x", 256), "evil")}},
	} {
		t.Run(name, func(t *testing.T) {
			r.rootOut("rm -rf /tmp/here")
			_, err := r.unpack("/tmp/here", "", c.tree...)
			if text, _ := errs.PublicText(err); err == nil || !strings.Contains(text, c.want) {
				t.Errorf("%v does not say %q", err, c.want)
			}
			if got := r.rootOut("cat /root/prey/file; ls /root/prey | wc -l; stat -c %a /root/prey/file /root/prey"); got != "kept\n1\n600\n700\n" {
				t.Fatalf("what lies outside is now:\n%s", got)
			}
		})
	}
	// The twin.
	r.rootOut("rm -rf /tmp/here; mkdir /tmp/here; ln -s /root/prey /tmp/here/l; echo evil > /tmp/here/l/file")
	if got := r.rootOut("cat /root/prey/file"); got != "evil\n" {
		t.Errorf("the plain kernel does not go through the link: %q", got)
	}
}

// TestUnpackHarmlessTrees are near to those that are refused.
func TestUnpackHarmlessTrees(t *testing.T) {
	r := newRunner(t, setup{})
	r.rootOut("mkdir -p /tmp/here /tmp/there; ln -s /tmp/there /tmp/here/old; mkfifo /tmp/here/fifo; mkdir -m 711 /tmp/there/d;" +
		"python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/tmp/here/sock\")'; ln -s /tmp/there/kept /tmp/here/ln; echo kept > /tmp/there/kept")
	got, err := r.unpack("/tmp/here", "",
		folder("."), file("fifo", "a"), file("sock", "b"), file("ln", "c"), file("old/new", "d"), folder("old"), hard("old/again", "old/new"),
		link("swap", "/root"), folder("other"), file("swap", "a link that is replaced"), file("caf\xe9", "e"), file("a\nb", "f"), file("-n", "g"),
	)
	if err != nil || got.Entries != 13 {
		t.Fatalf("%+v, %v", got, err)
	}
	out := r.rootOut(`cd /tmp/here; cat fifo sock ln old/new old/again caf* a*b ./-n; echo; cat /tmp/there/kept; stat -c '%F' fifo sock ln old swap; stat -c %h old/new`)
	const regular = "regular file\n"
	if want := "abcddefg\nkept\n" + regular + regular + regular + "symbolic link\n" + regular + "2\n"; out != want {
		t.Errorf("got\n%s\nwant\n%s", out, want)
	}
}

// TestUnpackBrokenStreams sends streams that say other sizes than they have, or break off.
func TestUnpackBrokenStreams(t *testing.T) {
	r := newRunner(t, setup{})
	entry := func(text string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...)
	}
	big := func(n int64) string { return fmt.Sprintf(`{"path":"f","type":"file","mode":420,"size":%d}`, n) }
	for name, b := range map[string][]byte{
		"half a length":        {0, 0},
		"a length too large":   {0xff, 0xff, 0xff, 0xff},
		"half an entry":        {0, 0, 0, 9, '{'},
		"no JSON":              entry("nothing"),
		"a negative size":      entry(big(-1)),
		"less than it says":    append(entry(big(100)), "only this"...),
		"far less":             entry(big(1 << 62)),
		"more than it says":    append(entry(big(1)), "more than this"...),
		"a directory's data":   append(entry(`{"path":"d","type":"dir","mode":493,"size":5}`), "12345"...),
		"a hard link's data":   append(entry(`{"path":"h","type":"file","mode":420,"hard":"f","size":5}`), "12345"...),
		"a hard link of a dir": entry(`{"path":"h","type":"dir","mode":420,"hard":"f"}`),
		"an escape cut short":  entry("{\"path\":\"f\\u0000\",\"type\":\"file\"}"),
	} {
		_, err := r.unpackRaw("/tmp/"+strings.ReplaceAll(name, " ", "-"), "", bytes.NewReader(b))
		if err == nil {
			t.Errorf("%s is taken", name)
		}
	}
	// What breaks off on the server's side is no end of the tree.
	broken := io.MultiReader(bytes.NewReader(append(entry(big(1)), 'x')), breaking{})
	if _, err := r.unpackRaw("/tmp/broken", "", broken); err == nil || !strings.Contains(err.Error(), errBroken.Error()) {
		t.Errorf("a stream that breaks off between two entries: %v", err)
	}
	if _, err := r.unpack("/tmp/after", "", file("f", "x")); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

var errBroken = errors.New("the source broke off")

type breaking struct{}

func (breaking) Read([]byte) (int, error) { return 0, errBroken }

// TestUnpackOwners gives trees to others, and in profile locked to the only user that there is.
func TestUnpackOwners(t *testing.T) {
	r := newRunner(t, setup{})
	odd := file("odd", "x")
	odd.UID, odd.GID, odd.Mode = 1001, 2000, 0o4755
	for owner, want := range map[string]string{
		"": "1001:2000 4755\n", "user": "1000:1000 4755\n", "other:extra": "1001:2000 4755\n", ":5": "1001:5 4755\n", "7:8": "7:8 4755\n",
	} {
		if _, err := r.unpack("/tmp/o", owner, odd); err != nil {
			t.Errorf("%q: %v", owner, err)
			continue
		}
		if got := r.rootOut("stat -c '%u:%g %a' /tmp/o/odd"); got != want {
			t.Errorf("%q: %q, want %q", owner, got, want)
		}
	}
	for _, owner := range []string{"nobody-here", "user:nobody-here", "user\n", "-1", "4294967295", "99999999999"} {
		if _, err := r.unpack("/tmp/p", owner, odd); err == nil {
			t.Errorf("%q is taken as an owner: %s", owner, r.rootOut("stat -c '%u:%g' /tmp/p/odd"))
		}
	}
}

// TestUnpackRace swaps what was just made for a link to another's file, as the directory's owner can: neither mode
// nor owner nor time of the other file change, and nothing is written into it.
func TestUnpackRace(t *testing.T) {
	r := newRunner(t, setup{})
	r.rootOut("echo kept > /root/prey; chmod 600 /root/prey; mkdir -m 700 /root/dir; touch -d @1 /root/prey /root/dir; mkdir /tmp/d; chown user /tmp/d")
	p := guestwire.StartProcess{ID: "swap", Argv: []string{"python3", "-c", `
import os
os.chdir("/tmp/d")
while True:
    for n in ("f", "sub", "l"):
        try:
            os.rename(n, "gone-" + n)
        except OSError:
            try: os.rename("gone-" + n, "older-" + n + str(os.getpid()))
            except OSError: pass
            continue
        try: os.symlink("/root/dir" if n == "sub" else "/root/prey", n)
        except OSError: pass
`}}
	if _, err := r.Start(t.Context(), p, nil); err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		f, sub := file("f", "evil"), folder("sub")
		f.Mode, sub.Mode, f.MTime, sub.MTime = 0o4777, 0o777, int64(i+1000)*1e9, int64(i+1000)*1e9
		_, _ = r.unpack("/tmp/d", "user", f, sub, link("l", "nowhere")) // it may fail, as a name is taken
	}
	if got := r.rootOut("cat /root/prey; stat -c '%u %a %Y' /root/prey; stat -c '%u %a' /root/dir"); got != "kept\n0 600 1\n0 700\n" {
		t.Errorf("the others' files are now:\n%s", got)
	}
}

// rootOut runs a script as root inside, and returns what it printed.
func (r *runner) rootOut(script string) string {
	r.t.Helper()
	got := r.runRoot(script)
	if len(got.err) > 0 {
		r.t.Errorf("%s: %s", script, got.err)
	}
	return string(got.out)
}
