package network

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// casemate runs the command line against the server, and returns what it prints and how it ends.
func (p *place) casemate(args ...string) (stdout, stderr string, code int) {
	p.t.Helper()
	cmd := exec.CommandContext(p.t.Context(), "/proc/self/exe", append([]string{"casemate", "--url", "unix://" + p.srv.UnixSocket()}, args...)...)
	var out, said strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &said
	err := cmd.Run()
	if cmd.ProcessState == nil {
		p.t.Fatal(err)
	}
	return out.String(), said.String(), cmd.ProcessState.ExitCode()
}

// replayed is what replay says to programs, as far as it is looked at.
type replayed struct {
	Answered  int `json:"answered"`
	Processes []struct {
		Process    string   `json:"process"`
		Verdict    string   `json:"verdict"`
		Reason     string   `json:"reason"`
		Unanswered []string `json:"unanswered"`
		Difference *struct {
			Part string `json:"part"`
			Path string `json:"path"`
		} `json:"difference"`
	} `json:"processes"`
}

// replay runs a sandbox's processes again, and returns what came of each.
func (p *place) replay(args ...string) (replayed, map[string]string) {
	p.t.Helper()
	out, said, _ := p.casemate(append([]string{"replay", "--json"}, args...)...)
	var r replayed
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		p.t.Fatalf("%v: %s%s", err, out, said)
	}
	verdicts := map[string]string{}
	for _, one := range r.Processes {
		verdicts[one.Process] = one.Verdict
		if one.Reason != "" {
			verdicts[one.Process] += ": " + one.Reason
		}
		if one.Difference != nil && one.Difference.Path != "" {
			verdicts[one.Process] += ", " + one.Difference.Part + " " + one.Difference.Path
		}
	}
	return r, verdicts
}

// api is a server of HTTPS that counts its requests.
type api struct {
	atomic.Int64
	close func()
}

// counter serves HTTPS for a name: each answer says how many requests there were.
func (p *place) counter(name string) *api {
	p.t.Helper()
	n := &api{}
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, _ = fmt.Fprintf(w, `{"n": %d, "asked": "%s %s", "with": %q, "known": %t}`+"\n", n.Add(1), r.Method, r.URL.RequestURI(), body,
			r.Header.Get("Authorization") == "Bearer a-value-for-tests-0123456789")
	})
	mux.HandleFunc("/big", func(w http.ResponseWriter, _ *http.Request) {
		n.Add(1)
		_, _ = w.Write(make([]byte, 100<<10))
	})
	mux.HandleFunc("/cookie", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Set-Cookie", fmt.Sprint("visit=", n.Add(1)))
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute, TLSConfig: p.w.TLS(name), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	l := p.w.Listen(world.Web + ":443")
	go func() { _ = srv.ServeTLS(l, "", "") }()
	n.close = func() { _ = srv.Close() }
	p.t.Cleanup(n.close)
	p.w.Name(name, world.Web)
	return n
}

// runs runs a script as the process of an id.
func (p *place) runs(s *client.Sandbox, id, script string, env ...string) {
	p.t.Helper()
	spec := &client.ProcessSpec{Id: id, Argv: []string{"bash", "-c", script}, Env: map[string]string{}, Timeout: durationpb.New(testenv.Unhurried)}
	for _, one := range env {
		name, value, _ := strings.Cut(one, "=")
		spec.Env[name] = value
	}
	if _, err := p.Processes.Execute(p.t.Context(), s.GetId(), spec, nil); err != nil {
		p.t.Fatal(err)
	}
}

