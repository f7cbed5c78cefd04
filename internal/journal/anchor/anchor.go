// Package anchor puts the journal's checkpoints where the server can't take them back: into a file, say on a disk that only
// appends or of another machine, or to a URL. Held against them, a record that was rewritten later shows.
//
// What belongs here: which checkpoints go where and when, and reading them back. What does not: making them and holding a
// record against them, which packages journal and bundle do.
package anchor

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/durable"
	"casemate.dev/internal/errs"
)

// DefaultEvery is how often a checkpoint goes out, where there is a new one.
const DefaultEvery = 10 * time.Minute

// requestTimeout bounds one request that sends, and readTimeout one that reads.
const (
	requestTimeout = 10 * time.Second
	readTimeout    = time.Minute
)

// Config says what goes where.
type Config struct {
	// Places are absolute paths of files, to which each checkpoint is appended as a line of base64, and URLs, to which it is
	// posted as it is (text/plain).
	Places []string
	// Every is how often; 0: DefaultEvery.
	Every time.Duration
	// Checkpoint returns the newest checkpoint.
	Checkpoint func() ([]byte, error)
	// Log hears about places that take nothing; nil: nobody.
	Log *slog.Logger
}

// Anchors sends checkpoints out until it is closed.
type Anchors struct {
	cfg     Config
	sent    [][]byte // the newest that each place took; of the loop alone
	stopped chan struct{}
	loop    sync.WaitGroup
	closing sync.Once
}

// Check reports a place that is none. InvalidArgument.
func Check(place string) error {
	if isURL(place) {
		u, err := url.Parse(place)
		if err != nil || u.Host == "" {
			return errs.New(errs.InvalidArgument, "the anchor %q is no URL", place).WithHint("as https://example.com/checkpoints")
		}
		return nil
	}
	if !filepath.IsAbs(place) {
		return errs.New(errs.InvalidArgument, "the anchor %q is neither an absolute path nor a URL of http or https", place)
	}
	return nil
}

func isURL(place string) bool {
	return strings.HasPrefix(place, "http://") || strings.HasPrefix(place, "https://")
}

// Start begins to send. A place that takes nothing is told of in the log and tried again; it holds nobody up.
func Start(cfg Config) (*Anchors, error) {
	if cfg.Every <= 0 {
		cfg.Every = DefaultEvery
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	for _, p := range cfg.Places {
		if err := Check(p); err != nil {
			return nil, err
		}
	}
	a := &Anchors{cfg: cfg, sent: make([][]byte, len(cfg.Places)), stopped: make(chan struct{})}
	if len(cfg.Places) > 0 {
		a.loop.Go(a.run)
	}
	return a, nil
}

// Close sends the newest checkpoint and ends. Call it before the journal is closed. Idempotent.
func (a *Anchors) Close() {
	a.closing.Do(func() { close(a.stopped) })
	a.loop.Wait()
}

func (a *Anchors) run() {
	t := time.NewTicker(a.cfg.Every)
	defer t.Stop()
	for {
		a.send()
		select {
		case <-t.C:
		case <-a.stopped:
			a.send()
			return
		}
	}
}

// send gives the newest checkpoint to each place that has not got it.
func (a *Anchors) send() {
	note, err := a.cfg.Checkpoint()
	if err != nil {
		a.cfg.Log.Warn("cannot anchor the journal: no checkpoint", "error", err)
		return
	}
	for i, place := range a.cfg.Places {
		if bytes.Equal(note, a.sent[i]) {
			continue
		}
		if err := put(place, note); err != nil {
			a.cfg.Log.Warn("cannot anchor the journal", "place", shown(place), "error", err)
			continue
		}
		a.sent[i] = note
	}
}

// shown is a place without what may be a credential.
func shown(place string) string {
	u, err := url.Parse(place)
	if err != nil || !isURL(place) {
		return place
	}
	return u.Scheme + "://" + u.Host + u.Path
}

func put(place string, note []byte) error {
	if isURL(place) {
		return post(place, note)
	}
	_, err := os.Stat(place)
	fresh := errors.Is(err, os.ErrNotExist)
	f, err := os.OpenFile(place, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	line := base64.StdEncoding.EncodeToString(note) + "\n"
	if torn(place) {
		line = "\n" + line
	}
	_, err = f.WriteString(line)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil && fresh {
		err = durable.SyncDir(filepath.Dir(place))
	}
	return err
}

// torn reports whether a file ends within a line, as a full disk or a loss of power leaves it: what comes next begins another.
func torn(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		return false
	}
	last := make([]byte, 1)
	_, err = f.ReadAt(last, info.Size()-1)
	return err == nil && last[0] != '\n'
}

func post(place string, note []byte) error {
	req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, place, bytes.NewReader(note))
	if err != nil {
		return errors.New("the URL is malformed")
	}
	req.Header.Set("Content-Type", "text/plain; charset=utf-8")
	resp, err := (&http.Client{Timeout: requestTimeout}).Do(req)
	if err != nil {
		return fmt.Errorf("post: %w", withoutURL(err))
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // so that the connection can be kept
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return fmt.Errorf("it answers %s", resp.Status)
	}
	return nil
}
