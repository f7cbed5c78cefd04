package server

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/tlscert"
)

// trusting returns a client that trusts a server's authority and nothing else, and finds every name at
// the server's address.
func trusting(t *testing.T, s running) *http.Client {
	t.Helper()
	ca, err := s.unix(t).System.Authority(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM([]byte(ca.GetPem())) {
		t.Fatal("no certificate")
	}
	tr := &http.Transport{
		TLSClientConfig:   &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
		ForceAttemptHTTP2: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, s.Addrs()[0].String())
		},
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func get(t *testing.T, c *http.Client, url string, header ...string) (status int, proto, body string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return 0, "", err.Error()
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, resp.Proto, string(b)
}

// TestOwnCertificate: without any setting one address speaks HTTP and HTTPS, under its address, localhost
// and the names of sandboxes' ports.
func TestOwnCertificate(t *testing.T) {
	p := newPlace(t)
	s := start(t, p.config())
	c := trusting(t, s)
	addr := s.Addrs()[0].String()
	_, port, _ := net.SplitHostPort(addr)
	if want := "casemate.localhost:" + port; s.Domain() != want {
		t.Errorf("domain %q, want %q", s.Domain(), want)
	}
	for _, url := range []string{"http://" + addr, "https://" + addr, "https://localhost:" + port, "https://" + s.Domain()} {
		status, proto, body := get(t, c, url+"/-/health")
		if want := map[bool]string{true: "HTTP/2.0", false: "HTTP/1.1"}[strings.HasPrefix(url, "https")]; status != 200 || proto != want {
			t.Errorf("%s: %d %s %s", url, status, proto, body)
		}
	}
	if status, _, body := get(t, c, "https://elsewhere.test/-/health"); status != 0 || !strings.Contains(body, "valid for casemate.localhost") {
		t.Errorf("for a name of others: %d %s", status, body)
	}
	if info, err := os.Stat(filepath.Join(s.cfg.KeysDir, tlscert.KeyFile)); err != nil || info.Mode() != 0o600 {
		t.Errorf("the authority's key: %v, %v", info, err)
	}
	if _, err := os.Stat(filepath.Join(s.cfg.DataDir, tlscert.KeyFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a key beside the data: %v", err)
	}
}

// TestPortsByNameOverTLS: what getHost names is reached, and sees nothing that opens anything of ours. The
// twin is the list of what was sent: all of it is looked for.
func TestPortsByNameOverTLS(t *testing.T) {
	p := newPlace(t)
	cfg := p.config()
	cfg.Domain = "Boxes.test:8443"
	s := start(t, cfg)
	c := trusting(t, s)
	key, err := os.ReadFile(s.KeyPath())
	if err != nil {
		t.Fatal(err)
	}
	secret := strings.TrimSpace(string(key))
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+s.Domain()+"/v2/sandboxes",
		strings.NewReader(`{"templateID":"base","network":{"allowPublicTraffic":false}}`))
	req.Header.Set("X-API-Key", secret)
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	var made struct{ SandboxID, Domain, EnvdAccessToken, TrafficAccessToken string }
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil || made.Domain != "boxes.test:8443" {
		t.Fatalf("%+v, %v", made, err)
	}
	_ = resp.Body.Close()
	admin := sandbox.Principal{ID: "test", Admin: true}
	spec := sandbox.ProcessSpec{Argv: []string{"http-server", "8080"}}
	if _, err := s.manager.StartProcess(t.Context(), admin, made.SandboxID, spec, ""); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 10*time.Second, "a port", func() bool {
		ports, err := s.manager.Ports(t.Context(), admin, made.SandboxID)
		return err == nil && len(ports) == 1
	})
	url := "https://8080-" + made.SandboxID + "." + made.Domain + "/x?y=1"
	status, _, body := get(t, c, url, "X-API-Key", secret, "X-Access-Token", made.EnvdAccessToken, "Authorization", "Bearer "+secret,
		"E2b-Traffic-Access-Token", made.TrafficAccessToken, "Cookie", "app=1")
	if status != 200 || !strings.Contains(body, "GET /x?y=1") || !strings.Contains(body, "app=1") || !strings.Contains(body, "X-Forwarded-Proto: https") {
		t.Errorf("%d %s", status, body)
	}
	for _, v := range []string{secret, made.EnvdAccessToken, made.TrafficAccessToken} {
		if v == "" || strings.Contains(body, v) {
			t.Errorf("the application sees %q:\n%s", v, body)
		}
	}
	if status, _, _ := get(t, c, url); status != 403 {
		t.Errorf("without the token: %d", status)
	}
}

