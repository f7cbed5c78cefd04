package keys

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
)

// TestKeys is one server for all attacks: starting it costs more than they do.
func TestKeys(t *testing.T) {
	t.Setenv(variable, "external-variable")
	s := start(t)
	s.Secret("tool", canary(1), &client.SecretBinding{Hosts: []string{api}, Scheme: "bearer", Env: "TOOL_KEY"})
	box := s.Box("allow "+api, "allow "+api+":80", "allow "+other)
	if out := s.Sh(box, `curl -sS -m 60 -H "Authorization: Bearer $TOOL_KEY" https://`+api+`/first`); out != "ok" {
		t.Fatalf("the bound host answers %q", out)
	}
	if got := s.api.Last(t).Header.Get("Authorization"); got != "Bearer "+canary(1) {
		t.Fatalf("the bound host got %q: the rest proves nothing", got)
	}
	for _, c := range []struct {
		name string
		test func(t *testing.T, s *play, box string)
	}{
		{"nothing inside", nothingInside},
		{"echoes", echoes},
		{"redirect", redirect},
		{"another name in the request", anotherName},
		{"another address for the name", anotherAddress},
		{"userinfo", userinfo},
		{"other places", otherPlaces},
		{"clients", clients},
		{"other sandboxes", otherSandboxes},
		{"rules about requests", requestRules},
		{"rotation", rotation},
		{"sources", sources},
		{"model route", modelRoute},
		{"only what is bound", onlyBound},
		{"a killed gateway", killedGateway},
		{"a killed server", killedServer},
		{"a removed route", removedRoute},
		{"nothing outside", nothingOutside},
	} {
		t.Run(c.name, func(t *testing.T) {
			s.T = t
			c.test(t, s, box)
		})
	}
}

// leaks reports whether a text holds a good part of a value, as it is or as its Base64 or hexadecimal digits.
func leaks(text string) bool {
	for n := 1; n <= 3; n++ {
		part := []byte(canary(n)[:20])
		forms := []string{string(part), hex.EncodeToString(part)}
		for off := range 3 { // wherever it stands in what was encoded
			forms = append(forms, base64.StdEncoding.EncodeToString(part[off:off+18]))
		}
		if slices.ContainsFunc(forms, func(form string) bool { return strings.Contains(text, form) }) {
			return true
		}
	}
	return false
}

func nothingInside(t *testing.T, s *play, box string) {
	out := s.Sh(box, `env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\0' '\n'; cat /proc/self/mountinfo; set;
		grep -rIl canary / --exclude-dir=proc --exclude-dir=sys --exclude-dir=usr 2>/dev/null | head`)
	if leaks(out) || !strings.Contains(out, "TOOL_KEY=csm-placeholder-") {
		t.Errorf("inside one sees %s", out)
	}
	// The twin: the same search finds what is there.
	if out := s.Sh(box, `export HERE=`+canary(9)+`; sh -c 'cat /proc/$$/environ' | tr '\0' '\n'`); !strings.Contains(out, canary(9)) {
		t.Errorf("the search sees nothing in %s", out)
	}
}

func echoes(t *testing.T, s *play, box string) {
	for _, path := range []string{"/echo", "/error"} {
		for _, version := range []string{"--http1.1", "--http2"} {
			out := s.Sh(box, `curl -sS -m 60 -i `+version+` -H "Authorization: Bearer $TOOL_KEY" https://`+api+path)
			if leaks(out) || !strings.Contains(out, "***") || s.api.Last(t).Header.Get("Authorization") != "Bearer "+canary(1) {
				t.Errorf("%s %s tells %s", path, version, out)
			}
		}
	}
	// The twin: a host that no secret is bound to may echo what it likes.
	if out := s.Sh(box, `curl -sS -m 60 -H "Authorization: Bearer `+canary(9)+`" https://`+other+`/echo`); !strings.Contains(out, canary(9)) {
		t.Errorf("the other host's echo is %s", out)
	}
}

func redirect(t *testing.T, s *play, box string) {
	out := s.Sh(box, `curl -sS -m 60 -L --location-trusted -H "Authorization: Bearer $TOOL_KEY" https://`+api+`/away`)
	if r := s.other.Last(t); out != "ok" || r.Path != "/landed" || !strings.HasPrefix(r.Header.Get("Authorization"), "Bearer csm-placeholder-") || leaks(r.Text()) {
		t.Errorf("%s; the other host got %s", out, r.Text())
	}
}

