package origin

import (
	"net/http/httptest"
	"testing"
)

// TestListStopsRebinding: a page under evil.test that resolves its name to the server's address
// is refused by its Host; one that fetches across origins by its Origin (E11).
func TestListStopsRebinding(t *testing.T) {
	tests := []struct {
		name, host, origin string
		names              []string
		ok                 bool
	}{
		{name: "address", host: "127.0.0.1:7433", ok: true},
		{name: "address of the network", host: "192.168.1.4", ok: true},
		{name: "IPv6", host: "[::1]:7433", ok: true},
		{name: "localhost", host: "LocalHost:7433", ok: true},
		{name: "rebound name", host: "evil.test:7433"},
		{name: "rebound name that looks like an address", host: "127.0.0.1.evil.test"},
		{name: "no name", host: ""},
		{name: "listed", host: "box.example:80", names: []string{"Box.Example"}, ok: true},
		{name: "any", host: "box.example", names: []string{"*"}, ok: true},
		{name: "own page", host: "localhost:7433", origin: "http://localhost:7433", ok: true},
		{name: "other page", host: "127.0.0.1:7433", origin: "http://evil.test"},
		{name: "other port of localhost", host: "localhost:7433", origin: "http://localhost:3000"},
		{name: "page without an origin", host: "127.0.0.1:7433", origin: "null"},
		{name: "listed page", host: "127.0.0.1:7433", origin: "https://ui.example", names: []string{"ui.example"}, ok: true},
		{name: "any host is not any page", host: "box.example", origin: "http://evil.test", names: []string{"*"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := httptest.NewRequest("GET", "/v1/sandboxes", nil)
			r.Host = tt.host
			if tt.origin != "" {
				r.Header.Set("Origin", tt.origin)
			}
			l := New(tt.names)
			if err := l.Check(r); (err == nil) != tt.ok {
				t.Errorf("Check = %v, want ok %v", err, tt.ok)
			}
		})
	}
}
