package mcp_test

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"
)

// TestToolsDescribeThemselves: a model knows a tool by nothing but this.
func TestToolsDescribeThemselves(t *testing.T) {
	p, _ := newHarness(t).overStdio(nil, nil)
	contains(t, p.InitializeResult().Instructions, "run_command", "deleted", "cut in the middle")
	list, err := p.ListTools(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	readOnly := map[string]bool{"list_sandboxes": true, "list_processes": true, "read_output": true, "read_file": true, "list_files": true}
	for _, tool := range list.Tools {
		if len(tool.Description) < 60 || tool.Title == "" || tool.InputSchema == nil || tool.OutputSchema == nil {
			t.Errorf("%s says too little about itself", tool.Name)
		}
		if a := tool.Annotations; a == nil || a.ReadOnlyHint != readOnly[tool.Name] || a.OpenWorldHint == nil || *a.OpenWorldHint {
			t.Errorf("%s is annotated as %+v", tool.Name, a)
		}
		for name, property := range tool.InputSchema.(object)["properties"].(object) {
			if property.(object)["description"] == "" || property.(object)["description"] == nil {
				t.Errorf("%s says nothing about %s", tool.Name, name)
			}
		}
	}
	if len(list.Tools) < 12 {
		t.Errorf("%d tools", len(list.Tools))
	}
}

func TestRunCommand(t *testing.T) {
	p, _ := newHarness(t).overStdio(nil, nil)
	text, r := p.call("run_command", object{"command": "echo out; echo bad >&2; pwd; echo $X; exit 7", "cwd": "/tmp", "env": object{"X": "y"}})
	contains(t, text, "out\nbad\n/tmp\ny\n", "[exit code 7")
	if r["exit_code"] != 7.0 || r["end"] != "exited" || r["output"] != "out\nbad\n/tmp\ny\n" || r["output_bytes"] != 15.0 {
		t.Errorf("fields %v", r)
	}
	if text, _ := p.call("run_command", object{"command": "cat", "stdin": "given"}); !strings.HasPrefix(text, "given\n[exit code 0") {
		t.Errorf("stdin: %q", text)
	}
	text, r = p.call("run_command", object{"command": "echo before; sleep 60", "timeout_seconds": 0.2})
	contains(t, text, "before\n", "timed out", "start_process")
	if r["end"] != "timed_out" || r["exit_code"] != nil {
		t.Errorf("fields %v", r)
	}
	if text, _ := p.call("run_command", object{"command": "true"}); !strings.HasPrefix(text, "(no output)\n") {
		t.Errorf("nothing: %q", text)
	}
	contains(t, p.refused("run_command", object{"command": " "}), "invalid_argument", "command is empty")
	contains(t, p.refused("run_command", object{"comand": "ls"}), "comand", "command (required)", "timeout_seconds")
	contains(t, p.refused("run_command", object{"command": "ls", "timeout_seconds": -1}), "timeout_seconds")
	contains(t, p.refused("run_command", object{"command": "ls", "sandbox": "nobody"}), "not_found", "list_sandboxes")
}

// TestLongOutputIsCutAndKept: what was left out is named, and read_output returns exactly that.
func TestLongOutputIsCutAndKept(t *testing.T) {
	p, _ := newHarness(t).overStdio(nil, nil)
	text, r := p.call("run_command", object{"command": "seq 1 5000", "max_output_bytes": 1000})
	var whole strings.Builder
	for i := range 5000 {
		fmt.Fprintln(&whole, i+1)
	}
	from, to := int(r["omitted_from"].(float64)), int(r["omitted_to"].(float64))
	if r["output_bytes"] != float64(whole.Len()) || to-from != whole.Len()-1000 {
		t.Errorf("left out %d to %d of %v", from, to, r["output_bytes"])
	}
	contains(t, text, "1\n2\n", "4999\n5000\n", fmt.Sprintf("%d bytes left out", to-from), "read_output")
	var got strings.Builder
	for at := from; at < to; {
		_, piece := p.call("read_output", object{"process": r["process"], "offset": at, "max_output_bytes": 5000})
		got.WriteString(piece["output"].(string))
		at = int(piece["next_offset"].(float64))
	}
	if want := whole.String()[from:]; !strings.HasPrefix(want, got.String()[:to-from]) {
		t.Errorf("what was left out differs")
	}
}

func TestBackgroundProcess(t *testing.T) {
	p, _ := newHarness(t).overStdio(nil, nil)
	_, r := p.call("start_process", object{"command": "echo ready; cat; echo closed"})
	id := r["process"]
	read := func(offset any) object {
		t.Helper()
		_, r := p.call("read_output", object{"process": id, "offset": offset, "wait_seconds": 20})
		return r
	}
	seen, next, running := "", any(0), true
	follow := func(until string) {
		t.Helper()
		for !strings.Contains(seen, until) && running {
			r := read(next)
			seen += r["output"].(string)
			next, running = r["next_offset"], r["running"].(bool)
		}
	}
	follow("ready\n")
	p.call("send_input", object{"process": id, "text": "one\n"})
	follow("one\n")
	text, _ := p.call("list_processes", nil)
	contains(t, text, id.(string), "still running", "echo ready; cat")
	p.call("send_input", object{"process": id, "close": true})
	for running {
		follow("never")
	}
	if seen != "ready\none\nclosed\n" {
		t.Errorf("output %q", seen)
	}
	contains(t, p.refused("send_input", object{"process": id}), "nothing to send")

	_, r = p.call("start_process", object{"command": "sleep 600"})
	text, ended := p.call("stop_process", object{"process": r["process"]})
	contains(t, text, "KILL")
	if ended["end"] != "canceled" {
		t.Errorf("it ended as %v", ended)
	}
	contains(t, p.refused("read_output", object{"process": "prc_nobody"}), "not_found")
}

func TestFiles(t *testing.T) {
	p, _ := newHarness(t).overStdio(nil, nil)
	text, r := p.call("write_file", object{"path": "a/b/ä.txt", "text": "grüße\n", "mode": "0600"})
	contains(t, text, "8 bytes", "/home/user/a/b/ä.txt")
	if r["mode"] != "0600" {
		t.Errorf("mode %v", r["mode"])
	}
	p.call("write_file", object{"path": "a/b/ä.txt", "text": "more\n", "append": true})
	if text, r = p.call("read_file", object{"path": "a/b/ä.txt"}); text != "grüße\nmore\n" || r["size"] != 13.0 || r["next_offset"] != nil {
		t.Errorf("%q, %v", text, r)
	}
	// A part never ends within a character.
	text, r = p.call("read_file", object{"path": "a/b/ä.txt", "max_bytes": 4})
	if r["text"] != "grü" || r["next_offset"] != 4.0 {
		t.Errorf("%q, %v", text, r)
	}
	if _, r = p.call("read_file", object{"path": "a/b/ä.txt", "offset": r["next_offset"], "max_bytes": 4}); r["text"] != "ße\n" || r["next_offset"] != 8.0 {
		t.Errorf("%v", r)
	}
	bytes := base64.StdEncoding.EncodeToString([]byte{0, 1, 255})
	p.call("write_file", object{"path": "bin", "base64": bytes})
	if _, r = p.call("read_file", object{"path": "bin"}); r["base64"] != bytes {
		t.Errorf("%v", r)
	}
	text, _ = p.call("list_files", object{"depth": 3})
	contains(t, text, "/home/user/a/\n", "/home/user/a/b/ä.txt", "0600", "bin")

	contains(t, p.refused("read_file", object{"path": "a"}), "is a directory", "list_files")
	contains(t, p.refused("read_file", object{"path": "none"}), "not_found")
	contains(t, p.refused("write_file", object{"path": "x", "base64": "!"}), "base64")
	contains(t, p.refused("write_file", object{"path": "x", "text": "a", "mode": "rwx"}), "octal")
	contains(t, p.refused("write_file", object{"path": "x", "text": "a", "base64": bytes}), "both")
}

// TestImagesComeAsImages: a chart that a program drew is shown to the model.
func TestImagesComeAsImages(t *testing.T) {
	p, _ := newHarness(t).overStdio(nil, nil)
	const png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
	p.call("write_file", object{"path": "dot.png", "base64": png})
	r, err := p.CallTool(t.Context(), &sdk.CallToolParams{Name: "read_file", Arguments: object{"path": "dot.png"}})
	if err != nil || len(r.Content) != 2 {
		t.Fatalf("%v, %v", r, err)
	}
	img, ok := r.Content[1].(*sdk.ImageContent)
	if !ok || img.MIMEType != "image/png" || base64.StdEncoding.EncodeToString(img.Data) != png {
		t.Errorf("%+v", r.Content[1])
	}
}

func TestSandboxTools(t *testing.T) {
	h := newHarness(t)
	p, _ := h.overStdio(nil, nil)
	text, r := p.call("create_sandbox", object{"name": "two", "labels": object{"a": "b"}, "lifetime_minutes": 5})
	contains(t, text, "created", "two", "until")
	if r["session_sandbox"] != false || r["expires_at"] == nil {
		t.Errorf("%v", r)
	}
	p.call("write_file", object{"sandbox": "two", "path": "x", "text": "there"})
	contains(t, p.refused("read_file", object{"path": "x"}), "not_found") // the session's own is another
	text, _ = p.call("list_sandboxes", nil)
	contains(t, text, "(two)", "this session's own")
	if text, _ = p.call("list_sandboxes", object{"labels": object{"a": "b"}}); strings.Count(text, "\n") != 0 {
		t.Errorf("by label: %s", text)
	}
	p.call("delete_sandbox", object{"sandbox": "two"})
	contains(t, p.refused("run_command", object{"sandbox": "two", "command": "true"}), "is stopped")
	contains(t, p.refused("create_sandbox", object{"profile": "root"}), "profile")
	contains(t, p.refused("create_sandbox", object{"name": "No Name"}), "name")
}

func TestTextIsAlwaysText(t *testing.T) {
	p, _ := newHarness(t).overStdio(nil, nil)
	text, r := p.call("run_command", object{"command": `printf '\377\376ok\n'`})
	if !utf8.ValidString(text) || !strings.Contains(r["output"].(string), "\uFFFD") {
		t.Errorf("%q", text)
	}
}
