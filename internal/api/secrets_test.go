package api

import (
	"strings"
	"testing"
)

// TestSecretsAreWriteOnly sends values in every way there is and looks for them in every answer, in
// the events and in the log.
func TestSecretsAreWriteOnly(t *testing.T) {
	h := newHarness(t)
	value := "value-" + strings.Repeat("9xQ", 8)
	box := h.box()
	var answers []string
	do := func(want int, method, path, body string) {
		t.Helper()
		status, _, text := h.call(method, path, body)
		if status != want {
			t.Errorf("%s %s: %d %s", method, path, status, text)
		}
		answers = append(answers, text)
	}
	do(200, "PUT", "/v1/secrets/mine", `{"value":"`+value+`"}`)
	do(400, "PUT", "/v1/secrets/mine", `{"value":"`+value+`\n`+value+`"}`)
	do(400, "PUT", "/v1/secrets/mine", `{"value":"`+value+`","class":"nonsense"}`)
	do(400, "PUT", "/v1/secrets/mine", `{"value":{"`+value+`":1}}`)
	do(403, "PUT", "/v1/secrets/other", `{"source":{"kind":"file","path":"/etc/shadow"}}`)
	do(200, "POST", "/v1/secrets/mine/rotate", `{"value":"`+value+`2"}`)
	do(404, "POST", "/v1/secrets/theirs/rotate", `{"value":"`+value+`"}`)
	do(200, "POST", "/v1/secrets/mine/bindings", `{"binding":{"for":{"all":true},"hosts":["api.example.com"],"scheme":"bearer","env":"KEY"}}`)
	do(400, "POST", "/v1/secrets/mine/bindings", `{"binding":{"for":{"all":true},"hosts":["api.example.com"],"scheme":"`+value[:10]+`"}}`)
	do(403, "PUT", "/v1/model-routes/x", `{"route":{"secret":"mine"}}`)
	do(403, "PUT", "/v1/secret-classes/tool", `{}`)
	for _, path := range []string{"/v1/secrets", "/v1/secrets/mine", "/v1/sandboxes/" + box + "/grants", "/v1/sandboxes/" + box + "/events"} {
		do(200, "GET", path, "")
	}
	do(200, "DELETE", "/v1/secrets/mine", "")
	for _, a := range append(answers, h.log.String()) {
		if strings.Contains(a, value) {
			t.Errorf("a value is shown: %s", a)
		}
	}
}

// TestSecretsOfOthers: a key's holder neither sees nor changes another's.
func TestSecretsOfOthers(t *testing.T) {
	h := newHarness(t)
	if status, _, text := h.call("PUT", "/v1/secrets/theirs", `{"value":"a value for tests"}`, "Authorization", "Bearer "+h.admin); status != 200 {
		t.Fatal(text)
	}
	if _, _, text := h.call("GET", "/v1/secrets", ""); strings.Contains(text, "theirs") {
		t.Errorf("a user sees %s", text)
	}
	for _, path := range []string{"GET /v1/secrets/theirs", "DELETE /v1/secrets/theirs"} {
		method, path, _ := strings.Cut(path, " ")
		if status, _, text := h.call(method, path, ""); status != 404 {
			t.Errorf("%s %s: %d %s", method, path, status, text)
		}
	}
	if status, _, _ := h.call("GET", "/v1/secrets", "", "Authorization", ""); status != 401 {
		t.Errorf("a stranger lists secrets: %d", status)
	}
}
