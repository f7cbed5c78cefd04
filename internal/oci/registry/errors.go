package registry

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"casemate.dev/internal/errs"
)

// statusError is an answer that was not wanted.
type statusError struct {
	code  int
	after time.Duration // that the registry asks to wait
	what  string
}

// Error implements error.
func (e *statusError) Error() string {
	return fmt.Sprintf("%s: the registry answers %d %s", e.what, e.code, http.StatusText(e.code))
}

// maxWait bounds what a registry can ask to wait.
const maxWait = time.Minute

func newStatus(what string, resp *http.Response) error {
	e := &statusError{code: resp.StatusCode, what: what}
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 {
		e.after = min(time.Duration(s)*time.Second, maxWait)
	}
	return e
}

// status returns the HTTP status in an error; 0: there is none.
func status(err error) int {
	var own *statusError
	var theirs *transport.Error
	switch {
	case errors.As(err, &own):
		return own.code
	case errors.As(err, &theirs):
		return theirs.StatusCode
	}
	return 0
}

// passing reports whether an error may be gone at the next try.
func passing(err error) bool {
	if errs.KindOf(err) != errs.Internal {
		return false // ours, and said for good
	}
	switch code := status(err); {
	case code == http.StatusRequestTimeout, code == http.StatusTooManyRequests, code >= 500 && code != http.StatusNotImplemented:
		return true
	case code != 0:
		return false
	}
	var name *net.DNSError
	if errors.As(err, &name) && name.IsNotFound {
		return false
	}
	var unknown x509.UnknownAuthorityError
	var host x509.HostnameError
	var bad x509.CertificateInvalidError
	if errors.As(err, &unknown) || errors.As(err, &host) || errors.As(err, &bad) {
		return false
	}
	var network net.Error
	return errors.As(err, &network) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) ||
		errors.Is(err, errStalled) || errors.Is(err, errCut)
}

// tries is how often in a row something is tried that gets nowhere.
const tries = 5

// again calls f until it succeeds, fails for good, or has failed tries times.
func (c *Client) again(ctx context.Context, f func() error) error {
	for n := 0; ; n++ {
		err := f()
		if err == nil || n+1 >= tries || ctx.Err() != nil || !passing(err) {
			return err
		}
		if err := c.pause(ctx, n, err); err != nil {
			return err
		}
	}
}

// pause waits before a further try: as long as the registry asks for, else twice as long each time, and never the
// same for everybody.
func (c *Client) pause(ctx context.Context, n int, err error) error {
	wait := c.cfg.Backoff << min(n, 6)
	wait = wait/2 + rand.N(wait/2+1)
	var s *statusError
	if errors.As(err, &s) && s.after > 0 {
		wait = s.after
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// told gives an error of a registry the kind and the words that people need.
func told(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	var unknown x509.UnknownAuthorityError
	var host x509.HostnameError
	certificate := errors.As(err, &unknown) || errors.As(err, &host)
	if errs.KindOf(err) != errs.Internal && !certificate {
		return fmt.Errorf("%s: %w", what, err)
	}
	switch code := status(err); {
	case code == http.StatusUnauthorized:
		return errs.Wrap(err, errs.Unauthenticated, "cannot %s: it wants other credentials, or there is no such image", what).
			WithHint("name a secret with USER:PASSWORD in it: --secret NAME; or casemate serve --docker-config FILE")
	case code == http.StatusForbidden:
		return errs.Wrap(err, errs.PermissionDenied, "cannot %s: these credentials may not do that", what)
	case code == http.StatusNotFound:
		return errs.Wrap(err, errs.NotFound, "cannot %s: there is none of that name", what)
	case code == http.StatusTooManyRequests:
		return errs.Wrap(err, errs.ResourceExhausted, "cannot %s: the registry allows no more requests for now", what).
			WithHint("wait, or use credentials: registries allow those who sign in more")
	case code != 0:
		return errs.Wrap(err, errs.Unavailable, "cannot %s: the registry answers %d %s", what, code, http.StatusText(code))
	case certificate:
		return errs.Wrap(err, errs.Unavailable, "cannot %s: its certificate is not valid for that name, or of an authority that this server does not know", what).
			WithHint("casemate serve --extra-ca FILE names further authorities")
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	var name *net.DNSError
	if errors.As(err, &name) {
		return errs.Wrap(err, errs.Unavailable, "cannot %s: the name %s can't be looked up", what, name.Name)
	}
	return errs.Wrap(err, errs.Unavailable, "cannot %s: the connection does not come about, or breaks", what)
}
