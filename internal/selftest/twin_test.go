package selftest

import (
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// TestMain gives the tests a network of their own, in which a fake internet is.
func TestMain(m *testing.M) { os.Exit(world.Main(m)) }

// TestTwins runs every case in its deliberately weak sandbox, where it must come out wrong: a case
// that comes out right there would also come out right in a broken Casemate.
func TestTwins(t *testing.T) {
	testenv.NoLeaks(t)
	w := world.New(t)
	internet, err := OpenInternet(w.Net)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(internet.Close)
	// What B20 is to find: a socket that only the host's network namespace has.
	l, err := net.Listen("unix", "@casemate-twin-"+testenv.ServerID(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	boxes := map[Twin]*weakBox{}
	defer func() {
		for _, b := range boxes {
			if err := b.Delete(t.Context()); err != nil {
				t.Errorf("end the twin: %v", err)
			}
		}
	}()
	for _, c := range Cases() {
		if c.Twin == "" {
			continue
		}
		if boxes[c.Twin] == nil {
			boxes[c.Twin] = newWeakBox(t, c.Twin)
			if c.Twin == OpenNetwork {
				boxes[c.Twin].opens(t, w, internet)
			}
		}
		t.Run(c.ID, func(t *testing.T) { tryTwin(t, c, boxes[c.Twin], internet) })
		if c.TwinSpoils {
			if err := boxes[c.Twin].Delete(t.Context()); err != nil {
				t.Errorf("end the twin: %v", err)
			}
			delete(boxes, c.Twin)
		}
	}
}

func tryTwin(t *testing.T, c Case, box *weakBox, internet *Internet) {
	defer endStrays(t)
	if c.TwinSetup != "" {
		r, err := box.Run(t.Context(), Command{Argv: []string{"/bin/sh", "-c", c.TwinSetup}})
		if err != nil || r.Code != 0 {
			t.Fatalf("setup: %v, status %d: %s", err, r.Code, r.Output)
		}
	}
	c.Env = maps.Clone(c.Env)
	if c.Env == nil {
		c.Env = map[string]string{}
	}
	maps.Copy(c.Env, c.TwinEnv)
	if c.TwinLimits != nil {
		c.Limits = c.TwinLimits
	}
	for _, col := range columns(c) {
		want := c.want(col)
		if want.Not != "" {
			continue
		}
		r, err := Attack(t.Context(), c, col, box, Scene{true, internet})
		if c.TwinAgain && err == nil {
			testenv.Eventually(t, 5*time.Minute, "the machine is less busy", func() bool {
				r, err = Attack(t.Context(), c, col, box, Scene{true, internet})
				return err != nil
			})
		}
		if c.Flow != nil && c.Flow.Stays != "" {
			// What arrived is noted a moment after it was sent, so the attack may have to be tried again.
			testenv.Eventually(t, time.Minute, "the attack arrives: "+fmt.Sprint(err), func() bool {
				if err == nil || !strings.Contains(err.Error(), "reached the internet") {
					r, err = Attack(t.Context(), c, col, box, Scene{true, internet})
				}
				return err != nil && strings.Contains(err.Error(), "reached the internet")
			})
		}
		if inside := c.Inside(col) != ""; (err == nil) != inside {
			t.Errorf("%v comes out right in the weak sandbox %q: %v, seen from the host: %v: %s, %v", col, c.Twin, err == nil, inside, excerpt(r.Output), err)
		}
		// Only the attack may make it wrong, not a probe that does not work.
		if r.Code == 99 || r.Code == 127 || strings.Contains(r.Output, "Traceback") || strings.Contains(r.Output, "probe is broken") {
			t.Errorf("the probe itself does not work: status %d, %s", r.Code, r.Output)
		}
		if r.End == "signaled" && want.End != "signaled" {
			t.Errorf("the probe was killed by signal %d", r.Signal)
		}
		t.Logf("%v in %s: %v", col, c.Twin, err)
	}
}

// columns returns those of a case in which something else must come of it.
func columns(c Case) []Column {
	all := []Column{{Profile: "locked"}, {Profile: "standard"}}
	if c.Check == nil && reflect.DeepEqual(c.Locked, c.Standard) {
		all = all[:1] // the other would be the same once more
	}
	for _, d := range Deviations() {
		switch {
		case d.ID != c.ID:
		case d.Profile == "":
			all = append(all, Column{d.Isolation, "locked"})
		default:
			all = append(all, Column{d.Isolation, d.Profile})
		}
	}
	return all
}

// TestDeviations wants a case and a reason for each, and for what is looked at from the host a test that is there.
func TestDeviations(t *testing.T) {
	for _, d := range Deviations() {
		i := slices.IndexFunc(Cases(), func(c Case) bool { return c.ID == d.ID })
		if i < 0 || d.Why == "" || d.Isolation == "" {
			t.Errorf("%+v is of no case, of no backend, or without a reason", d)
			continue
		}
		if file, test, ok := strings.Cut(d.Inside, " "); d.Inside != "" {
			text, err := os.ReadFile(filepath.Join(testenv.Module(t), file))
			if !ok || err != nil || !strings.Contains(string(text), "func "+test+"(") {
				t.Errorf("%s names %q, which is no test: %v", d.ID, d.Inside, err)
			}
		}
	}
}

// endStrays ends what D10 leaves in the shared twin: processes that sleep for a time that only this
// battery asks for.
func endStrays(t *testing.T) {
	stray := regexp.MustCompile(`^sleep\x003133[7-9]\.5\x00$`)
	find := func() []int {
		entries, _ := os.ReadDir("/proc")
		var pids []int
		for _, e := range entries {
			b, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
			env, _ := os.ReadFile("/proc/" + e.Name() + "/environ")
			if stray.Match(b) && strings.Contains(string(env), twinOf()) {
				pids = append(pids, atoi(e.Name()))
			}
		}
		return pids
	}
	for _, pid := range find() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	testenv.Eventually(t, 5*time.Second, "the strays are gone", func() bool { return len(find()) == 0 })
}

func atoi(s string) int {
	n := 0
	for _, c := range s {
		n = 10*n + int(c-'0')
	}
	return n
}

// TestEveryCaseCanFail wants a twin for each case, or a reason.
func TestEveryCaseCanFail(t *testing.T) {
	if strings.Contains(pythonPrelude, "'") {
		t.Error("the shell's prelude holds Python's between single quotes, and it has one")
	}
	seen := map[string]bool{}
	for _, c := range Cases() {
		if seen[c.ID] {
			t.Errorf("two cases are called %s", c.ID)
		}
		seen[c.ID] = true
		if (c.Twin == "") == (c.Untwinned == "") {
			t.Errorf("%s has twin %q and reason %q: it needs one of the two", c.ID, c.Twin, c.Untwinned)
		}
		if (c.Script == "") == (c.Python == "") || c.Title == "" || c.Class == "" {
			t.Errorf("%s is not complete", c.ID)
		}
		if f := c.Flow; f != nil {
			for _, p := range []string{f.Arrives, f.Stays} {
				if _, err := regexp.Compile("(?m)" + p); err != nil {
					t.Errorf("%s: %v", c.ID, err)
				}
			}
		}
		for _, w := range []Want{c.Locked, c.Standard} {
			if w.Match == "" && w.Reject == "" && w.Not == "" && w.End == "" {
				t.Errorf("%s wants nothing", c.ID)
			}
			for _, p := range []string{w.Match, w.Reject} {
				if _, err := regexp.Compile("(?m)" + p); err != nil {
					t.Errorf("%s: %v", c.ID, err)
				}
			}
		}
	}
	for _, id := range []string{
		"A01", "A02", "A03", "A05", "A06", "A07", "A08", "A10", "A11", "A12", "A13",
		"B01", "B02", "B03", "B04", "B05", "B06", "B07", "B09", "B10", "B11", "B12", "B13", "B15", "B16", "B17", "B19", "B20", "B22", "B23", "B30",
		"C01", "C02", "C04", "C05", "C06", "C07", "C09", "C10", "C11", "C13", "C14", "C15", "C16",
		"F01", "F02", "F03", "F04", "F05", "F06", "F07", "F08", "F10", "F12", "F13", "F14", "F15", "F17", "F18", "F20", "F21", "F22", "F23",
		"D01", "D02", "D03", "D04", "D05", "D06", "D07", "D09", "D10", "D11", "D13", "D14", "D15", "D17", "D18", "D20",
	} {
		if !seen[id] {
			t.Errorf("the battery lacks %s", id)
		}
	}
}

// TestFindArgument is the twin of A10: a process whose arguments hold what is looked for is found, and nothing where none does.
func TestFindArgument(t *testing.T) {
	text := "casemate-argument-" + testenv.ServerID(t)
	if err := findArgument(text); err != nil {
		t.Errorf("before one has it: %v", err)
	}
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", "read line", "sh", text)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := findArgument(text); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d ", cmd.Process.Pid)) {
		t.Errorf("process %d has it: %v", cmd.Process.Pid, err)
	}
	_ = stdin.Close()
	_ = cmd.Wait() // there was no line to read
}
