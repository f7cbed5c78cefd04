package server

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/testenv"
)

// TestSocketNeedsNoKeyForItsOwnerOnly: the peer's uid decides, also where somebody has widened the
// socket's mode. The owner's request is the twin that shows the way is open.
func TestSocketNeedsNoKeyForItsOwnerOnly(t *testing.T) {
	testenv.Root(t)
	p := newPlace(t)
	s := start(t, p.config())
	for _, path := range []string{p.dir, s.cfg.RunDir, s.UnixSocket()} {
		if err := os.Chmod(path, 0o777); err != nil { //nolint:gosec // the point of the test
			t.Fatal(err)
		}
	}
	ask := func(uid uint32) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket", s.UnixSocket(), "http://casemate/v1/sandboxes")
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("curl as %d: %v", uid, err)
		}
		return string(out)
	}
	if got := ask(0); got != "200" {
		t.Errorf("root: %s, want 200", got)
	}
	if got := ask(65534); got != "403" && got != "401" {
		t.Errorf("nobody: %s, want to be refused", got)
	}
}

func TestTLS(t *testing.T) {
	p := newPlace(t)
	cfg := p.config()
	cfg.TLSCert, cfg.TLSKey = selfSigned(t, p.dir)
	s := start(t, cfg)
	pool := x509.NewCertPool()
	cert, err := os.ReadFile(cfg.TLSCert)
	if err != nil || !pool.AppendCertsFromPEM(cert) {
		t.Fatal("no certificate", err)
	}
	c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, ForceAttemptHTTP2: true}}
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+s.Addrs()[0].String()+"/-/health", nil)
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.ProtoMajor != 2 {
		t.Errorf("%s %d", resp.Proto, resp.StatusCode)
	}

	cfg = newPlace(t).config()
	cfg.TLSCert = "cert-without-key"
	if _, err := New(t.Context(), cfg); err == nil {
		t.Error("a certificate without a key was taken")
	}
}

// selfSigned writes a certificate for 127.0.0.1 and its key.
func selfSigned(t *testing.T, dir string) (certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: der}, keyFile: {Type: "PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

// TestPlainListenBeyondTheMachineWarns; loopback does not.
func TestPlainListenBeyondTheMachineWarns(t *testing.T) {
	for addr, want := range map[string]bool{"0.0.0.0:0": true, "127.0.0.1:0": false} {
		var log bytes.Buffer
		cfg := newPlace(t).config()
		cfg.Listen, cfg.Log = []string{addr}, slog.New(slog.NewTextHandler(&log, nil))
		s, err := New(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(log.String(), "without TLS"); got != want {
			t.Errorf("%s: warned %v, want %v", addr, got, want)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestLongSocketPath(t *testing.T) {
	cfg := newPlace(t).config()
	cfg.UnixSocket = filepath.Join(cfg.RunDir, strings.Repeat("x", 120))
	if _, err := New(t.Context(), cfg); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("New = %v, want invalid_argument", err)
	}
}

// TestRunEndsWithAListener: when one way in breaks, the server does not limp on without it.
func TestRunEndsWithAListener(t *testing.T) {
	s, err := New(t.Context(), newPlace(t).config())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Run(context.Background()) }()
	_ = s.listeners[0].Close()
	if err := testenv.Receive(t, "the server ends", done); err == nil {
		t.Error("Run ended without an error")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
