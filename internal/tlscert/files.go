package tlscert

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"casemate.dev/internal/clock"
)

// lookAgain is how often files are looked at for a change.
const lookAgain = 10 * time.Second

// Files is a certificate that somebody gave the server, and whoever renews it writes anew.
type Files struct {
	cert, key string
	clock     clock.Clock
	log       *slog.Logger

	// mu guards the fields below.
	mu      sync.Mutex
	now     *tls.Certificate
	changed [2]time.Time // when the files were written that now came from
	next    time.Time    // when to look again
}

// OpenFiles reads a certificate, with the chain that follows it, and its key, both in PEM. clk nil is the
// system's clock; log nil is none.
func OpenFiles(cert, key string, clk clock.Clock, log *slog.Logger) (*Files, error) {
	if clk == nil {
		clk = clock.New()
	}
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	f := &Files{cert: cert, key: key, clock: clk, log: log}
	return f, f.read()
}

// read takes the files as they are now. On error what was read before stays.
func (f *Files) read() error {
	f.next = f.clock.Now().Add(lookAgain)
	var at [2]time.Time
	for i, path := range []string{f.cert, f.key} {
		info, err := os.Stat(path)
		if err != nil {
			return fmt.Errorf("look at the certificate: %w", err)
		}
		at[i] = info.ModTime()
	}
	if f.now != nil && at == f.changed {
		return nil
	}
	c, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return fmt.Errorf("load the certificate of %s: %w", f.cert, err)
	}
	f.now, f.changed = &c, at
	return nil
}

// Certificate returns the certificate as the files have it, at most a few seconds late; it is for
// tls.Config.GetCertificate. While the files are damaged, as between two writes, the last good one serves.
func (f *Files) Certificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.clock.Now().After(f.next) {
		if err := f.read(); err != nil {
			f.log.Warn("the certificate can't be read anew; the last one still serves", slog.String("cause", err.Error()))
		}
	}
	return f.now, nil
}

// Covers reports whether the certificate is for a name.
func (f *Files) Covers(name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.now.Leaf.VerifyHostname(name) == nil
}