// anotherName: the Host header, :authority, SNI and a proxy's request line name another host than the one
// that was connected to.
func anotherName(t *testing.T, s *play, box string) {
	before := len(s.other.All()) + len(s.api.All())
	for _, attack := range []string{
		`-H "Host: ` + other + `" https://` + api + `/`,
		`--http2 -H "Host: ` + other + `" https://` + api + `/`,
		`-H "Host: ` + api + `" https://` + other + `:443/ --connect-to ` + other + `:443:` + api + `:443 -k`,
		`--request-target https://` + other + `/ https://` + api + `/`,
		`--connect-to ` + api + `:443:` + other + `:443 -k https://` + api + `/`,
	} {
		out := s.Sh(box, `curl -sS -m 60 -o /dev/null -w '%{http_code}' -H "Authorization: Bearer $TOOL_KEY" `+attack)
		if strings.HasPrefix(out, "200") {
			t.Errorf("%s: %s", attack, out)
		}
	}
	if after := len(s.other.All()) + len(s.api.All()); after != before {
		t.Errorf("%d of the requests went out", after-before)
	}
	if out := s.Sh(box, `curl -sS -m 60 -H "Host: `+api+`:443" https://`+api+`/`); out != "ok" { // the twin
		t.Errorf("the right name: %s", out)
	}
}

// anotherAddress: the sandbox says itself where the name leads.
func anotherAddress(t *testing.T, s *play, box string) {
	before := len(s.other.All())
	out := s.Sh(box, `curl -sS -m 60 -k --resolve `+api+`:443:93.184.215.99 -H "Authorization: Bearer $TOOL_KEY" https://`+api+`/`)
	if out == "ok" || len(s.other.All()) != before {
		t.Errorf("%s; the other host got %v", out, s.other.All()[before:])
	}
}

func userinfo(t *testing.T, s *play, box string) {
	out := s.Sh(box, `curl -sS -m 60 https://$TOOL_KEY:x@`+api+`/user; curl -sS -m 60 https://`+api+`@`+other+`/elsewhere`)
	for _, r := range append(s.api.All(), s.other.All()...) {
		if strings.HasPrefix(r.Path, "/user") && leaks(r.Text()) || r.Path == "/elsewhere" && r.Host != other {
			t.Errorf("%s; a host got %s", out, r.Text())
		}
	}
}

// otherPlaces: the placeholder where its secret is not bound goes out as it is, and is recorded.
func otherPlaces(t *testing.T, s *play, box string) {
	out := s.Sh(box, `curl -sS -m 60 -H "X-Key: $TOOL_KEY" -H "Cookie: a=$TOOL_KEY" --data "$TOOL_KEY" "https://`+api+`/places?k=$TOOL_KEY"
		curl -sS -m 60 -H "Authorization: Bearer $TOOL_KEY" http://`+api+`/plain; curl -sS -m 60 -H "Authorization: Bearer $TOOL_KEY" https://`+other+`/there`)
	if out != "okokok" {
		t.Errorf("answers: %s", out)
	}
	seen := 0
	for _, r := range append(s.api.All(), s.other.All()...) {
		if strings.HasPrefix(r.Path, "/places") || r.Path == "/plain" || r.Path == "/there" {
			seen++
			if leaks(r.Text()) || !strings.Contains(r.Text(), "csm-placeholder-") {
				t.Errorf("a host got %s", r.Text())
			}
		}
	}
	if seen != 3 || !s.recorded(box, "secret.misplaced", "the body") || !s.recorded(box, "secret.misplaced", "the header X-Key") || !s.recorded(box, "secret.used", "tool") {
		t.Errorf("%d requests; the journal lacks one of the events", seen)
	}
}

// recorded reports whether the journal has an event with a text.
func (s *play) recorded(box, kind, text string) bool {
	found := false
	testenv.Eventually(s.T, patience, kind+" "+text, func() bool {
		events, err := s.Journal.Events(context.Background(), box, 0, 1000)
		if err != nil {
			return false
		}
		for _, e := range events {
			found = found || e.GetType() == kind && strings.Contains(e.String(), text)
		}
		return found
	})
	return found
}

