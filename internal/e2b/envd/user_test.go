package envd

import (
	"encoding/base64"
	"net/http"
	"testing"
)

func TestUserOf(t *testing.T) {
	for header, want := range map[string]string{
		"":           "",
		"Bearer key": "",
		"Basic ***":  "",
		"Basic " + base64.StdEncoding.EncodeToString([]byte("root:")):      "root",
		"Basic " + base64.StdEncoding.EncodeToString([]byte("user:pa:ss")): "user",
		"Basic " + base64.StdEncoding.EncodeToString([]byte(":")):          "",
	} {
		if got := userOf(http.Header{"Authorization": {header}}); got != want {
			t.Errorf("%q: %q, want %q", header, got, want)
		}
	}
}
