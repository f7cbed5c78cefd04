package server

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/inspect"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/secret"
	"casemate.dev/internal/store"
)

// The files in the keys directory that hold the authority of what sandboxes are shown for TLS. It is
// another than the one by which clients know the server.
const (
	gatewayKeyFile  = "gateway-ca.key"
	gatewayCertFile = "gateway-ca.pem"
)

// Where sandboxes with a network find certificates. The bundle takes the place of the one that Debian's
// programs read, so that those without a variable for it trust the gateway, too. The other is for programs that add
// it to a bundle of their own, as Node.js does: the gateway's authority, and what this host trusts beyond the usual.
const (
	insideCA     = "/etc/casemate/ca.pem"
	insideBundle = "/etc/ssl/certs/ca-certificates.crt"
)

// openVault opens the secrets, with the master key of the keys directory, and keeps those with an
// external source fresh until Close.
func (s *Server) openVault(ctx context.Context, events journal.Recorder) error {
	// From here on this process's memory holds secrets: it must not become a file when the process dies.
	if err := syscall.Setrlimit(syscall.RLIMIT_CORE, &syscall.Rlimit{}); err != nil {
		return os.NewSyscallError("setrlimit core", err)
	}
	key, err := policy.KeptSecret(s.cfg.KeysDir, secret.KeyFile)
	if err != nil {
		return err
	}
	defer clear(key)
	if s.vault, err = secret.Open(ctx, secret.Config{DB: s.db, Journal: events, Key: key, Log: s.log}); err != nil {
		return fmt.Errorf("open secrets: %w", err)
	}
	s.undo.Add(s.vault.Close)
	s.background(ctx, s.vault.Run)
	if err := s.openTrust(); err != nil {
		return err
	}
	return s.openProxy()
}

// background runs f until Close.
func (s *Server) background(ctx context.Context, f func(context.Context)) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	wg.Go(func() { f(ctx) })
	s.undo.Add(func() {
		cancel()
		wg.Wait()
	})
}

// trust is what the gateway, and the sandboxes behind it, know servers by.
type trust struct {
	shared egress.Private
	// roots are the authorities by which servers are verified, in PEM.
	roots []byte
	// files are what sandboxes see, by path.
	files map[string][]byte
}

// openTrust reads or makes the gateway's authority, and gathers those of servers.
func (s *Server) openTrust() error {
	cert, key, err := s.gatewayAuthority()
	if err != nil {
		return err
	}
	extra, err := s.extraRoots()
	if err != nil {
		return err
	}
	roots := append(s.hostRoots(), extra...)
	s.trust.roots = roots
	s.trust.files = map[string][]byte{
		insideCA:     slices.Concat(bytes.TrimSpace(cert), []byte("\n"), extra, hostAnchors()),
		insideBundle: append(bytes.Clone(roots), cert...),
	}
	s.trust.shared, err = inspect.Shared{CertPEM: cert, KeyPEM: key, RootsPEM: roots}.Private()
	return err
}

// gatewayAuthority reads the authority of what sandboxes are shown, or makes it.
func (s *Server) gatewayAuthority() (cert, key []byte, err error) {
	certPath, keyPath := filepath.Join(s.cfg.KeysDir, gatewayCertFile), filepath.Join(s.cfg.KeysDir, gatewayKeyFile)
	cert, err = os.ReadFile(certPath)
	if err == nil {
		key, err = os.ReadFile(keyPath)
	}
	if err == nil && lasts(cert, time.Now().AddDate(1, 0, 0)) {
		return cert, key, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("read the gateway's authority: %w", err)
	}
	if cert, key, err = inspect.NewAuthority(s.id, time.Now()); err != nil {
		return nil, nil, err
	}
	// The key first: a certificate without its key would be taken for good.
	err = policy.WriteSecret(keyPath, string(bytes.TrimSpace(key)))
	if err == nil {
		err = policy.WriteSecret(certPath, string(bytes.TrimSpace(cert)))
	}
	if err != nil {
		return nil, nil, fmt.Errorf("write the gateway's authority: %w", err)
	}
	return cert, key, nil
}

// lasts reports whether a certificate is valid until then.
func lasts(text []byte, then time.Time) bool {
	block, _ := pem.Decode(text)
	if block == nil {
		return false
	}
	c, err := x509.ParseCertificate(block.Bytes)
	return err == nil && c.NotAfter.After(then)
}