// clients: programs with trust stores of their own trust what they are shown, without being told.
func clients(t *testing.T, s *play, box string) {
	for name, script := range map[string]string{
		"curl":   `curl -sS -m 60 -H "Authorization: Bearer $TOOL_KEY" https://` + api + `/`,
		"python": `python3 -c 'import urllib.request, os; print(urllib.request.urlopen(urllib.request.Request("https://` + api + `/", headers={"Authorization": "Bearer " + os.environ["TOOL_KEY"]})).read().decode(), end="")'`,
		"node":   `node -e 'fetch("https://` + api + `/", {headers: {Authorization: "Bearer " + process.env.TOOL_KEY}}).then(r => r.text()).then(t => process.stdout.write(t))'`,
		"no variables": `env -i PATH=$PATH KEY=$TOOL_KEY python3 -c 'import urllib.request, os; print(urllib.request.urlopen(urllib.request.Request("https://` + api +
			`/", headers={"Authorization": "Bearer " + os.environ["KEY"]})).read().decode(), end="")'`,
	} {
		out := s.Sh(box, script)
		if out != "ok" || s.api.Last(t).Header.Get("Authorization") != "Bearer "+canary(1) {
			t.Errorf("%s: %s; the host got %s", name, out, s.api.Last(t).Text())
		}
	}
}

// otherSandboxes: one's placeholder means nothing in another, and a secret that is bound to one is not there.
func otherSandboxes(t *testing.T, s *play, box string) {
	own := strings.TrimSpace(s.Sh(box, `echo $TOOL_KEY`))
	second := s.Box("allow " + api)
	if theirs := strings.TrimSpace(s.Sh(second, `echo $TOOL_KEY`)); theirs == own || !strings.HasPrefix(theirs, "csm-placeholder-") {
		t.Errorf("placeholders %s and %s", own, theirs)
	}
	s.Sh(second, `curl -sS -m 60 -H "Authorization: Bearer `+own+`" https://`+api+`/stolen`)
	if r := s.api.Last(t); r.Path != "/stolen" || leaks(r.Text()) {
		t.Errorf("with another's placeholder the host got %s", r.Text())
	}
	s.Sh(second, `curl -sS -m 60 -H "Authorization: Bearer $TOOL_KEY" https://`+api+`/own`)
	if r := s.api.Last(t); r.Path != "/own" || !leaks(r.Text()) { // the twin
		t.Errorf("with its own the host got %s", r.Text())
	}
	s.Secret("private", canary(2), &client.SecretBinding{
		Hosts: []string{api}, Scheme: "header", Header: "X-Private", Env: "PRIVATE", Always: true,
		For: &client.SandboxSelector{Sandboxes: []string{box}},
	})
	s.Sh(second, `curl -sS -m 60 https://`+api+`/second`)
	if r := s.api.Last(t); r.Path != "/second" || leaks(r.Text()) {
		t.Errorf("another sandbox's secret: %s", r.Text())
	}
	testenv.Eventually(t, patience, "its own is put on", func() bool {
		s.Sh(box, `curl -sS -m 60 https://`+api+`/first-again`)
		return s.api.Last(t).Header.Get("X-Private") == canary(2)
	})
}

// requestRules: a rule about methods and paths holds for each request on a connection, also where no secret is.
func requestRules(t *testing.T, s *play, _ string) {
	box := s.Box("allow GET https://" + other + "/open/*")
	for attack, want := range map[string]string{
		`https://` + other + `/open/a`:                                         "200",
		`-X POST https://` + other + `/open/a`:                                 "403",
		`https://` + other + `/shut`:                                           "403",
		`--path-as-is https://` + other + `/open/../shut`:                      "403",
		`https://` + other + `/open/a -o /dev/null https://` + other + `/shut`: "200403",
	} {
		if out := s.Sh(box, `curl -sS -m 60 -o /dev/null -w '%{http_code}' `+attack); out != want {
			t.Errorf("%s: %s, want %s", attack, out, want)
		}
	}
	for _, r := range s.other.All() {
		if strings.Contains(r.Path, "shut") {
			t.Errorf("the host got %s", r.Path)
		}
	}
	// The twin: under a rule that does not look into requests each of them arrives.
	if _, err := s.Network.Set(t.Context(), box, &client.NetworkRules{Rules: []string{"allow " + other}}); err != nil {
		t.Fatal(err)
	}
	for _, attack := range []string{`-X POST https://` + other + `/open/a`, `https://` + other + `/shut`, `--path-as-is https://` + other + `/open/../shut`} {
		if out := s.Sh(box, `curl -sS -m 60 -o /dev/null -w '%{http_code}' `+attack); out != "200" && out != "301" && out != "307" {
			t.Errorf("without the rule %s: %s", attack, out)
		}
	}
	if r := s.other.Last(t); !strings.Contains(r.Path, "shut") {
		t.Errorf("without the rule the host got %s last", r.Path)
	}
}

