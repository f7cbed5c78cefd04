package envd

import (
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/httpfile"
	"casemate.dev/internal/sandbox"
)

// plainFile returns access to a sandbox's files, and a request for the file that a query names. The
// user of the query goes before that of the header.
func (h *Handler) plainFile(ctx context.Context, c *call, r *http.Request) (*sandbox.Files, sandbox.PathRequest, error) {
	q := r.URL.Query()
	if u := q.Get("username"); u != "" {
		c.user = u
	}
	fs, err := h.m.Files(ctx, c.p, c.sandbox)
	if err != nil {
		return nil, sandbox.PathRequest{}, err
	}
	req, err := h.pathRequest(ctx, c, q.Get("path"), true)
	return fs, req, err
}

// fileError says what went wrong with a file over plain HTTP.
func (h *Handler) fileError(ctx context.Context, c *call, fs *sandbox.Files, r sandbox.PathRequest, err error) error {
	switch {
	case h.unknownUser(ctx, c, err):
		return statusf(http.StatusUnauthorized, "error looking up user '%s': user: unknown user %s", c.user, c.user)
	case errs.Is(err, errs.NotFound):
		return statusf(http.StatusNotFound, "path '%s' does not exist", shown(r))
	case fs == nil, !errs.Is(err, errs.InvalidArgument) && !errs.Is(err, errs.FailedPrecondition):
		return err
	}
	f, serr := fs.Stat(ctx, r)
	switch {
	case serr != nil || f.Type == "file":
		return err
	case f.Type == "dir":
		return statusf(http.StatusBadRequest, "path '%s' is a directory", f.Path)
	}
	return statusf(http.StatusBadRequest, "path '%s' is not a regular file", shown(r))
}

// download serves GET and HEAD of /files.
func (h *Handler) download(w http.ResponseWriter, r *http.Request, c *call) error {
	ctx := r.Context()
	fs, req, err := h.plainFile(ctx, c, r)
	if err != nil {
		return err
	}
	d := &downloading{w: w, r: r, head: r.Method == http.MethodHead}
	if err := d.encode(r.Header.Get("Accept-Encoding")); err != nil {
		return err
	}
	read := sandbox.ReadRequest{PathRequest: req, Length: -1}
	read.Resolve, read.Attributes = false, ""
	want, ranged := httpfile.ParseRange(r.Header.Get("Range"))
	if ranged || d.head || r.Header.Get("If-Modified-Since") != "" || r.Header.Get("If-Unmodified-Since") != "" {
		// These need the file's size or time before its bytes.
		f, err := fs.Stat(ctx, read.PathRequest)
		if err != nil {
			return h.fileError(ctx, c, fs, read.PathRequest, err)
		}
		if done := d.answered(f, want, ranged); done {
			return nil
		}
		if d.ranged {
			read.Offset, read.Length = d.offset, d.length
		}
		if d.head {
			read.Length = 0
		}
	}
	_, err = fs.Read(ctx, read, d.begin, d)
	if err == nil {
		err = d.finish()
	}
	if err != nil && d.written {
		cutOff() // the status is out: only a cut connection can tell
	}
	return h.fileError(ctx, c, fs, read.PathRequest, err)
}

// downloading is the answer to one GET. It is the writer that the file's bytes go to: the head is
// written with the first of them, by which the type of the file is told.
type downloading struct {
	w    http.ResponseWriter
	r    *http.Request
	f    sandbox.FileInfo
	head bool
	gzip *gzip.Writer // nil: as it is

	ranged         bool
	offset, length int64
	written        bool
}

