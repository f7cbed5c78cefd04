package portproxy

import (
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestStripCredentials: what a sandbox is sent, its code can read.
func TestStripCredentials(t *testing.T) {
	in := http.Header{
		"Authorization":            {"Bearer app-token"},
		"X-Api-Key":                {"csm_secret"},
		"X-Access-Token":           {"secret"},
		"E2b-Traffic-Access-Token": {"secret"},
		"X-E2b-Anything":           {"secret"},
		"Casemate-Anything":        {"secret"},
		"Proxy-Authorization":      {"Basic secret"},
		"Accept":                   {"text/html"},
	}
	got := in.Clone()
	StripCredentials(got, "X-Api-Key")
	want := http.Header{"Authorization": {"Bearer app-token"}, "Accept": {"text/html"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("application's own Authorization beside X-API-Key (-want +got):\n%s", diff)
	}

	got = in.Clone()
	StripCredentials(got, "Authorization")
	if diff := cmp.Diff(http.Header{"Accept": {"text/html"}}, got); diff != "" {
		t.Errorf("authenticated by Authorization (-want +got):\n%s", diff)
	}

	for _, v := range []string{"Bearer csm_x", "bearer  e2b_00", "Basic csm_x", "Basic dXNlcjpjc21feA==", `Token token="csm_x"`} {
		got := http.Header{"Authorization": {v}}
		StripCredentials(got, "")
		if len(got) > 0 {
			t.Errorf("%q passed though it carries a key", v)
		}
	}
}
