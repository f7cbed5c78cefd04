package envd

import (
	"encoding/base64"
	"net/http"
	"testing"
)

func FuzzRange(f *testing.F) {
	for _, h := range []string{"bytes=0-3", "bytes=-2", "bytes=5-", "bytes=3-2", "bytes=0-0,2-3", "bytes=-", "bytes=9223372036854775807-", "x=1-2"} {
		f.Add(h, int64(10))
	}
	f.Fuzz(func(t *testing.T, h string, size int64) {
		r, ok := parseRange(h)
		if !ok || size < 0 {
			return
		}
		if offset, length, ok := r.within(size); ok && (offset < 0 || length < 1 || offset > size-length) {
			t.Fatalf("%q of %d bytes: %d from %d", h, size, length, offset)
		}
	})
}

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
