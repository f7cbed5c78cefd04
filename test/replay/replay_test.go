package replay

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
	"casemate.dev/test/stage"
)

func TestMain(m *testing.M) { os.Exit(stage.Main(m)) }

// counts are how many processes there are of each verdict.
type counts struct {
	Reproduced   int `json:"reproduced"`
	Normalised   int `json:"normalised"`
	Diverged     int `json:"diverged"`
	Unstable     int `json:"unstable"`
	NotAttempted int `json:"not_attempted"`
}

// report is what replay says to programs.
type report struct {
	counts
	Processes []struct {
		Process    string   `json:"process"`
		Argv       []string `json:"argv"`
		Verdict    string   `json:"verdict"`
		Reason     string   `json:"reason"`
		Difference *struct {
			Part     string `json:"part"`
			Recorded string `json:"recorded"`
			Replayed string `json:"replayed"`
		} `json:"difference"`
	} `json:"processes"`
}

// commands reads the list of commands, all of them or the few of the short test.
func commands(t *testing.T, all bool) []string {
	t.Helper()
	text, err := os.ReadFile("commands.txt")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		short, marked := strings.CutPrefix(line, "! ")
		if line != "" && line[0] != '#' && (all || marked) {
			out = append(out, short)
		}
	}
	return out
}

// ordinary runs commands in one sandbox, each as a shell's, and then again.
func ordinary(t *testing.T, s *stage.Stage, list []string) report {
	t.Helper()
	sb, err := s.Sandboxes.Create(t.Context(), &client.CreateRequest{FileChanges: "full", NoNetwork: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range list {
		if _, err := s.Processes.Run(t.Context(), sb.GetId(), &client.ProcessSpec{Argv: []string{"/bin/sh", "-c", c}}, client.RunOptions{Hold: true}); err != nil {
			t.Fatalf("%s: %v", c, err)
		}
	}
	out, err := s.CLI("", "replay", sb.GetId(), "--json", "--save", s.Dir+"/runs")
	var r report
	if bad := json.Unmarshal([]byte(out), &r); bad != nil {
		t.Fatalf("%v %v: %s", bad, err, out)
	}
	for _, p := range r.Processes {
		if p.Verdict != "reproduced" && p.Verdict != "normalised" {
			t.Logf("%s: %s %s %+v", p.Verdict, p.Argv[len(p.Argv)-1], p.Reason, p.Difference)
		}
	}
	t.Logf("%d reproduced, %d after normalising, %d diverged, %d unstable, %d not attempted", r.Reproduced, r.Normalised, r.Diverged, r.Unstable, r.NotAttempted)
	if len(r.Processes) != len(list) {
		t.Errorf("%d commands, %d verdicts", len(list), len(r.Processes))
	}
	// The same verdicts come of the records alone.
	if _, err := s.CLI("", "journal", "export", sb.GetId(), "-o", s.Dir+"/bundle"); err != nil {
		t.Fatal(err)
	}
	out, _ = s.CLI("", "verify", s.Dir+"/bundle", "--replay", s.Dir+"/runs", "--json")
	var verified struct {
		Reproduced counts `json:"reproduced"`
	}
	if err := json.Unmarshal([]byte(out), &verified); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if verified.Reproduced != r.counts {
		t.Errorf("verify says %+v, and replay %+v", verified.Reproduced, r.counts)
	}
	return r
}

// TestOrdinaryCommands: what people run every day is reproduced, in template host.
func TestOrdinaryCommands(t *testing.T) {
	testenv.Root(t)
	list := commands(t, false)
	r := ordinary(t, stage.Start(t), list)
	if good := r.Reproduced + r.Normalised; good != len(list) {
		t.Errorf("%d of %d are reproduced", good, len(list))
	}
}

// TestCode runs code again, in contexts that keep variables, with one that was started anew, and in fresh interpreters.
func TestCode(t *testing.T) {
	s := stage.Start(t)
	sb, err := s.Sandboxes.Create(t.Context(), &client.CreateRequest{FileChanges: "full", NoNetwork: true})
	if err != nil {
		t.Fatal(err)
	}
	run := func(spec *client.CodeSpec) {
		t.Helper()
		if _, err := s.Contexts.Run(t.Context(), sb.GetId(), spec, client.CodeOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	run(&client.CodeSpec{Code: "x = 41"})
	run(&client.CodeSpec{Code: "import time; print(time.time()); x + 1"})
	run(&client.CodeSpec{Code: "x / 0"})
	run(&client.CodeSpec{Language: "bash", Code: "y=1; echo $y > note"})
	run(&client.CodeSpec{Code: "open('note').read()"})
	if _, err := s.Contexts.Restart(t.Context(), sb.GetId(), "python"); err != nil {
		t.Fatal(err)
	}
	run(&client.CodeSpec{Code: "'x' in globals()"})
	run(&client.CodeSpec{Code: "print(6*7)", Fresh: true})
	run(&client.CodeSpec{Id: "random", Code: "import random; random.random()"})
	out, _ := s.CLI("", "replay", sb.GetId(), "--json")
	var r report
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if want := (counts{Reproduced: 6, Normalised: 1, Unstable: 1}); r.counts != want {
		t.Errorf("%+v, want %+v: %s", r.counts, want, out)
	}
}

// TestSoakOrdinaryCommands runs all two hundred.
func TestSoakOrdinaryCommands(t *testing.T) {
	testenv.Root(t)
	if os.Getenv("CASEMATE_SOAK") == "" {
		return // the short test has a tenth of them
	}
	list := commands(t, true)
	r := ordinary(t, stage.Start(t), list)
	if good := r.Reproduced + r.Normalised; len(list) < 200 || 100*good < 95*len(list) || r.Diverged > 0 {
		t.Errorf("%d of %d are reproduced, %d diverged; want 95 %% of 200, and none", good, len(list), r.Diverged)
	}
}
