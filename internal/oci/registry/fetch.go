package registry

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"casemate.dev/internal/errs"
)

// MaxManifest bounds a manifest, an index and an image's configuration (distribution-spec recommends 4 MiB).
const MaxManifest = 4 << 20

// accepted are the manifests that are understood.
func accepted() string {
	var all []string
	for _, t := range []types.MediaType{types.OCIManifestSchema1, types.OCIImageIndex, types.DockerManifestSchema2, types.DockerManifestList} {
		all = append(all, string(t))
	}
	return strings.Join(all, ", ")
}

// Manifest fetches a manifest or an index by what the name says, its digest before its tag, and returns its type
// and its bytes. The digest is checked where the name has one.
func (r *Repo) Manifest(ctx context.Context) (types.MediaType, []byte, error) {
	if r.ref.digest != "" {
		h, err := v1.NewHash(r.ref.digest)
		if err != nil {
			return "", nil, err
		}
		return r.manifest(ctx, r.ref.digest, &h)
	}
	return r.manifest(ctx, r.ref.tag, nil)
}

// ManifestOf fetches the manifest that an index lists.
func (r *Repo) ManifestOf(ctx context.Context, d v1.Descriptor) ([]byte, error) {
	_, data, err := r.manifest(ctx, d.Digest.String(), &d.Digest)
	if err == nil && int64(len(data)) != d.Size {
		err = errs.New(errs.Unavailable, "the registry's manifest %s has %d bytes instead of %d", d.Digest, len(data), d.Size)
	}
	return data, err
}

func (r *Repo) manifest(ctx context.Context, what string, want *v1.Hash) (kind types.MediaType, data []byte, err error) {
	err = r.c.again(ctx, func() error {
		kind, data, err = r.get(ctx, r.base+"/manifests/"+what, MaxManifest)
		return err
	})
	if err != nil {
		return "", nil, told(err, "fetch the manifest of %s", r.ref)
	}
	if want != nil {
		if sum := sha256.Sum256(data); want.Algorithm != "sha256" || hex.EncodeToString(sum[:]) != want.Hex {
			return "", nil, errs.New(errs.Unavailable, "the registry's manifest of %s is not the one of digest %s", r.ref, want)
		}
	}
	if kind == "" || !json.Valid(data) {
		return "", nil, errs.New(errs.Unavailable, "the registry's manifest of %s is no JSON", r.ref)
	}
	return kind, data, nil
}

// get fetches something small.
func (r *Repo) get(ctx context.Context, url string, limit int64) (types.MediaType, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", nil, err
	}
	req.Header.Set("Accept", accepted())
	resp, err := r.http.Do(req)
	if err != nil {
		return "", nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return "", nil, newStatus("GET", resp)
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err != nil {
		return "", nil, err
	}
	if int64(len(data)) > limit {
		return "", nil, errs.New(errs.TooLarge, "the registry's answer is larger than %d MB", limit>>20)
	}
	kind, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	return types.MediaType(strings.TrimSpace(kind)), data, nil
}

var (
	errStalled = errors.New("no bytes came for too long")
	errCut     = errors.New("the connection ended before the blob did")
)

// Fetch writes a blob to out, an open file, which may hold a beginning of it from an earlier time. It goes on
// where a connection broke, and gives up after a few tries that brought nothing. Its size and digest are
// right when it returns nil; done counts the bytes that are there.
func (r *Repo) Fetch(ctx context.Context, d v1.Descriptor, out *os.File, done *atomic.Int64) error {
	if d.Digest.Algorithm != "sha256" {
		return errs.New(errs.Unsupported, "the image has a digest of the unknown kind %q", d.Digest.Algorithm)
	}
	f := &fetch{r: r, want: d, out: out, done: done}
	if err := f.begin(); err != nil {
		return err
	}
	resumed := f.at > 0
	best := f.at // progress is what was never there before: a registry may cut every answer at the same place
	for failed := 0; ; {
		err := f.attempt(ctx)
		if err == nil {
			if err = f.check(); err == nil || !resumed {
				return err
			}
			// What was there may have been damaged by a crash: once more, from the beginning.
			resumed = false
			if err := f.restart(); err != nil {
				return err
			}
			continue
		}
		if failed++; f.at > best {
			failed, best = 0, f.at
		}
		if ctx.Err() != nil || failed >= tries || !passing(err) {
			return told(err, "fetch %s of %s", d.Digest, r.ref)
		}
		if err := r.c.pause(ctx, failed, err); err != nil {
			return err
		}
	}
}

