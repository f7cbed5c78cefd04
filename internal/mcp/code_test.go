package mcp_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"casemate.dev/internal/testenv"
)

func TestRunCode(t *testing.T) {
	p, _ := newHarness(t).overStdio(nil, nil)
	text, r := p.call("run_code", object{"code": "set x 7\nprint hello\nwarn careful\nshow shown\nget x"})
	contains(t, text, "hello\n", "careful\n", "shown\n", "\n7\n", "completed", "context python")
	values := r["values"].([]any)
	if r["context"] != "python" || r["end"] != "completed" || len(values) != 2 || values[1].(object)["main"] != true {
		t.Errorf("%v", r)
	}
	// Variables last; an error is a result.
	if text, _ = p.call("run_code", object{"code": "get x"}); !strings.HasPrefix(text, "7\n") {
		t.Errorf("%q", text)
	}
	text, r = p.call("run_code", object{"code": "raise ValueError it is bad"})
	contains(t, text, "ValueError", "it is bad", "failed")
	if fault := r["error"].(object); fault["name"] != "ValueError" || fault["value"] != "it is bad" {
		t.Errorf("%v", fault)
	}
	// A restart forgets; one of an interpreter that was never there is no error.
	contains(t, first(p.call("run_code", object{"code": "get x", "restart": true})), "NameError")
	p.call("run_code", object{"code": "1+1", "language": "bash", "restart": true})
	// Its limit interrupts it, and keeps the variables.
	p.call("run_code", object{"code": "set y 1"})
	contains(t, first(p.call("run_code", object{"code": "sleep 60000", "timeout_seconds": 0.2})), "timed_out", "timeout_seconds")
	if text, _ = p.call("run_code", object{"code": "get y"}); !strings.HasPrefix(text, "1\n") {
		t.Errorf("%q", text)
	}
	contains(t, first(p.call("run_code", object{"code": "die 9"})), "driver_ended", "died")
	contains(t, p.refused("run_code", object{"code": "1+1"}), "has ended", "restart: true")
	p.call("run_code", object{"code": "1+1", "restart": true})
	contains(t, p.refused("run_code", object{"code": " "}), "code is empty")
	contains(t, p.refused("run_code", object{"code": "1", "language": "cobol"}), "language")
	contains(t, p.refused("run_code", object{"code": "1", "context": "nobody"}), "not_found")
	long := first(p.call("run_code", object{"code": "print " + strings.Repeat("x", 5000), "max_output_bytes": 500}))
	contains(t, long, "bytes left out")
}

func first(text string, _ object) string { return text }

// TestCodeShowsImages: a figure comes as an image, and its other forms as fields.
func TestCodeShowsImages(t *testing.T) {
	p, _ := newHarness(t).overStdio(nil, nil)
	const png = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
	r, err := p.CallTool(t.Context(), &sdk.CallToolParams{Name: "run_code", Arguments: object{
		"code": `line {"main": true, "data": {"image/png": "` + png + `", "text/plain": "<Figure>", "chart": {"type": "line"}}}`,
	}})
	if err != nil || r.IsError || len(r.Content) != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	if img, ok := r.Content[1].(*sdk.ImageContent); !ok || img.MIMEType != "image/png" || len(img.Data) < 60 {
		t.Errorf("%+v", r.Content[1])
	}
	shown := r.StructuredContent.(object)["values"].([]any)[0].(object)
	data := shown["data"].(object)
	if data["text/plain"] != "<Figure>" || !strings.Contains(data["chart"].(string), `"line"`) || data["image/png"] != nil || len(shown["types"].([]any)) != 3 {
		t.Errorf("%v", shown)
	}
}

// TestCancelInterruptsCode: what takes notice keeps its variables; what does not is killed.
func TestCancelInterruptsCode(t *testing.T) {
	h := newHarness(t)
	p, _ := h.overStdio(nil, nil)
	_, made := p.call("run_code", object{"code": "set x 7"})
	state := func() string {
		c, err := h.admin.Contexts.Get(t.Context(), made["sandbox"].(string), "python")
		if err != nil {
			t.Fatal(err)
		}
		return c.GetState()
	}
	for code, kept := range map[string]string{"sleep 600000": "7\n", "stubborn": "NameError"} {
		p.call("run_code", object{"code": "set x 7"})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := p.CallTool(ctx, &sdk.CallToolParams{Name: "run_code", Arguments: object{"code": code, "timeout_seconds": 3600}})
			done <- err
		}()
		testenv.Eventually(t, patience, code+": it runs", func() bool { return state() == "busy" })
		cancel()
		if err := testenv.Receive(t, "the call ends", done); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", code, err)
		}
		testenv.Eventually(t, patience, code+": it has ended", func() bool { return state() == "idle" })
		contains(t, first(p.call("run_code", object{"code": "get x"})), kept)
	}
}