func rotation(t *testing.T, s *play, box string) {
	// The twins: before it is rotated the old value is put on, and before it is removed the other one is.
	s.Sh(box, `curl -sS -m 60 -H "Authorization: Bearer $TOOL_KEY" https://`+api+`/echo`)
	if r := s.api.Last(t); r.Header.Get("Authorization") != "Bearer "+canary(1) || r.Header.Get("X-Private") != canary(2) {
		t.Errorf("before the rotation: %s", r.Text())
	}
	// In a row, so that each comes while the gateway is told of another.
	for i := range 10 {
		if _, err := s.Secrets.Rotate(t.Context(), "tool", canary(2+i%2)); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, patience, "the new value is used", func() bool {
		s.Sh(box, `curl -sS -m 60 -H "Authorization: Bearer $TOOL_KEY" https://`+api+`/echo`)
		return s.api.Last(t).Header.Get("Authorization") == "Bearer "+canary(3)
	})
	if _, err := s.Secrets.Delete(t.Context(), "private"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, "the removed one is not", func() bool {
		s.Sh(box, `curl -sS -m 60 https://`+api+`/removed`)
		return s.api.Last(t).Header.Get("X-Private") == ""
	})
}

func modelRoute(t *testing.T, s *play, first string) {
	ctx := t.Context()
	if _, err := s.Secrets.Set(ctx, &client.SetSecretRequest{Name: "model", Class: "model", Value: canary(2)}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Secrets.SetModelRoute(ctx, &client.ModelRoute{
		Provider: "anthropic", Family: "anthropic", BaseUrl: "https://" + model, Secret: "model", For: &client.SandboxSelector{All: true}, MaxRequests: 2,
	}); err != nil {
		t.Fatal(err)
	}
	box, second := s.Box(), s.Box()
	const ask = `curl -sS -m 60 -H "x-api-key: $ANTHROPIC_API_KEY" -H 'anthropic-version: 2023-06-01' $ANTHROPIC_BASE_URL/v1/messages -d '{"model":"m","max_tokens":5}'`
	if out := s.Sh(box, ask); !strings.Contains(out, `"text":"hi"`) || s.api.Last(t).Header.Get("X-Api-Key") != canary(2) || s.api.Last(t).Host != model {
		t.Fatalf("%s; the provider got %s", out, s.api.Last(t).Text())
	}
	if out := s.Sh(box, `env; curl -sS -m 5 https://`+model+`/v1/messages`); leaks(out) || strings.Contains(out, `"hi"`) {
		t.Errorf("the key or the host is there: %s", out)
	}
	token := strings.TrimSpace(s.Sh(box, `echo $ANTHROPIC_API_KEY`))
	before := len(s.api.All())
	if out := s.Sh(second, `ANTHROPIC_API_KEY=`+token+`; `+ask); !strings.Contains(out, "permission_error") || len(s.api.All()) != before {
		t.Errorf("another sandbox's token: %s", out)
	}
	if out := s.Sh(second, ask); !strings.Contains(out, `"text":"hi"`) { // the twin
		t.Errorf("its own token: %s", out)
	}
	s.Sh(box, ask)
	if out := s.Sh(box, ask); !strings.Contains(out, "permission_error") {
		t.Errorf("beyond its budget: %s", out)
	}
	s.spent = box
	// Whoever looks is told what was used, what a key is put on, and that the gateway itself answers.
	testenv.Eventually(t, patience, "what was used is told", func() bool {
		out, err := s.CLI("", "secrets", "ls", "--sandbox", box)
		return err == nil && strings.Contains(out, "2 requests, 20 tokens")
	})
	for url, want := range map[string]string{"http://casemate.internal/models/": "way to models of anthropic", "https://" + api + "/": "the secret tool is put on"} {
		if out, err := s.CLI("", "net", "explain", first, url); err != nil || !strings.Contains(out, want) {
			t.Errorf("explain %s: %v %s", url, err, out)
		}
	}
	if out, err := s.CLI("", "net", "explain", first, "https://"+other+"/"); err != nil || strings.Contains(out, "secret") { // the twin
		t.Errorf("explain a host without a key: %v %s", err, out)
	}
	if !s.recorded(box, "model.used", "tokens_in") {
		t.Error("the use is not recorded")
	}
}

// onlyBound: the gateway's process holds the values that sandboxes of its own may use, and no others.
func onlyBound(t *testing.T, s *play, box string) {
	const spare = "spare-memory-canary-"
	bound, unbound, nobodys := spare+"bound-"+once(), spare+"unbound-"+once(), spare+"nobodys-"+once()
	if _, err := s.Secrets.Set(t.Context(), &client.SetSecretRequest{Name: "unbound", Value: unbound}); err != nil {
		t.Fatal(err)
	}
	of := func(id string) *client.SecretBinding {
		return &client.SecretBinding{Hosts: []string{api}, Scheme: "header", Header: "X-Spare", Always: true, For: &client.SandboxSelector{Sandboxes: []string{id}}}
	}
	elsewhere, err := s.Sandboxes.Create(t.Context(), &client.CreateRequest{}) // one without a network
	if err != nil {
		t.Fatal(err)
	}
	s.Secret("nobodys", nobodys, of(elsewhere.GetId()))
	s.Secret("spare", bound, of(box))
	testenv.Eventually(t, patience, "the bound one is put on", func() bool {
		s.Sh(box, `curl -sS -m 60 https://`+api+`/spare`)
		return s.api.Last(t).Header.Get("X-Spare") == bound
	})
	memory := memoryOf(t, s.Gateway())
	if !strings.Contains(memory, bound) { // the twin: the search sees what is there
		t.Error("the search does not find the value that the gateway puts on")
	}
	for _, value := range []string{unbound, nobodys} {
		for off := range 3 {
			if form := base64.StdEncoding.EncodeToString([]byte(value)[off : off+36]); strings.Contains(memory, value) || strings.Contains(memory, form) {
				t.Errorf("the gateway holds %s, which none of its sandboxes may use", value)
			}
		}
	}
	for _, name := range []string{"unbound", "nobodys", "spare"} {
		if _, err := s.Secrets.Delete(t.Context(), name); err != nil {
			t.Error(err)
		}
	}
}

// memoryOf returns what a process could write to in its memory.
func memoryOf(t *testing.T, pid int) string {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = mem.Close() }()
	var all strings.Builder
	buf := make([]byte, 1<<20)
	for line := range strings.Lines(string(maps)) {
		var from, to int64
		var mode string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &mode); err != nil || !strings.HasPrefix(mode, "rw") {
			continue
		}
		for at := from; at < to; at += int64(len(buf)) {
			n, _ := mem.ReadAt(buf[:min(int64(len(buf)), to-at)], at) // what was given back to the kernel can't be read
			if strings.Trim(string(buf[:n]), "\x00") != "" {
				all.Write(buf[:n])
			}
		}
	}
	return all.String()
}

