package envd_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"casemate.dev/internal/sandbox"
)

func testRun(t *testing.T, h *harness) {
	for _, c := range []struct {
		script string
		want   outcome
		end    object
	}{
		{"echo out", outcome{out: "out\n"}, object{"exited": true, "status": "exit status 0"}},
		{"echo err >&2", outcome{errs: "err\n"}, object{"exited": true, "status": "exit status 0"}},
		{"exit 3", outcome{}, object{"exitCode": 3.0, "exited": true, "status": "exit status 3", "error": "exit status 3"}},
	} {
		o := h.run(c.script)
		if o.out != c.want.out || o.errs != c.want.errs || fmt.Sprint(o.end) != fmt.Sprint(c.end) || !o.startedFirst || o.afterEnd > 0 || o.code != "" || o.cut {
			t.Errorf("%s: %+v, want %v", c.script, o, c.end)
		}
	}
}

func testEnvironmentUserAndDirectory(t *testing.T, h *harness) {
	msg := object{"process": object{
		"cmd": "/bin/bash", "args": []string{"-l", "-c", "echo $A $FROM_CREATE $USER; pwd"}, "envs": object{"A": "b"}, "cwd": "/tmp",
	}}
	o := h.open(processStart, msg, "Authorization", basic("root")).rest(&outcome{})
	if o.out != "b 1 root\n/tmp\n" {
		t.Errorf("got %q", o.out)
	}
	if o := h.run("pwd"); o.out != "/home/user\n" {
		t.Errorf("without a directory: %q", o.out)
	}
	o = h.run("true", "Authorization", basic("nobody-here"))
	if o.code != "unauthenticated" || o.message != "invalid username: 'nobody-here'" {
		t.Errorf("a user that is not there: %+v", o)
	}
	if o = h.open(processStart, object{"process": object{"cmd": "/nope"}}).rest(&outcome{}); o.code == "" || o.pid != 0 {
		t.Errorf("a program that is not there: %+v", o)
	}
	if o = h.open(processStart, object{}).rest(&outcome{}); o.code != "invalid_argument" {
		t.Errorf("nothing to start: %+v", o)
	}
}

func testTimeoutEndsTheProcess(t *testing.T, h *harness) {
	o := h.run("sleep 300 & sleep 300", "Connect-Timeout-Ms", "2000") // time enough to hear of its start
	if o.code != "deadline_exceeded" || o.end != nil || o.pid == 0 {
		t.Errorf("got %+v", o)
	}
	if left := h.must(processList, object{}); left["processes"] != nil {
		t.Errorf("still there: %v", left)
	}
	if o := h.run("sleep 0.1", "Connect-Timeout-Ms", "0"); o.end == nil {
		t.Errorf("0 is no limit: %+v", o)
	}
	if o := h.open(processStart, command("true"), "Connect-Timeout-Ms", "soon").rest(&outcome{}); o.code != "invalid_argument" {
		t.Errorf("a malformed limit: %+v", o)
	}
}

func testKill(t *testing.T, h *harness) {
	s, o := h.begin(command("sleep 1001 & sleep 1002 & wait"))
	h.must(processSignal, object{"process": selector(o.pid), "signal": "SIGNAL_SIGKILL"})
	if left := h.must(processList, object{}); left["processes"] != nil {
		t.Errorf("listed after it was killed: %v", left)
	}
	s.rest(o)
	want := object{"exitCode": -1.0, "status": "signal: killed", "error": "signal: killed"}
	if fmt.Sprint(o.end) != fmt.Sprint(want) {
		t.Errorf("end: %v", o.end)
	}
	for _, pid := range []uint32{o.pid, 999999} {
		h.refused(processSignal, object{"process": selector(pid), "signal": "SIGNAL_SIGKILL"}, http.StatusNotFound,
			"not_found", fmt.Sprintf("process with pid %d not found", pid))
	}
	s, o = h.begin(command("sleep 60"))
	h.must(processSignal, object{"process": selector(o.pid), "signal": "SIGNAL_SIGTERM"})
	if s.rest(o); o.end["status"] != "signal: terminated" {
		t.Errorf("SIGTERM: %v", o.end)
	}
	s, o = h.begin(command("sleep 60"))
	h.refused(processSignal, object{"process": selector(o.pid)}, http.StatusNotImplemented, "unimplemented", "invalid signal")
	h.must(processSignal, object{"process": selector(o.pid), "signal": "SIGNAL_SIGKILL"})
	s.rest(o)
}

