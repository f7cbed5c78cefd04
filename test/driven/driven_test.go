package driven

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
	"casemate.dev/test/stage"
)

func TestMain(m *testing.M) { os.Exit(stage.Main(m)) }

// TestDriven attacks sandboxes of profile standard, in which there is a root, of every backend.
func TestDriven(t *testing.T) {
	s := stage.Start(t, "--runsc="+testenv.Runsc(t))
	image := stage.Image(t, "/usr/bin/bash", "/usr/bin/ln", "/usr/bin/mkdir", "/usr/bin/mv", "/usr/bin/ls", "/usr/bin/touch", "/usr/bin/chmod", "/usr/bin/sha256sum")
	if _, _, err := s.Images.Import(t.Context(), bytes.NewReader(image), "small"); err != nil {
		t.Fatal(err)
	}
	for _, isolation := range []string{"namespace", "gvisor"} {
		sb, err := s.Sandboxes.Create(t.Context(), &client.CreateRequest{Template: "small", Profile: "standard", Isolation: isolation})
		if err != nil {
			t.Fatal(err)
		}
		b := &box{Stage: s, id: sb.GetId()}
		for _, c := range []struct {
			id string
			do func(*testing.T, *box)
		}{
			{"E01 names that climb", climbingNames},
			{"E02 links", links},
			{"E03 a directory that becomes a link", swappedDirectory},
			{"E07 uploads whole or not at all", uploads},
			{"E21 programs planted for helpers", plantedPrograms},
			{"D07 output that a server can't keep", endlessOutput},
		} {
			t.Run(isolation+"/"+c.id, func(t *testing.T) { c.do(t, b) })
		}
	}
}

// box is a sandbox under attack.
type box struct {
	*stage.Stage
	id string
}

const root = "root"

// write writes a file through the API as root inside, in directories that are made where they are missing, and overwrite in one
// that is there.
func (b *box) write(path, text string) error {
	_, err := b.Files.Write(context.Background(), b.id, path, strings.NewReader(text), client.WriteOptions{User: root, Parents: true})
	return err
}

func (b *box) overwrite(path, text string) error {
	_, err := b.Files.Write(context.Background(), b.id, path, strings.NewReader(text), client.WriteOptions{User: root})
	return err
}

// asRoot runs a script as root inside.
func (b *box) asRoot(t *testing.T, env map[string]string, script string) string {
	t.Helper()
	r, err := b.Processes.Execute(t.Context(), b.id, &client.ProcessSpec{Argv: []string{"/usr/bin/bash", "-c", script}, User: root, Env: env, Timeout: durationpb.New(testenv.Unhurried)}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return string(r.GetStdout()) + string(r.GetStderr())
}

// absent fails where the host has a file.
func absent(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); err == nil {
		t.Errorf("the host has %s", path)
		_ = os.Remove(path)
	}
}

// probe is a name that nothing else has.
func probe(t *testing.T, word string) string {
	return "casemate-" + word + "-" + testenv.ServerID(t)
}

// careless is a server that joins names to a root of its own and opens them: the twin of those that follow.
type careless struct{ root string }

func (c careless) write(path, text string) error {
	return os.WriteFile(filepath.Clean(c.root)+"/"+path, []byte(text), 0o600)
}

// ATTACK: the file API is given names that climb out of the sandbox's root, or are absolute.
// TWIN: a server that joins names.
func climbingNames(t *testing.T, b *box) {
	name := probe(t, "e01")
	for _, path := range []string{"../../../../../../../../tmp/" + name, "/tmp/" + name, "a/../../../../../../../../tmp/" + name, "/proc/self/root/tmp/" + name} {
		err := b.write(path, "x")
		absent(t, "/tmp/"+name)
		t.Logf("%s: %v", path, err)
	}
	if got := b.asRoot(t, nil, "cat /tmp/"+name); got != "x" {
		t.Errorf("none of the names led to the sandbox's own root: %q", got)
	}
	outside := t.TempDir()
	inside := filepath.Join(outside, "root")
	if err := os.Mkdir(inside, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := (careless{inside}).write("../"+name, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(outside, name)); err != nil {
		t.Errorf("the twin did not climb: %v", err)
	}
}

// ATTACK: root inside makes links to directories that the host has too, and the API writes and reads through them.
// TWIN: a server that follows links from the host.
func links(t *testing.T, b *box) {
	name := probe(t, "e02")
	host := t.TempDir()
	if err := os.WriteFile(filepath.Join(host, "secret"), []byte("the host's"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.asRoot(t, nil, "mkdir -p /w; ln -sfn /tmp /w/l; ln -sfn "+host+" /w/h; ln -sfn /etc/"+name+" /w/f; ln -sfn / /w/r")
	for path, at := range map[string]string{"/w/l/" + name: "/tmp/" + name, "/w/f": "/etc/" + name, "/w/r/tmp/" + name + "r": "/tmp/" + name + "r"} {
		err := b.write(path, "x")
		absent(t, at)
		t.Logf("%s: %v", path, err)
	}
	for _, path := range []string{"/w/h/secret", "/w/r" + host + "/secret"} {
		if got, err := b.Files.ReadAll(t.Context(), b.id, path); err == nil {
			t.Errorf("read %q through %s", got, path)
		}
	}
	inside := t.TempDir()
	if err := os.Symlink(host, filepath.Join(inside, "l")); err != nil {
		t.Fatal(err)
	}
	if err := (careless{inside}).write("l/"+name, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(host, name)); err != nil {
		t.Errorf("the twin did not follow: %v", err)
	}
}

// ATTACK: a directory becomes a link to / and back, again and again, while the API writes below it.
// TWIN: a server that looks first and opens then.
func swappedDirectory(t *testing.T, b *box) {
	name := probe(t, "e03")
	const swap = `mkdir -p %[1]s/race/real; cd %[1]s/race; ln -sfn %[2]s link; i=0
while [ ! -e stop ] && [ $i -lt 20000 ]; do mv -T real d; mv -T d real; mv -T link d; mv -T d link; i=$((i+1)); done; echo swapped $i`
	swapped := make(chan string, 1)
	go func() {
		r, err := b.Processes.Execute(context.Background(), b.id, &client.ProcessSpec{Argv: []string{"/usr/bin/bash", "-c", fmt.Sprintf(swap, "/w2", "/")}, User: root, Timeout: durationpb.New(testenv.Unhurried)}, nil)
		swapped <- fmt.Sprint(string(r.GetStdout()), err)
	}()
	testenv.Eventually(t, patience, "the race is on", func() bool { return b.overwrite("/w2/race/d/"+name, "x") == nil })
	for range 300 {
		_ = b.overwrite("/w2/race/d/"+name, "x") // it is there at times only
	}
	if err := b.overwrite("/w2/race/stop", ""); err != nil {
		t.Error(err)
	}
	t.Log(testenv.Receive(t, "the swapping ends", swapped))
	absent(t, "/"+name)
	// The twin sees the directory, and opens what has become the link.
	inside, outside := t.TempDir(), t.TempDir()
	d := filepath.Join(inside, "d")
	if err := os.Mkdir(d, 0o700); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(d); err != nil || !info.IsDir() {
		t.Fatal(err)
	}
	if err := os.Remove(d); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, d); err != nil {
		t.Fatal(err)
	}
	if err := (careless{inside}).write("d/"+name, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(outside, name)); err != nil {
		t.Errorf("the twin did not follow: %v", err)
	}
}
