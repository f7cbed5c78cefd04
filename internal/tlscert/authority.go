package tlscert

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/policy"
)

// The files in the keys directory.
const (
	// KeyFile holds the authority's private key, PKCS #8 in PEM, mode 0600.
	KeyFile = "ca.key"
	// CertFile holds its certificate, in PEM.
	CertFile = "ca.pem"
)

const (
	authorityLife = 10 * 365 * 24 * time.Hour
	// authorityLeft is what must be left of an authority's life at a start; else it is prolonged.
	authorityLeft = 365 * 24 * time.Hour
	leafLife      = 90 * 24 * time.Hour
	leafLeft      = leafLife / 3
	// backdated is how far clients' clocks may be behind.
	backdated = time.Hour
	// maxLeaves bounds the leaves that are kept; strangers choose names below localhost.
	maxLeaves = 64
)

// Config is what Open needs.
type Config struct {
	// Dir is where the authority's files are; it must exist, readable by its owner only.
	Dir string
	// Names are the DNS names of the server, the first being the one that who asks for another is
	// shown. Each also stands for the names one label below it.
	Names []string
	// Addrs are the addresses under which the server may be asked for.
	Addrs []netip.Addr
	// Clock tells time; nil: the system's.
	Clock clock.Clock
	// Log learns of a new authority; nil: nobody does.
	Log *slog.Logger
}

// Authority signs the certificates of one server. Its methods are safe for concurrent use.
type Authority struct {
	cfg  Config
	key  crypto.Signer
	cert *x509.Certificate

	// mu guards the fields below.
	mu      sync.Mutex
	leafKey crypto.Signer
	leaves  map[string]*tls.Certificate
}