func testList(t *testing.T, h *harness) {
	msg := command("sleep 60")
	msg["tag"] = "mine"
	_, o := h.begin(msg)
	all := h.must(processList, object{})["processes"].([]any)
	if len(all) != 1 {
		t.Fatalf("listed: %v", all)
	}
	p := all[0].(object)
	conf := p["config"].(object)
	if p["pid"] != float64(o.pid) || p["tag"] != "mine" || conf["cmd"] != "/bin/bash" || len(conf["args"].([]any)) != 3 || conf["cwd"] != "/home/user" {
		t.Errorf("listed: %v", p)
	}
	again := &outcome{}
	s := h.open(processConnect, object{"process": object{"tag": "mine"}})
	if !s.event(again) || again.pid != o.pid {
		t.Errorf("connected by tag: %+v", again)
	}
	h.must(processSignal, object{"process": object{"tag": "mine"}, "signal": "SIGNAL_SIGKILL"})
	if s.rest(again); again.end == nil {
		t.Errorf("its end: %+v", again)
	}
}

func input(pid uint32, kind, text string) object {
	return object{"process": selector(pid), "input": object{kind: []byte(text)}}
}

func testInput(t *testing.T, h *harness) {
	msg := command("cat")
	msg["stdin"] = true
	s, o := h.begin(msg)
	h.must(processInput, input(o.pid, "stdin", ""))
	h.must(processInput, input(o.pid, "stdin", "Hello,\nWorld!"))
	for o.out != "Hello,\nWorld!" && s.event(o) {
	}
	h.refused(processInput, input(o.pid, "pty", "x"), http.StatusInternalServerError, "internal", "tty not assigned")
	h.refused(processInput, object{"process": selector(o.pid)}, http.StatusNotImplemented, "unimplemented", "no input")
	h.must("/process.Process/CloseStdin", object{"process": selector(o.pid)})
	if s.rest(o); o.end["status"] != "exit status 0" || o.out != "Hello,\nWorld!" {
		t.Errorf("after its input: %+v", o)
	}
	h.refused(processInput, input(o.pid, "stdin", "x"), http.StatusNotFound, "not_found", "not found")
	_, o = h.begin(command("sleep 60"))
	h.refused(processInput, input(o.pid, "stdin", "x"), http.StatusInternalServerError, "internal", "stdin not enabled or closed")
	h.must(processSignal, object{"process": selector(o.pid), "signal": "SIGNAL_SIGKILL"})
}

func testTerminal(t *testing.T, h *harness) {
	msg := object{
		"process": object{"cmd": "/bin/bash", "args": []string{"-i", "-l"}, "envs": object{"TERM": "xterm-256color"}},
		"pty":     object{"size": object{"cols": 80, "rows": 24}},
	}
	s, o := h.begin(msg)
	until := func(s *stream, o *outcome, text string) {
		t.Helper()
		for !strings.Contains(o.pty, text) {
			if !s.event(o) {
				t.Fatalf("no %q: %+v", text, o)
			}
		}
	}
	h.must(processInput, input(o.pid, "pty", "stty size\n"))
	until(s, o, "24 80")
	h.must("/process.Process/Update", object{"process": selector(o.pid), "pty": object{"size": object{"cols": 100, "rows": 30}}})
	h.must(processInput, input(o.pid, "pty", "stty size\n"))
	until(s, o, "30 100")
	h.refused(processInput, input(o.pid, "stdin", "x"), http.StatusInternalServerError, "internal", "written to the pty")
	h.refused("/process.Process/CloseStdin", object{"process": selector(o.pid)}, http.StatusInternalServerError, "internal", "Ctrl+D")

	// Whoever connects again gets what nobody has seen yet, and nothing twice.
	h.disconnect(s)
	again := &outcome{}
	s = h.open(processConnect, object{"process": selector(o.pid)})
	h.must(processInput, input(o.pid, "pty", "echo back\n"))
	until(s, again, "back")
	if strings.Contains(again.pty, "24 80") {
		t.Errorf("played twice: %q", again.pty)
	}
	whole := &outcome{}
	until(h.open(processConnect, object{"process": selector(o.pid)}, "Casemate-Output-Offset", "0"), whole, "24 80")
	h.must(processInput, input(o.pid, "pty", "exit 4\n"))
	if s.rest(again); again.end["exitCode"] != 4.0 {
		t.Errorf("end: %+v", again)
	}
	msg["pty"] = object{"size": object{}}
	if o := h.open(processStart, msg).rest(&outcome{}); o.code != "invalid_argument" {
		t.Errorf("a terminal without a size: %+v", o)
	}
}

