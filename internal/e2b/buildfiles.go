package e2b

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"casemate.dev/internal/sandbox"
)

// uploadFor is how long an upload's address is valid. Uploads that have begun by then go on.
const uploadFor = time.Hour

// fileLink tells whether the files of a step are here, and where to upload them.
func (a *API) fileLink(c call) error {
	if a.cfg.Builder == nil {
		return notYet("building templates")
	}
	hash := c.r.PathValue("hash")
	if !fileHash(hash) {
		return fail(http.StatusBadRequest, "'%s' is no hash of files", hash)
	}
	present, err := a.cfg.Builder.HasFiles(c.r.Context(), c.p, hash)
	if err != nil {
		return err
	}
	expires := strconv.FormatInt(time.Now().Add(uploadFor).Unix(), 10)
	to := url.URL{Scheme: "http", Host: c.r.Host, Path: c.r.URL.Path, RawQuery: url.Values{
		"owner": {c.p.ID}, "expires": {expires}, "signature": {a.tokens.upload(c.p.ID, hash, expires)},
	}.Encode()}
	if c.r.TLS != nil {
		to.Scheme = "https"
	}
	return c.json(http.StatusCreated, map[string]any{"present": present, "url": to.String()})
}

// fileHash reports whether s could be a hash: it becomes the name under which files are kept.
func fileHash(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return s != "" && len(s) <= 128
}

// upload signs an upload of files.
func (t tokens) upload(owner, hash, expires string) string {
	m := hmac.New(sha256.New, t.secret)
	m.Write([]byte("upload\x00" + owner + "\x00" + hash + "\x00" + expires))
	return hex.EncodeToString(m.Sum(nil))
}

// putFiles takes files at an address of fileLink's, whose signature stands for the key.
func (a *API) putFiles(w http.ResponseWriter, r *http.Request) {
	if err := a.takeFiles(r); err != nil {
		a.answerError(w, r, err)
		return
	}
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(http.StatusOK)
}

func (a *API) takeFiles(r *http.Request) error {
	q, hash := r.URL.Query(), r.PathValue("hash")
	owner, expires := q.Get("owner"), q.Get("expires")
	if a.cfg.Builder == nil || owner == "" || !fileHash(hash) || !same(q.Get("signature"), a.tokens.upload(owner, hash, expires)) {
		return fail(http.StatusForbidden, "the address is not one that this server gave for an upload")
	}
	if at, err := strconv.ParseInt(expires, 10, 64); err != nil || time.Now().Unix() > at {
		return fail(http.StatusForbidden, "the address of the upload is too old: ask for another")
	}
	valid, err := a.cfg.Keys.Valid(r.Context(), owner)
	if err != nil {
		return err
	}
	if !valid {
		return fail(http.StatusForbidden, "the key that the address was given to is not valid any more")
	}
	_, err = a.cfg.Builder.PutFiles(admitted(r).Context(), sandbox.Principal{ID: owner}, hash, r.Body)
	return err
}