// hostBundles are where distributions keep the authorities that a host trusts.
func hostBundles() []string {
	return []string{
		"/etc/ssl/certs/ca-certificates.crt",                // Debian, Alpine, Arch
		"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // Fedora, RHEL
		"/etc/ssl/ca-bundle.pem",                            // openSUSE
		"/etc/pki/tls/certs/ca-bundle.crt",
	}
}

// hostRoots returns the authorities that this host trusts.
func (s *Server) hostRoots() []byte {
	for _, path := range hostBundles() {
		if text, err := os.ReadFile(path); err == nil {
			return append(bytes.TrimSpace(text), '\n')
		}
	}
	s.log.Warn("this host has no certificates of authorities: the gateway trusts only those of --extra-ca")
	return nil
}

// hostAnchors returns the authorities that this host's administrator has added to those of the distribution. They are
// in the host's bundle, too; this is for programs that bring a bundle of their own and want to be told what else there is.
func hostAnchors() []byte {
	var all []byte
	for _, pattern := range []string{
		"/usr/local/share/ca-certificates/*.crt", // Debian, Alpine
		"/usr/local/share/ca-certificates/*/*.crt",
		"/etc/pki/ca-trust/source/anchors/*",          // Fedora, RHEL
		"/etc/pki/trust/anchors/*",                    // openSUSE
		"/etc/ca-certificates/trust-source/anchors/*", // Arch
	} {
		files, _ := filepath.Glob(pattern) // the patterns are well formed
		for _, path := range files {
			text, err := os.ReadFile(path)
			if err == nil && x509.NewCertPool().AppendCertsFromPEM(text) {
				all = append(append(all, bytes.TrimSpace(text)...), '\n')
			}
		}
	}
	return all
}

// extraRoots returns the authorities of the setting.
func (s *Server) extraRoots() ([]byte, error) {
	var roots []byte
	for _, path := range s.cfg.ExtraCAs {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, errs.Wrap(err, errs.InvalidArgument, "cannot read the authorities in %s", path)
		}
		if !x509.NewCertPool().AppendCertsFromPEM(text) {
			return nil, errs.New(errs.InvalidArgument, "%s holds no certificates in PEM", path)
		}
		roots = append(append(roots, bytes.TrimSpace(text)...), '\n')
	}
	return roots, nil
}

// subject is a sandbox as the vault sees it.
func (s *Server) subject(ctx context.Context, sb sandbox.Sandbox) secret.Subject {
	return policy.SecretSubject(sb, func(id string) (sandbox.Sandbox, error) { return s.manager.Get(ctx, policy.Local(), id) })
}

// grants says what a sandbox with a network gets beside it: placeholders, the way to models, certificates.
func (s *Server) grants(ctx context.Context, sb sandbox.Sandbox) sandbox.Granted {
	env, placeholders := s.placeholders(ctx, sb)
	for _, name := range []string{
		"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO",
		"CODEX_CA_CERTIFICATE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", "HTTPLIB2_CA_CERTS", "NIX_SSL_CERT_FILE", "BUNDLE_SSL_CA_CERT",
		"CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
	} {
		env[name] = insideBundle
	}
	env["NODE_EXTRA_CA_CERTS"], env["DENO_TLS_CA_STORE"] = insideCA, "system"
	return sandbox.Granted{Env: env, Placeholders: placeholders, Files: s.trust.files}
}

// placeholders are the variables that stand for secrets in a sandbox, and for the way to models, and the names of the former.
// One that is answered from a record has none of the former: nothing of it leaves that a secret could be put on. The way to models
// is named there as elsewhere, and leads nowhere.
func (s *Server) placeholders(ctx context.Context, sb sandbox.Sandbox) (env map[string]string, names []string) {
	sub := s.subject(ctx, sb)
	env = map[string]string{}
	if n := sb.Spec.Network; n == nil || !n.Recorded {
		env = secret.EnvOf(s.vault.Grants(ctx, sub))
	}
	names = slices.Collect(maps.Keys(env))
	for k, v := range secret.RouteEnv(s.vault.RouteGrants(ctx, sub)) {
		env[k] = v
	}
	return env, names
}

// beyond says what the gateway does with a sandbox's connections to a name beyond what its rules say.
func (s *Server) beyond(ctx context.Context, sb sandbox.Sandbox, name string, port uint16) (b sandbox.NetworkBeyond) {
	sub := s.subject(ctx, sb)
	if name == secret.ModelHost {
		var providers []string
		for _, r := range s.vault.RouteGrants(ctx, sub) {
			providers = append(providers, r.Provider)
		}
		if len(providers) > 0 {
			b.Answered = "the gateway answers it itself, as the sandbox's way to models of " + strings.Join(providers, ", ")
		}
		return b
	}
	for _, g := range s.vault.Grants(ctx, sub) {
		if !g.For(name, port) {
			continue
		}
		text := "the secret " + g.Name + " is put on requests that its binding covers"
		if g.Header {
			text = "headers of the sandbox's own rules are put on requests"
		}
		if !slices.Contains(b.Puts, text) {
			b.Puts = append(b.Puts, text)
		}
	}
	return b
}

