package envd

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/httpfile"
	"casemate.dev/internal/sandbox"
)

// written is one file in the answer to an upload.
type written struct {
	Path     string            `json:"path"`
	Name     string            `json:"name"`
	Type     string            `json:"type"`
	Metadata map[string]string `json:"metadata,omitempty"`
}

// upload serves POST of /files.
func (h *Handler) upload(w http.ResponseWriter, r *http.Request, c *call) error {
	body := httpfile.NewBody(r.Body)
	up := &uploading{h: h, c: c, path: r.URL.Query().Get("path"), body: body}
	var err error
	if up.fs, up.base, err = h.plainFile(r.Context(), c, r); err == nil {
		err = up.receive(r)
	}
	if err != nil {
		drain(w, body)
		return err
	}
	writeJSON(w, up.files)
	return nil
}

const (
	// drainTime and drainBytes bound what is still read of an upload that is refused. Without that,
	// clients see a broken connection instead of the answer.
	drainTime  = 10 * time.Second
	drainBytes = 1 << 30
)

func drain(w http.ResponseWriter, body *httpfile.Body) {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(drainTime))
	_, _ = io.CopyN(io.Discard, body, drainBytes)
}

// uploading is one upload of files.
type uploading struct {
	h        *Handler
	c        *call
	fs       *sandbox.Files
	base     sandbox.PathRequest
	path     string // of the query; "" where each part names its own
	body     *httpfile.Body
	metadata map[string]string
	files    []written
	paths    []string
}

// receive writes what a request's body holds.
func (u *uploading) receive(r *http.Request) error {
	var err error
	if u.metadata, err = metadataOf(r.Header); err != nil {
		return err
	}
	var in io.Reader = u.body
	switch enc := r.Header.Get("Content-Encoding"); enc {
	case "", "identity":
	case "gzip":
		if in, err = gzip.NewReader(u.body); err != nil {
			return statusf(http.StatusBadRequest, "error reading the gzip body: %v", err)
		}
	default:
		return statusf(http.StatusBadRequest, "unsupported Content-Encoding: %s, supported: gzip, identity", enc)
	}
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case err == nil && kind == "multipart/form-data" && params["boundary"] != "":
		return u.parts(r.Context(), multipart.NewReader(in, params["boundary"]))
	case err == nil && kind == "application/octet-stream":
		if u.path == "" {
			return statusf(http.StatusBadRequest, "an upload of type application/octet-stream needs the query parameter path")
		}
		return u.write(r.Context(), u.path, in)
	}
	return statusf(http.StatusBadRequest, "unsupported content type: %s, expected multipart/form-data or application/octet-stream",
		r.Header.Get("Content-Type"))
}

// parts writes the files of a form. Fields that are no file are skipped.
func (u *uploading) parts(ctx context.Context, form *multipart.Reader) error {
	u.files = []written{}
	for {
		part, err := form.NextRawPart()
		if err == io.EOF { //nolint:errorlint // a form that breaks off wraps it
			return nil
		}
		if err != nil {
			return statusf(http.StatusBadRequest, "error parsing multipart form: %v", err)
		}
		if part.FormName() != "file" {
			continue
		}
		p := u.path
		if p == "" {
			// Part.FileName would cut the name to its last element, but it is the path.
			_, params, _ := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			p = params["filename"]
		}
		if p == "" {
			return statusf(http.StatusBadRequest, "a file of the upload has no path")
		}
		if err := u.write(ctx, p, part); err != nil {
			return err
		}
	}
}

// write writes one file in place, so that watchers of it see what they would see of any program.
func (u *uploading) write(ctx context.Context, p string, in io.Reader) error {
	r := u.base
	r.Path = p
	if key := path.Clean(shown(r)); slices.Contains(u.paths, key) {
		return statusf(http.StatusBadRequest, "you cannot upload multiple files to the same path '%s' in one upload request,"+
			" only the first specified file was uploaded", shown(r))
	} else {
		u.paths = append(u.paths, key)
	}
	f, err := u.fs.Write(ctx, sandbox.WriteRequest{
		PathRequest: r, Offset: -1, Size: -1, Parents: true, InPlace: true, SetAttributes: u.metadata,
	}, in)
	switch {
	case err == nil:
	case u.body.Err() != nil:
		return errs.Wrap(errors.Join(u.body.Err(), err), errs.InvalidArgument, "the request's body broke off")
	case errors.Is(err, gzip.ErrChecksum), errors.Is(err, gzip.ErrHeader), errors.Is(err, io.ErrUnexpectedEOF):
		return errs.Wrap(err, errs.InvalidArgument, "the request's body is damaged")
	case errs.Is(err, errs.ResourceExhausted):
		return statusf(http.StatusInsufficientStorage, "not enough disk space available")
	case errs.Is(err, errs.InvalidArgument), errs.Is(err, errs.FailedPrecondition):
		if f, serr := u.fs.Stat(ctx, r); serr == nil && f.Type == "dir" {
			return statusf(http.StatusBadRequest, "path is a directory: %s", shown(r))
		}
		return err
	default:
		return u.h.fileError(ctx, u.c, nil, r, err)
	}
	u.files = append(u.files, written{Path: f.Path, Name: f.Name, Type: "file", Metadata: f.Attributes})
	return nil
}

