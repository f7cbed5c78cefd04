package api

import (
	"encoding/base64"
	"net/http"
	"strings"
	"testing"

	"casemate.dev/internal/journal/bundle"
)

// TestEveryAnswerCarriesACheckpoint asks unary calls, plain paths, streams and errors, and exports a bundle that
// is anchored by what they carried.
func TestEveryAnswerCarriesACheckpoint(t *testing.T) {
	h := newHarness(t)
	box := h.box()
	var heads [][]byte
	for _, path := range []string{
		"/v1/sandboxes/" + box, "/v1/sandboxes/" + box + "/events", "/v1/sandboxes/" + box + "/files/list?path=.",
		"/v1/sandboxes/no-such-sandbox", "/v1/sandboxes/" + box + "/bundle", "/v1/version",
	} {
		status, header, body := h.call(http.MethodGet, path, "")
		head, err := base64.StdEncoding.DecodeString(header.Get(headerCheckpoint))
		if err != nil || !strings.HasPrefix(string(head), "casemate.test/log\n") {
			t.Errorf("%s: %d carries %q, %v (%s)", path, status, head, err, body)
		}
		heads = append(heads, head)
	}
	query := ""
	for _, head := range heads {
		query += "&head=" + strings.NewReplacer("+", "%2B", "/", "%2F", "=", "%3D").Replace(base64.StdEncoding.EncodeToString(head))
	}
	_, _, whole := h.call(http.MethodGet, "/v1/sandboxes/"+box+"/bundle?"+query[1:], "")
	r, err := bundle.Verify(strings.NewReader(whole), bundle.Options{Heads: heads})
	if p, bad := r.First(); bad || err != nil || !r.Anchored.OK || r.Events == 0 {
		t.Errorf("%+v %+v %v %s", p, r, err, whole)
	}
	if status, _, body := h.call(http.MethodGet, "/v1/sandboxes/"+box+"/bundle?head=nonsense!", ""); status != http.StatusBadRequest {
		t.Errorf("a head that is none: %d %s", status, body)
	}
}