// TestReplayFromTheRecord: what processes fetched over HTTPS, with a secret that they never saw, is run again without the
// servers: each request gets the answer that it got, in the order of the record, and nothing leaves. What the record does not
// hold is said. The same verdicts come of the bundles alone, and none of a replay that was answered otherwise.
func TestReplayFromTheRecord(t *testing.T) {
	p := newPlace(t)
	requests := p.counter("api.test")
	var raw atomic.Int64
	p.w.Serve(world.Web+":7000", func(c net.Conn) {
		raw.Add(1)
		_, _ = io.Copy(c, c)
	})
	if _, err := p.Secrets.Set(t.Context(), &client.SetSecretRequest{Name: "api", Value: "a-value-for-tests-0123456789"}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Secrets.Bind(t.Context(), "api", &client.SecretBinding{
		For: &client.SandboxSelector{Labels: map[string]string{"team": "replay"}}, Hosts: []string{"api.test"}, Scheme: "bearer", Env: "API_TOKEN",
	}); err != nil {
		t.Fatal(err)
	}
	s, err := p.Sandboxes.Create(t.Context(), &client.CreateRequest{
		FileChanges: "full", Labels: map[string]string{"team": "replay"},
		Network: &client.NetworkRules{Rules: []string{"allow https://api.test", "allow " + world.Web + ":7000", "deny denied.test"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	const auth = `-H "Authorization: Bearer $API_TOKEN" `
	p.runs(s, "prc_thrice", `for i in 1 2 3; do curl -sS `+auth+`https://api.test/data; done`)
	p.runs(s, "prc_post", `curl -sS `+auth+`-d question 'https://api.test/ask?again=1' > answer; wc -c answer; echo ${API_TOKEN:+there}`)
	p.runs(s, "prc_python", `python3 -c "
import json, urllib.request
print(json.load(urllib.request.urlopen('https://api.test/py'))['n'])"`)
	p.runs(s, "prc_same", `curl -sS https://api.test/data`)
	p.runs(s, "prc_denied", `curl -sS https://denied.test/`)
	p.runs(s, "prc_nothing", `echo nothing`)
	p.runs(s, "prc_big", `curl -sS https://api.test/big | wc -c`)
	p.runs(s, "prc_raw", `exec 3<>/dev/tcp/`+world.Web+`/7000; echo hello >&3; head -n 1 <&3`)
	p.runs(s, "prc_cookie", `curl -sSi https://api.test/cookie | grep -i cookie`)
	p.runs(s, "prc_other", `curl -sS https://api.test/$WHAT; curl -sS https://$NAME/`, "WHAT=one", "NAME=denied.test")
	seen, named, connected := requests.Load(), len(p.w.Asked()), raw.Load()
	if seen != 9 || connected != 1 {
		t.Fatalf("%d requests and %d connections are recorded", seen, connected)
	}
	runs := filepath.Join(p.dir, "runs")
	r, got := p.replay(s.GetId(), "--network", "record", "--save", runs, "--env", "WHAT=one", "--env", "NAME=denied.test")
	for id, want := range map[string]string{
		"prc_thrice": "reproduced", "prc_post": "reproduced", "prc_python": "reproduced", "prc_same": "reproduced", "prc_denied": "reproduced",
		"prc_nothing": "reproduced", "prc_other": "reproduced",
		"prc_big":    "not attempted: the answer to GET https://api.test/big has 102400 bytes",
		"prc_raw":    "not attempted: what passed between it and " + world.Web + ":7000 was not looked into",
		"prc_cookie": "not attempted: what it was answered is not all in the record (Set-Cookie of GET https://api.test/cookie)",
	} {
		if !strings.HasPrefix(got[id], want) {
			t.Errorf("%s: %s, want %s", id, got[id], want)
		}
	}
	if r.Answered != 8 {
		t.Errorf("%d requests were answered from the record", r.Answered)
	}
	// ATTACK: nothing of it left. Twin: the same process in a sandbox with the same network, below.
	left := func() bool { return requests.Load() != seen || len(p.w.Asked()) != named || raw.Load() != connected }
	if left() {
		t.Errorf("%d requests, %d connections, names %v", requests.Load()-seen, raw.Load()-connected, p.w.Asked()[named:])
	}
	bundleOf := filepath.Join(p.dir, "web.bundle")
	if out, said, code := p.casemate("journal", "export", s.GetId(), "-o", bundleOf); code != 0 {
		t.Fatal(out, said)
	}
	out, said, code := p.casemate("verify", bundleOf, "--replay", runs)
	if !strings.Contains(out, "reproduced    7 of 10 processes, 0 after normalising; 0 unstable, 3 not attempted; 8 requests answered from the record") || code != 0 {
		t.Errorf("%d: %s%s", code, out, said)
	}

	// What it asks for that is not in the record is named, request and name.
	_, got = p.replay(s.GetId(), "prc_other", "--network", "record", "--env", "WHAT=two", "--env", "NAME=denied.test")
	if want := "diverged, network GET https://api.test/two"; got["prc_other"] != want {
		t.Errorf("%s, want %s", got["prc_other"], want)
	}
	out, _, code = p.casemate("replay", s.GetId(), "prc_other", "--network", "record", "--env", "WHAT=two", "--env", "NAME=denied.test")
	if want := "diverged at GET https://api.test/two, which it asked for and which is not in the record"; code != 1 || !strings.Contains(out, want) {
		t.Errorf("%d: %s", code, out)
	}
	if left() {
		t.Error("something left")
	}
	// Without --network record it is as before.
	if _, got = p.replay(s.GetId(), "prc_thrice"); !strings.HasPrefix(got["prc_thrice"], "not attempted: it used the network (api.test:443)") {
		t.Error(got["prc_thrice"])
	}
	p.twinAndForgery(s, bundleOf, left)
}

// TestReplayHasNoWayToModels: a process that asks a model where it can asks none in a replay, with answers of the record or without,
// though its sandbox would have a way to one by now. Twin: in a sandbox with the same network it asks.
func TestReplayHasNoWayToModels(t *testing.T) {
	p := newPlace(t)
	requests := p.counter("api.test")
	const asks = `[ -z "$OPENAI_API_KEY" ] || curl -sS -H "Authorization: Bearer $OPENAI_API_KEY" http://casemate.internal/models/openai/v1/models`
	create := func() *client.Sandbox {
		s, err := p.Sandboxes.Create(t.Context(), &client.CreateRequest{Network: &client.NetworkRules{Rules: []string{"allow https://other.test"}}})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := create()
	p.runs(s, "prc_asks", asks)
	if _, err := p.Secrets.Set(t.Context(), &client.SetSecretRequest{Name: "models", Class: "model", Value: "a-value-for-tests-0123456789"}); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Secrets.SetModelRoute(t.Context(), &client.ModelRoute{
		Provider: "openai", Family: "openai", BaseUrl: "https://api.test/v1", Secret: "models", For: &client.SandboxSelector{All: true},
	}); err != nil {
		t.Fatal(err)
	}
	for _, network := range []string{"off", "record"} {
		if _, got := p.replay(s.GetId(), "--network", network); !strings.HasPrefix(got["prc_asks"], "diverged") || requests.Load() != 0 {
			t.Errorf("--network %s: %s, and %d requests arrive", network, got["prc_asks"], requests.Load())
		}
	}
	p.runs(create(), "prc_asks", asks)
	if requests.Load() != 1 {
		t.Errorf("%d requests of the twin arrive", requests.Load())
	}
}

// twinAndForgery runs a process again in a sandbox with the recorded network that may leave: it reaches the servers, and no
// verdict comes of its record, nor of one whose answers are others than the record's.
func (p *place) twinAndForgery(s *client.Sandbox, bundleOf string, left func() bool) {
	p.t.Helper()
	for what, tt := range map[string]struct {
		recorded bool
		want     string
	}{
		"it may leave":  {false, "api.test:443 was reached from it"},
		"other answers": {true, "GET https://api.test/data was answered in it (event "},
	} {
		dir := filepath.Join(p.dir, strings.ReplaceAll(what, " ", "-"))
		if err := os.Mkdir(dir, 0o700); err != nil {
			p.t.Fatal(err)
		}
		for run := range 2 {
			env := map[string]string{}
			if tt.recorded {
				env["API_TOKEN"] = "x"
			}
			again, err := p.Sandboxes.Create(p.t.Context(), &client.CreateRequest{
				FileChanges: "full", Labels: map[string]string{"casemate.replay.of": s.GetId(), "casemate.replay.run": fmt.Sprint(run + 1)}, Env: env,
				Network: &client.NetworkRules{Rules: []string{"allow https://api.test", "allow " + world.Web + ":7000", "deny denied.test"}, Recorded: tt.recorded},
			})
			if err != nil {
				p.t.Fatal(err)
			}
			if tt.recorded {
				var list []*client.RecordedAnswer
				for range 3 {
					list = append(list, &client.RecordedAnswer{Method: "GET", Url: "https://api.test/data", Status: 200, Data: []byte("forged\n")})
				}
				if err := p.Replays.SetAnswers(p.t.Context(), again.GetId(), list); err != nil {
					p.t.Fatal(err)
				}
			}
			p.runs(again, "prc_thrice", `for i in 1 2 3; do curl -sS -H "Authorization: Bearer $API_TOKEN" https://api.test/data; done`)
			if out, said, code := p.casemate("journal", "export", again.GetId(), "-o", filepath.Join(dir, fmt.Sprint(run, ".bundle"))); code != 0 {
				p.t.Fatal(out, said)
			}
		}
		if out, said, code := p.casemate("verify", bundleOf, "--replay", dir); code != 125 || !strings.Contains(said, tt.want) {
			p.t.Errorf("%s: %d %s%s", what, code, out, said)
		}
	}
	if !left() {
		p.t.Error("the twin may leave, and did not")
	}
}