// encode chooses the encoding. Only who asks for gzip and for nothing else gets it: HTTP clients that
// offer it unasked would pay for compression that nobody needs on the way.
func (d *downloading) encode(accept string) error {
	d.w.Header().Set("Vary", "Accept-Encoding")
	gzipped, others, identity := false, false, true
	for part := range strings.SplitSeq(accept, ",") {
		name, weight, _ := strings.Cut(strings.TrimSpace(part), ";")
		weight = strings.ReplaceAll(weight, " ", "")
		off := strings.HasPrefix(weight, "q=0") && strings.Trim(weight[3:], ".0") == ""
		switch {
		case name == "gzip":
			gzipped = !off
		case name == "identity" || name == "*":
			identity = identity && !off
		case name != "":
			others = true
		}
	}
	if !identity && !gzipped {
		return statusf(http.StatusNotAcceptable, "no acceptable encoding found, supported: identity, gzip")
	}
	if gzipped && (!others || !identity) && d.r.Header.Get("Range") == "" {
		d.gzip, _ = gzip.NewWriterLevel(d.w, gzip.BestSpeed) // a level that there is
	}
	return nil
}

// answered gives the answers that need no bytes, and reports whether it did.
func (d *downloading) answered(f sandbox.FileInfo, want httpfile.Range, ranged bool) bool {
	modified := time.Unix(0, f.MTime).Truncate(time.Second)
	if f.Type != "file" {
		return false // the read says what is wrong
	}
	if since, err := http.ParseTime(d.r.Header.Get("If-Unmodified-Since")); err == nil && modified.After(since) {
		WriteError(d.w, http.StatusPreconditionFailed, "the file was written at "+modified.UTC().Format(http.TimeFormat))
		return true
	}
	if since, err := http.ParseTime(d.r.Header.Get("If-Modified-Since")); err == nil && !modified.After(since) {
		d.w.WriteHeader(http.StatusNotModified)
		return true
	}
	if ranged && f.Size > 0 && fresh(d.r.Header.Get("If-Range"), modified) {
		ok := false
		if d.offset, d.length, ok = want.Within(f.Size); !ok {
			d.w.Header().Set("Content-Range", "bytes */"+strconv.FormatInt(f.Size, 10))
			WriteError(d.w, http.StatusRequestedRangeNotSatisfiable, "the file has only "+strconv.FormatInt(f.Size, 10)+" bytes")
			return true
		}
		d.ranged = true
	}
	return false
}

// fresh reports whether an If-Range header, which may be missing, allows a part of a file.
func fresh(header string, modified time.Time) bool {
	if header == "" {
		return true
	}
	at, err := http.ParseTime(header)
	return err == nil && at.Equal(modified)
}

// begin learns what is read.
func (d *downloading) begin(f sandbox.FileInfo) error {
	d.f = f
	return nil
}

// Write implements io.Writer.
func (d *downloading) Write(p []byte) (int, error) {
	if !d.written {
		d.writeHead(p)
	}
	if d.gzip != nil {
		return d.gzip.Write(p)
	}
	return d.w.Write(p)
}

// finish ends the answer.
func (d *downloading) finish() error {
	if !d.written {
		d.writeHead(nil)
	}
	if d.gzip != nil {
		return d.gzip.Close()
	}
	return nil
}

// writeHead writes status and header; first are the file's first bytes.
func (d *downloading) writeHead(first []byte) {
	d.written = true
	h := d.w.Header()
	name := path.Base(d.f.Path)
	kind := mime.TypeByExtension(path.Ext(name))
	switch {
	case kind != "":
	case d.offset == 0 && !d.head:
		kind = http.DetectContentType(first)
	default:
		kind = "application/octet-stream"
	}
	h.Set("Content-Type", kind)
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": name}))
	h.Set("Last-Modified", time.Unix(0, d.f.MTime).UTC().Format(http.TimeFormat))
	// What is in a sandbox must never run as a page of the server's origin.
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "sandbox")
	status := http.StatusOK
	switch {
	case d.gzip != nil:
		h.Set("Content-Encoding", "gzip")
	case d.ranged:
		status = http.StatusPartialContent
		h.Set("Accept-Ranges", "bytes")
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", d.offset, d.offset+d.length-1, d.f.Size))
		h.Set("Content-Length", strconv.FormatInt(d.length, 10))
	case d.f.Size > 0 || len(first) == 0 && !d.head:
		h.Set("Accept-Ranges", "bytes")
		h.Set("Content-Length", strconv.FormatInt(d.f.Size, 10))
	default:
		// Files of procfs say that they are empty: their length is left open.
	}
	d.w.WriteHeader(status)
}

var _ io.Writer = (*downloading)(nil)