// fetch is one blob on its way.
type fetch struct {
	r    *Repo
	want v1.Descriptor
	out  *os.File
	done *atomic.Int64
	sum  hash.Hash
	at   int64
}

// begin takes up what the file holds.
func (f *fetch) begin() error {
	f.sum = sha256.New()
	st, err := f.out.Stat()
	if err != nil {
		return err
	}
	if st.Size() > f.want.Size {
		return f.restart()
	}
	if f.at, err = io.Copy(f.sum, io.NewSectionReader(f.out, 0, st.Size())); err != nil {
		return err
	}
	f.done.Store(f.at)
	return nil
}

func (f *fetch) restart() error {
	f.sum, f.at = sha256.New(), 0
	f.done.Store(0)
	return f.out.Truncate(0)
}

func (f *fetch) check() error {
	if got := hex.EncodeToString(f.sum.Sum(nil)); got != f.want.Digest.Hex {
		if err := f.restart(); err != nil {
			return err
		}
		return errs.New(errs.Unavailable, "the registry sent other bytes than %s: they have the digest sha256:%s", f.want.Digest, got)
	}
	return nil
}

// attempt fetches what is missing over one connection.
func (f *fetch) attempt(ctx context.Context) error {
	if f.at == f.want.Size {
		return nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.r.base+"/blobs/"+f.want.Digest.String(), nil)
	if err != nil {
		return err
	}
	if f.at > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", f.at, f.want.Size-1))
	}
	resp, err := f.r.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusPartialContent && f.at > 0:
		if !strings.HasPrefix(resp.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", f.at)) {
			return errors.Join(f.restart(), errCut) // it sends another part than it was asked for
		}
	case resp.StatusCode == http.StatusOK: // all of it
		if err := f.restart(); err != nil {
			return err
		}
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		return errors.Join(f.restart(), errCut)
	default:
		return newStatus("GET", resp)
	}
	if err := f.copy(resp.Body, cancel); !errors.Is(err, errCut) || resp.ContentLength < 0 {
		return err
	}
	// All that was announced has come.
	return errs.New(errs.Unavailable, "the registry has only %d bytes of %s, and its manifest says %d", f.at, f.want.Digest, f.want.Size)
}

// copy writes a body to the file, and gives up on one that says nothing any more.
func (f *fetch) copy(body io.Reader, cancel context.CancelCauseFunc) error {
	stalled := time.AfterFunc(f.r.c.cfg.Stall, func() { cancel(errStalled) })
	defer stalled.Stop()
	buf := make([]byte, 256<<10)
	for {
		n, err := body.Read(buf)
		if n > 0 {
			stalled.Reset(f.r.c.cfg.Stall)
			if f.at+int64(n) > f.want.Size {
				return errs.New(errs.Unavailable, "the registry sends more than the %d bytes that %s has", f.want.Size, f.want.Digest)
			}
			if _, err := f.out.WriteAt(buf[:n], f.at); err != nil {
				return errs.Wrap(err, errs.ResourceExhausted, "the blob can't be written").WithHint("make room in the server's data directory")
			}
			f.sum.Write(buf[:n])
			f.at += int64(n)
			f.done.Store(f.at)
		}
		switch {
		case errors.Is(err, io.EOF) && f.at < f.want.Size:
			return errCut
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && !stalled.Stop() && errors.Is(err, context.Canceled):
			return errStalled
		case err != nil:
			return err
		}
	}
}