const (
	headerMetadata = "X-Metadata-"
	// maxMetadataKey is what the kernel leaves of an attribute's name (XATTR_NAME_MAX) beside the prefix.
	maxMetadataKey = 255 - len(metadataPrefix)
	maxMetadata    = 4096
)

// metadataOf returns the metadata that a request's headers give to the files of an upload.
func metadataOf(h http.Header) (map[string]string, error) {
	var m map[string]string
	size := 0
	for name, values := range h {
		key, ok := strings.CutPrefix(name, headerMetadata)
		if !ok {
			continue
		}
		key = strings.ToLower(key)
		value := values[0]
		if key == "" || len(key) > maxMetadataKey {
			return nil, statusf(http.StatusBadRequest, "invalid metadata: a key has 1 to %d bytes, not %d", maxMetadataKey, len(key))
		}
		if strings.ContainsFunc(key+value, func(c rune) bool { return c < 0x20 || c > 0x7e }) {
			return nil, statusf(http.StatusBadRequest, "invalid metadata: %q holds more than printable ASCII", key)
		}
		if size += len(key) + len(value); size > maxMetadata {
			return nil, statusf(http.StatusBadRequest, "invalid metadata: more than %d bytes", maxMetadata)
		}
		if m == nil {
			m = make(map[string]string)
		}
		m[key] = value
	}
	return m, nil
}

// composition is the body of a request to join files.
type composition struct {
	Sources     []string `json:"source_paths"`
	Destination string   `json:"destination"`
	Username    string   `json:"username"`
}

const (
	maxComposition = 1 << 20
	maxSources     = 10_000
)

// compose serves POST of /files/compose: it joins files into one and removes them.
func (h *Handler) compose(w http.ResponseWriter, r *http.Request, c *call) error {
	var what composition
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxComposition))
	if err == nil {
		err = json.Unmarshal(body, &what)
	}
	if err != nil {
		return statusf(http.StatusBadRequest, "error parsing request body: %v", err)
	}
	if len(what.Sources) == 0 || len(what.Sources) > maxSources || what.Destination == "" {
		return statusf(http.StatusBadRequest, "a composition needs 1 to %d source_paths and a destination", maxSources)
	}
	fs, base, err := h.plainFile(r.Context(), c, r)
	if err != nil {
		return err
	}
	if what.Username != "" {
		c.user, base.User = what.Username, what.Username
	}
	f, at, err := join(r.Context(), fs, base, what)
	if err != nil {
		if errs.Is(err, errs.ResourceExhausted) {
			return statusf(http.StatusInsufficientStorage, "not enough disk space available")
		}
		return h.fileError(r.Context(), c, fs, at, err)
	}
	writeJSON(w, written{Path: f.Path, Name: f.Name, Type: "file", Metadata: f.Attributes})
	return nil
}

// join writes the sources, one behind the other, to the destination, which is there whole or not at all,
// and removes them. It also returns the path that an error is about.
func join(ctx context.Context, fs *sandbox.Files, base sandbox.PathRequest, what composition) (sandbox.FileInfo, sandbox.PathRequest, error) {
	dst := base
	dst.Path = what.Destination
	pr, pw := io.Pipe()
	at := make(chan sandbox.PathRequest, 1)
	go func() {
		for _, p := range what.Sources {
			src := base
			src.Path = p
			_, err := fs.Read(ctx, sandbox.ReadRequest{PathRequest: src, Length: -1}, func(sandbox.FileInfo) error { return nil }, pw)
			if err != nil {
				at <- src
				_ = pw.CloseWithError(err)
				return
			}
		}
		at <- dst
		_ = pw.Close()
	}()
	f, err := fs.Write(ctx, sandbox.WriteRequest{PathRequest: dst, Offset: -1, Size: -1, Parents: true}, pr)
	_ = pr.CloseWithError(err) // a reader of sources must not wait for a writer that has gone
	if err != nil {
		return f, <-at, err
	}
	for _, p := range what.Sources {
		src := base
		src.Path = p
		if path.Clean(shown(src)) == path.Clean(shown(dst)) {
			continue
		}
		if err := fs.Remove(ctx, sandbox.RemoveRequest{PathRequest: src}); err != nil {
			return f, src, err
		}
	}
	return f, dst, nil
}