// private gathers what the gateway must know of one sandbox.
func (s *Server) private(ctx context.Context, id string) (egress.Private, error) {
	sb, err := s.manager.Get(ctx, policy.Local(), id)
	if err != nil {
		return nil, err
	}
	if n := sb.Spec.Network; n != nil && n.Recorded {
		return nil, nil // nothing of it leaves that a secret could be put on
	}
	used, err := s.vault.SpentBy(ctx, id)
	if err != nil {
		return nil, err
	}
	sub := s.subject(ctx, sb)
	var routes []inspect.RoutePart
	for _, r := range s.vault.RouteGrants(ctx, sub) {
		routes = append(routes, inspect.RoutePart{RouteGrant: r, Expires: r.ExpiresAt(sb.CreatedAt), Spent: used[r.Provider]})
	}
	grants := s.vault.Grants(ctx, sub)
	if !s.vault.ProxyOf(id).Empty() {
		// Who runs a sandbox's own proxy reads what is not encrypted, and is not the one who bound the secret.
		for _, g := range grants {
			for i := range g.Bindings {
				g.Bindings[i].Plain = false
			}
		}
	}
	return inspect.Part(grants, routes)
}

// sawNetwork takes what the gateway saw: use is noted, and everything recorded.
func (s *Server) sawNetwork(list []egress.Event) error {
	for _, e := range list {
		if e.Secret != "" && (e.Type == egress.EventSecret || e.Type == egress.EventModel) {
			s.vault.Used(e.Secret, e.Time)
		}
		if e.Type == egress.EventModel {
			s.db.Queue(store.Change{Writes: []store.Write{store.AddModelUsage(store.ModelUsage{
				Sandbox: e.Sandbox, Provider: e.Provider, Requests: int64(max(e.Count, 1)), TokensIn: e.TokensIn, TokensOut: e.TokensOut,
			})}})
		}
	}
	s.db.Kick()
	return s.manager.RecordNetwork(list)
}

// The time after which the gateway is told again of changes that it could not be told of: until then it goes on with keys
// that were taken back.
const (
	pushAgain = time.Second
	pushMost  = 30 * time.Second
)

// pushSecrets tells the gateway of every change, until ctx ends. changed is closed with the first.
func (s *Server) pushSecrets(ctx context.Context, changed <-chan struct{}) {
	var again <-chan time.Time
	wait := pushAgain
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-again:
		}
		// Before the push, so that what changes meanwhile is told next.
		changed, again = s.vault.Changed(), nil
		err := s.pushOnce(ctx)
		if s.cfg.ProxySecret != "" {
			err = errors.Join(err, s.gateway.RefreshShared(ctx))
		}
		if err == nil {
			wait = pushAgain
			continue
		}
		if ctx.Err() == nil {
			s.log.Error("cannot tell the gateway of changed secrets; it has the old ones until it is told again", "error", err, "again_in", wait)
		}
		again = time.After(wait)
		wait = min(2*wait, pushMost)
	}
}

// sweepEvery is how often what belonged to ended sandboxes is removed.
const sweepEvery = 10 * time.Minute

// sweepSecrets removes what belonged to ended sandboxes, until ctx ends.
func (s *Server) sweepSecrets(ctx context.Context) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		err := s.vault.SweepTransforms(func(id string) bool {
			sb, err := s.manager.Get(ctx, policy.Local(), id)
			return errs.Is(err, errs.NotFound) || err == nil && sb.State == sandbox.Stopped
		})
		if err != nil {
			s.log.Warn("cannot remove the headers of ended sandboxes", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (s *Server) pushOnce(ctx context.Context) error {
	q := sandbox.Query{PageSize: 1000}
	var all []error
	for {
		page, next, err := s.manager.List(ctx, policy.Local(), q)
		if err != nil {
			return errors.Join(append(all, err)...)
		}
		for _, sb := range page {
			if sb.Spec.Network != nil {
				all = append(all, s.gateway.Refresh(ctx, sb.ID))
			}
		}
		if next == "" {
			return errors.Join(all...)
		}
		q.PageToken = next
	}
}