// removedRoute: a token opens nothing once its route is gone, and the host of the provider was never open.
func removedRoute(t *testing.T, s *play, _ string) {
	box := s.Box()
	const ask = `curl -sS -m 60 -H "x-api-key: $ANTHROPIC_API_KEY" $ANTHROPIC_BASE_URL/v1/messages -d '{"model":"m","max_tokens":5}'`
	if out := s.Sh(box, ask); !strings.Contains(out, `"text":"hi"`) { // the twin
		t.Errorf("before it is removed: %s", out)
	}
	if _, err := s.Secrets.DeleteModelRoute(t.Context(), "anthropic"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, "the token opens nothing", func() bool { return !strings.Contains(s.Sh(box, ask+" 2>&1"), `"text":"hi"`) })
	before := len(s.api.All())
	if out := s.Sh(box, ask+" 2>&1"); strings.Contains(out, `"hi"`) || len(s.api.All()) != before {
		t.Errorf("afterwards: %s", out)
	}
}

// killedGateway: the next one knows what the one before knew, and budgets stay used.
func killedGateway(t *testing.T, s *play, box string) {
	pid := s.Gateway()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, patience, "another gateway works", func() bool {
		return s.Sh(box, `curl -sS -m 5 -H "Authorization: Bearer $TOOL_KEY" https://`+api+`/killed`) == "ok"
	})
	if r := s.api.Last(t); r.Header.Get("Authorization") != "Bearer "+canary(3) || s.Gateway() == pid {
		t.Errorf("the host got %s", r.Text())
	}
	out := s.Sh(s.spent, `curl -sS -m 60 -H "x-api-key: $ANTHROPIC_API_KEY" $ANTHROPIC_BASE_URL/v1/messages -d '{"model":"m","max_tokens":5}'`)
	if !strings.Contains(out, "permission_error") {
		t.Errorf("a new gateway has a new budget: %s", out)
	}
}

