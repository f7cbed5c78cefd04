package api

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/httpfile"
	"casemate.dev/internal/sandbox"
)

// etagOf names a state of a file. It is weak: the clock that a file's time comes from is coarse.
func etagOf(f sandbox.FileInfo) string {
	return fmt.Sprintf(`W/"%x-%x"`, f.MTime, f.Size)
}

// matches reports whether an If-None-Match header names tag, compared weakly (RFC 9110 section 13.1.2).
func matches(header, tag string) bool {
	for part := range strings.SplitSeq(header, ",") {
		part = strings.TrimSpace(part)
		if part == "*" || (part != "" && strings.TrimPrefix(part, "W/") == strings.TrimPrefix(tag, "W/")) {
			return true
		}
	}
	return false
}

// disposition makes a browser save the file under its name (RFC 6266, with RFC 5987's encoding for
// what ASCII can't say).
func disposition(name string) string {
	ascii := strings.Map(func(r rune) rune {
		if r < 0x20 || r > 0x7e || r == '"' || r == '\\' || r == '/' {
			return '_'
		}
		return r
	}, name)
	out := `attachment; filename="` + ascii + `"`
	if ascii != name {
		out += "; filename*=UTF-8''" + strings.ReplaceAll(url.QueryEscape(name), "+", "%20")
	}
	return out
}

func contentPath(r *http.Request) (sandbox.PathRequest, error) {
	q := r.URL.Query()
	p := q.Get("path")
	if p == "" {
		return sandbox.PathRequest{}, errs.New(errs.InvalidArgument, "the query names no path").WithHint("add ?path=/home/user/file")
	}
	req := pathRequest(q.Get("user"), p)
	req.Follow = true
	return req, nil
}

// serveContent is the twin of FileService.ReadFile: GET and HEAD, with one range.
func (a *API) serveContent(w http.ResponseWriter, r *http.Request) error {
	req, err := contentPath(r)
	if err != nil {
		return err
	}
	fs, err := a.openFiles(r.Context(), r.PathValue("sandbox"))
	if err != nil {
		return err
	}
	want, ranged := httpfile.ParseRange(r.Header.Get("Range"))
	head := contentHead{w: w, r: r}
	read := sandbox.ReadRequest{PathRequest: req, Length: -1}
	if ranged || r.Method == http.MethodHead || r.Header.Get("If-None-Match") != "" {
		// These need the file's size or time before its bytes. A file that changes in between shows in
		// the length, and the connection is cut.
		f, err := fs.Stat(r.Context(), req)
		if err != nil {
			return err
		}
		if ranged && r.Header.Get("If-Range") == "" {
			head.ranged = true
			if head.offset, head.length, head.satisfiable = want.Within(f.Size); head.satisfiable {
				read.Offset, read.Length = head.offset, head.length
			}
		}
		if done, err := head.answered(f); done || err != nil {
			return err
		}
	}
	_, err = fs.Read(r.Context(), read, head.write, w)
	if err != nil && head.written {
		panic(http.ErrAbortHandler) // the status is out: only a cut connection can tell
	}
	return err
}

// contentHead is the head of a file's answer.
type contentHead struct {
	w http.ResponseWriter
	r *http.Request

	ranged, satisfiable bool
	offset, length      int64
	written             bool
}

// answered gives the answers that need no bytes, and reports whether it did.
func (c *contentHead) answered(f sandbox.FileInfo) (bool, error) {
	switch {
	case f.Type != "file":
		return false, errNoFile(f)
	case matches(c.r.Header.Get("If-None-Match"), etagOf(f)):
		c.w.Header().Set("Etag", etagOf(f))
		c.w.WriteHeader(http.StatusNotModified)
		return true, nil
	case c.ranged && !c.satisfiable:
		c.w.Header().Set("Content-Range", "bytes */"+strconv.FormatInt(f.Size, 10))
		c.w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
		return true, nil
	case c.r.Method == http.MethodHead:
		return true, c.write(f)
	}
	return false, nil
}

func errNoFile(f sandbox.FileInfo) error {
	return errs.New(errs.InvalidArgument, "%s is no regular file, but of type %s", f.Path, f.Type).
		WithHint("list a directory with …/files/list?path=")
}

// write writes status and header for f.
func (c *contentHead) write(f sandbox.FileInfo) error {
	if f.Type != "file" {
		return errNoFile(f)
	}
	h := c.w.Header()
	// What is in a sandbox must never run as a page of the server's origin.
	h.Set("Content-Type", octetStream)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "sandbox")
	h.Set("Content-Disposition", disposition(path.Base(f.Path)))
	h.Set("Accept-Ranges", "bytes")
	h.Set("Cache-Control", "no-cache")
	h.Set("Etag", etagOf(f))
	h.Set("Last-Modified", time.Unix(0, f.MTime).UTC().Format(http.TimeFormat))
	status, length := http.StatusOK, f.Size
	if c.ranged {
		status, length = http.StatusPartialContent, c.length
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", c.offset, c.offset+c.length-1, f.Size))
	}
	if f.Size > 0 || c.ranged {
		// Files of /proc say 0 and have bytes: their length is left open.
		h.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	c.w.WriteHeader(status)
	c.written = true
	return nil
}

// saveContent is the twin of FileService.WriteFile: PUT.
func (a *API) saveContent(w http.ResponseWriter, r *http.Request) error {
	req, err := contentPath(r)
	if err != nil {
		return err
	}
	write := sandbox.WriteRequest{PathRequest: req, Offset: -1, Size: r.ContentLength}
	q := r.URL.Query()
	if s := q.Get("mode"); s != "" {
		mode, err := strconv.ParseUint(s, 8, 12)
		if err != nil {
			return errs.New(errs.InvalidArgument, "mode %q is no octal number up to 7777", s)
		}
		write.Mode = uint32(mode)
	}
	if write.Parents, err = boolParam(q.Get("parents"), false); err != nil {
		return err
	}
	if write.Append, err = boolParam(q.Get("append"), false); err != nil {
		return err
	}
	if s := q.Get("offset"); s != "" {
		if write.Offset, err = httpfile.ParseDigits(s); err != nil {
			return errs.New(errs.InvalidArgument, "offset %q is no number of bytes", s)
		}
	}
	fs, err := a.openFiles(r.Context(), r.PathValue("sandbox"))
	if err != nil {
		return err
	}
	body := httpfile.NewBody(r.Body)
	f, err := fs.Write(r.Context(), write, body)
	if body.Err() != nil {
		return errs.Wrap(errors.Join(body.Err(), err), errs.InvalidArgument, "the request's body broke off; the file is as it was")
	}
	if err != nil {
		return err
	}
	return writeMessage(w, fileMessage(f))
}