// Open takes up the authority in cfg.Dir, or makes one. An authority that does not cover every name and
// address, or has less than a year to live, gets a new certificate for its key. A key that others than
// its owner may read is refused.
func Open(cfg Config) (*Authority, error) {
	if len(cfg.Names) == 0 {
		return nil, errs.New(errs.Internal, "a certificate authority needs a name")
	}
	if cfg.Clock == nil {
		cfg.Clock = clock.New()
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	for i, n := range cfg.Names {
		cfg.Names[i] = strings.ToLower(n)
	}
	a := &Authority{cfg: cfg, leaves: make(map[string]*tls.Certificate)}
	var err error
	if a.key, err = openKey(filepath.Join(cfg.Dir, KeyFile)); err != nil {
		return nil, err
	}
	if a.leafKey, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	old, err := readCert(filepath.Join(cfg.Dir, CertFile))
	if err != nil {
		return nil, err
	}
	if a.suffices(old) {
		a.cert = old
		return a, nil
	}
	return a, a.issue(old)
}

// openKey reads the authority's key, or makes one.
func openKey(path string) (crypto.Signer, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return makeKey(path)
	}
	if err != nil {
		return nil, fmt.Errorf("read the authority's key: %w", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm()&0o077 != 0 {
		return nil, errs.Wrap(err, errs.FailedPrecondition, "others than its owner may read %s, or it can't be looked at", path).
			WithHint("if nobody has: chmod 600 %s; else remove it, and trust the new authority", path)
	}
	block, _ := pem.Decode(text)
	if block != nil {
		if key, err := x509.ParsePKCS8PrivateKey(block.Bytes); err == nil {
			if signer, ok := key.(crypto.Signer); ok {
				return signer, nil
			}
		}
	}
	return nil, errs.New(errs.FailedPrecondition, "%s holds no private key", path).
		WithHint("remove the file: a new authority is made, and clients must trust it anew")
}

func makeKey(path string) (crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode key: %w", err)
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	if err := policy.WriteSecret(path, strings.TrimSpace(string(text))); err != nil {
		return nil, fmt.Errorf("write the authority's key: %w", err)
	}
	return key, nil
}

// readCert returns the certificate in a file, nil where there is none that can be read.
func readCert(path string) (*x509.Certificate, error) {
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // none is an answer
	}
	if err != nil {
		return nil, fmt.Errorf("read the authority's certificate: %w", err)
	}
	if block, _ := pem.Decode(text); block != nil {
		if cert, err := x509.ParseCertificate(block.Bytes); err == nil {
			return cert, nil
		}
	}
	return nil, nil //nolint:nilnil // what is damaged is made anew from the key
}

// suffices reports whether a certificate is of this key, lives long enough and covers everything.
func (a *Authority) suffices(c *x509.Certificate) bool {
	if c == nil || !a.own(c) || c.NotAfter.Sub(a.cfg.Clock.Now()) < authorityLeft || c.NotBefore.After(a.cfg.Clock.Now()) {
		return false
	}
	for _, n := range a.cfg.Names {
		if !slices.ContainsFunc(c.PermittedDNSDomains, func(p string) bool { return n == p || strings.HasSuffix(n, "."+p) }) {
			return false
		}
	}
	for _, ip := range a.cfg.Addrs {
		if !slices.ContainsFunc(c.PermittedIPRanges, func(p *net.IPNet) bool { return p.Contains(ip.AsSlice()) }) {
			return false
		}
	}
	return true
}

func (a *Authority) own(c *x509.Certificate) bool {
	pub, ok := a.key.Public().(interface{ Equal(x crypto.PublicKey) bool })
	return ok && pub.Equal(c.PublicKey)
}

// issue makes the authority's certificate, for what the old one covers too if it is of the same key.
func (a *Authority) issue(old *x509.Certificate) error {
	names, ranges := slices.Clone(a.cfg.Names), hostRanges(a.cfg.Addrs)
	renewed := old != nil && a.own(old)
	if renewed {
		names = append(names, old.PermittedDNSDomains...)
		ranges = append(ranges, old.PermittedIPRanges...)
	}
	slices.Sort(names)
	slices.SortFunc(ranges, func(x, y *net.IPNet) int { return strings.Compare(x.String(), y.String()) })
	pub, err := x509.MarshalPKIXPublicKey(a.key.Public())
	if err != nil {
		return fmt.Errorf("encode key: %w", err)
	}
	keyID := sha256.Sum256(pub)
	t := a.template(authorityLife)
	// Of the key alone, so that a certificate with more names takes the place of an older one.
	t.Subject = pkix.Name{Organization: []string{"Casemate"}, CommonName: "Casemate server " + hex.EncodeToString(keyID[:4])}
	t.IsCA, t.BasicConstraintsValid, t.MaxPathLenZero = true, true, true
	t.KeyUsage = x509.KeyUsageCertSign
	t.SubjectKeyId = keyID[:20]
	t.PermittedDNSDomainsCritical = true
	t.PermittedDNSDomains = slices.Compact(names)
	t.PermittedIPRanges = slices.CompactFunc(ranges, func(x, y *net.IPNet) bool { return x.String() == y.String() })
	der, err := x509.CreateCertificate(rand.Reader, t, t, a.key.Public(), a.key)
	if err != nil {
		return fmt.Errorf("make the authority's certificate: %w", err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		return fmt.Errorf("read the new certificate: %w", err)
	}
	if err := policy.WriteSecret(filepath.Join(a.cfg.Dir, CertFile), strings.TrimSpace(string(a.PEM()))); err != nil {
		return fmt.Errorf("write the authority's certificate: %w", err)
	}
	text := "made a certificate authority for this server; `casemate ca` tells how to trust it"
	if renewed {
		text = "the server's certificate authority has a new certificate, for more names or for longer; `casemate ca` prints it"
	}
	a.cfg.Log.Info(text, slog.String("sha256", a.Fingerprint()), slog.Any("names", t.PermittedDNSDomains))
	return nil
}

// template is what all certificates share.
func (a *Authority) template(life time.Duration) *x509.Certificate {
	serial := make([]byte, 16)
	_, _ = rand.Read(serial) // never fails: crypto/rand.Read
	now := a.cfg.Clock.Now()
	return &x509.Certificate{
		SerialNumber: new(big.Int).SetBytes(serial), NotBefore: now.Add(-backdated), NotAfter: now.Add(life),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
}

// hostRanges turns addresses into ranges that hold one each.
func hostRanges(addrs []netip.Addr) []*net.IPNet {
	out := make([]*net.IPNet, 0, len(addrs))
	for _, ip := range addrs {
		ip = ip.Unmap()
		out = append(out, &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ip.BitLen(), ip.BitLen())})
	}
	return out
}

// PEM returns the authority's certificate, which is no secret.
func (a *Authority) PEM() []byte {
	var b bytes.Buffer
	_ = pem.Encode(&b, &pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw}) // into memory: can't fail
	return b.Bytes()
}

// Fingerprint returns the SHA-256 of the authority's certificate as browsers and openssl show it, without
// colons and in lower case.
func (a *Authority) Fingerprint() string {
	sum := sha256.Sum256(a.cert.Raw)
	return hex.EncodeToString(sum[:])
}

// Names returns what the authority may vouch for: names, each with all below it, and addresses.
func (a *Authority) Names() []string {
	out := slices.Clone(a.cert.PermittedDNSDomains)
	for _, r := range a.cert.PermittedIPRanges {
		out = append(out, r.IP.String())
	}
	return out
}

// NotAfter is when the authority's certificate ends.
func (a *Authority) NotAfter() time.Time { return a.cert.NotAfter }