// TestHostsThatAreNoNames: "*" lets browsers come by any name, for which no certificate can be.
func TestHostsThatAreNoNames(t *testing.T) {
	cfg := newPlace(t).config()
	cfg.AllowHosts = []string{"*", "192.0.2.1", "Casemate.Example.com", "not a name"}
	s := start(t, cfg)
	ca, err := s.unix(t).System.Authority(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := strings.Join(ca.GetNames(), " "), "casemate.example.com casemate.localhost localhost 127.0.0.1 ::1"; got != want {
		t.Errorf("certificates for %s, want %s", got, want)
	}
	if status, _, body := get(t, trusting(t, s), "https://casemate.example.com/-/health"); status != 200 {
		t.Errorf("%d %s", status, body)
	}
}

func TestTLSOnly(t *testing.T) {
	cfg := newPlace(t).config()
	var log bytes.Buffer
	cfg.TLSOnly, cfg.Listen, cfg.Log = true, []string{"0.0.0.0:0"}, slog.New(slog.NewTextHandler(&log, nil))
	s := start(t, cfg)
	c := trusting(t, s)
	if status, _, body := get(t, c, "http://localhost/-/health"); status != http.StatusBadRequest {
		t.Errorf("plain HTTP: %d %s", status, body)
	}
	if status, _, body := get(t, c, "https://localhost/-/health"); status != 200 {
		t.Errorf("%d %s", status, body)
	}
	if err := s.stop(); err != nil || strings.Contains(log.String(), "without TLS") {
		t.Errorf("%v\n%s", err, log.String())
	}
}

// TestSilentConnections hold nobody up, and end with the server.
func TestSilentConnections(t *testing.T) {
	s := start(t, newPlace(t).config())
	var silent []net.Conn
	for range 20 {
		c, err := net.Dial("tcp", s.Addrs()[0].String())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		silent = append(silent, c)
	}
	if status, _, body := get(t, trusting(t, s), "https://localhost/-/health"); status != 200 {
		t.Errorf("%d %s", status, body)
	}
	if err := s.stop(); err != nil {
		t.Error(err)
	}
	for _, c := range silent {
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("still open: %v", err)
		}
	}
}

func TestDomains(t *testing.T) {
	for domain, want := range map[string]string{
		"none": "", "a.test": "a.test", "A.test:8443": "a.test:8443", "box": "box",
		"127.0.0.1:80": "!", "a.test:0": "!", "a.test:x": "!", "a b": "!", "-a.test": "!", "a..test": "!", "*.a.test": "!",
	} {
		cfg := newPlace(t).config()
		cfg.Domain = domain
		s, err := New(t.Context(), cfg)
		if want == "!" {
			if !errs.Is(err, errs.InvalidArgument) {
				t.Errorf("%q: %v", domain, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", domain, err)
			continue
		}
		if s.Domain() != want {
			t.Errorf("%q becomes %q", domain, s.Domain())
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
	cfg := newPlace(t).config()
	cfg.Listen = []string{}
	s := start(t, cfg)
	if _, err := s.unix(t).System.Authority(t.Context()); s.Domain() != "" || err == nil {
		t.Errorf("without an address: %q, %v", s.Domain(), err)
	}
}