// killedServer: keys are put on while there is no server, and the next one goes on with the same.
func killedServer(t *testing.T, s *play, box string) {
	_, err := s.Processes.Start(t.Context(), box, &client.ProcessSpec{Argv: []string{
		"/bin/bash", "-c",
		`while sleep 0.2; do curl -sS -m 5 -H "Authorization: Bearer $TOOL_KEY" https://` + api + `/loop; done`,
	}})
	if err != nil {
		t.Fatal(err)
	}
	loops := func(value string) (n int) {
		for _, r := range s.api.All() {
			if r.Path == "/loop" && r.Header.Get("Authorization") == "Bearer "+value {
				n++
			}
		}
		return n
	}
	testenv.Eventually(t, patience, "the loop runs", func() bool { return loops(canary(3)) > 0 })
	s.Kill()
	before := loops(canary(3))
	testenv.Eventually(t, patience, "the gateway goes on", func() bool { return loops(canary(3)) > before+2 })
	s.Launch()
	testenv.Eventually(t, patience, "the server answers", func() bool {
		_, err := s.Secrets.Rotate(t.Context(), "tool", canary(1))
		return err == nil
	})
	old := loops(canary(1))
	testenv.Eventually(t, patience, "the new value is used", func() bool { return loops(canary(1)) > old })
}

// nothingOutside looks for values in what the server and the gateway leave on the host.
func nothingOutside(t *testing.T, s *play, box string) {
	// The twins: the search sees a value that lies in the server's directories, and one that a process holds.
	planted := filepath.Join(s.Dir, "d", "planted")
	if err := os.WriteFile(planted, []byte(`{"value":"`+canary(1)+`"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	careless := exec.Command("sleep", "600")
	careless.Env = append(os.Environ(), "KEY="+canary(2))
	if err := careless.Start(); err != nil {
		t.Fatal(err)
	}
	seen := strings.Join(append(filesThatTell(t, s), processesThatTell()...), "\n")
	_, _ = careless.Process.Kill(), careless.Wait()
	if err := os.Remove(planted); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{planted, fmt.Sprintf("/proc/%d/environ", careless.Process.Pid)} {
		if !strings.Contains(seen, want) {
			t.Errorf("the search does not see %s, only %s", want, seen)
		}
	}
	events, err := s.Journal.Events(t.Context(), box, 0, 1000)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		if leaks(e.String()) {
			t.Errorf("the journal tells %s", e)
		}
	}
	for _, path := range append(filesThatTell(t, s), processesThatTell()...) {
		t.Errorf("%s holds a value", path)
	}
}

// filesThatTell returns the files of the server, its log among them, that hold a value.
func filesThatTell(t *testing.T, s *play) (found []string) {
	t.Helper()
	looked := 0
	_ = filepath.WalkDir(s.Dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil //nolint:nilerr // sockets, and what goes meanwhile
		}
		if info, err := d.Info(); err != nil || info.Size() > 64<<20 {
			return nil //nolint:nilerr // the image of layers: nothing inside has the values
		}
		if raw, err := os.ReadFile(path); err == nil {
			looked++
			if leaks(string(raw)) {
				found = append(found, path)
			}
		}
		return nil
	})
	if looked < 8 {
		t.Errorf("looked at %d files only", looked)
	}
	return found
}

// processesThatTell returns what of the machine's processes holds a value for others to see.
func processesThatTell() (found []string) {
	for _, file := range []string{"cmdline", "environ"} {
		all, _ := filepath.Glob("/proc/[0-9]*/" + file)
		for _, path := range all {
			if raw, err := os.ReadFile(path); err == nil && leaks(string(raw)) {
				found = append(found, path)
			}
		}
	}
	return found
}

// patience is how long what happens by itself may take.
const patience = 2 * time.Minute