// testLateConnections: what a process printed while nobody was connected is not lost.
func testLateConnections(t *testing.T, h *harness) {
	s, o := h.begin(command("echo 1; sleep 0.2; echo 2; echo 3 >&2"))
	s.close()
	late := h.open(processConnect, object{"process": selector(o.pid)}).rest(&outcome{})
	if late.pid != o.pid || late.out != "1\n2\n" || late.errs != "3\n" || late.end["status"] != "exit status 0" || !late.startedFirst {
		t.Errorf("while it ran: %+v", late)
	}
	late = h.open(processConnect, object{"process": selector(o.pid)}).rest(&outcome{})
	if late.out != "1\n2\n" || late.errs != "3\n" || late.end["status"] != "exit status 0" {
		t.Errorf("after its end: %+v", late)
	}
	late = h.open(processConnect, object{"process": selector(o.pid)}, "Casemate-Output-Offset", "2").rest(&outcome{})
	if late.out != "2\n" {
		t.Errorf("from an offset: %+v", late)
	}
	if late = h.open(processConnect, object{"process": selector(777)}).rest(&outcome{}); late.code != "not_found" || late.message != "process with pid 777 not found" {
		t.Errorf("one that never was: %+v", late)
	}
}

func testSignsOfLife(t *testing.T, h *harness) {
	msg := command("cat")
	msg["stdin"] = true
	s, o := h.begin(msg)
	for o.alive < 2 && s.event(o) {
	}
	h.must(processInput, input(o.pid, "stdin", "done"))
	h.must("/process.Process/CloseStdin", object{"process": selector(o.pid)})
	if s.rest(o); o.alive < 2 || !o.startedFirst || o.out != "done" || o.end == nil {
		t.Errorf("got %+v", o)
	}
}

// testStoppedSandbox: a stream into a sandbox that ends is cut, so that SDKs look for the sandbox.
func testStoppedSandbox(t *testing.T, h *harness) {
	s, o := h.begin(command("sleep 60"))
	if _, err := h.manager.Delete(t.Context(), sandbox.Principal{ID: owner}, h.id); err != nil {
		t.Fatal(err)
	}
	if s.rest(o); !o.cut || o.end != nil || o.code != "" {
		t.Errorf("got %+v", o)
	}
	if o := h.run("true"); o.code != "unavailable" {
		t.Errorf("after its end: %+v", o)
	}
}

func testStreamInput(t *testing.T, h *harness) {
	msg := command("cat")
	msg["stdin"] = true
	s, o := h.begin(msg)
	body := enveloped(t,
		object{"start": object{"process": selector(o.pid)}},
		object{"data": object{"input": object{"stdin": []byte("a")}}},
		object{"keepalive": object{}},
		object{"data": object{"input": object{"stdin": []byte("b")}}},
	)
	resp, text := h.do("POST", "/process.Process/StreamInput", body, "Content-Type", "application/connect+json", "Connect-Protocol-Version", "1")
	if resp.StatusCode != http.StatusOK || strings.Contains(text, "error") {
		t.Errorf("stream of input: %d %q", resp.StatusCode, text)
	}
	h.must("/process.Process/CloseStdin", object{"process": selector(o.pid)})
	if s.rest(o); o.out != "ab" {
		t.Errorf("got %+v", o)
	}
	body = enveloped(t, object{"data": object{"input": object{"stdin": []byte("a")}}})
	if _, text = h.do("POST", "/process.Process/StreamInput", body, "Content-Type", "application/connect+json"); !strings.Contains(text, "invalid_argument") {
		t.Errorf("input for nobody: %q", text)
	}
}
