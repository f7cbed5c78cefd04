package e2b

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/testenv"
)

// tarOf is an archive of one file.
func tarOf(t *testing.T, name string, size int) string {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(size), Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// uploadLink is the address that a key is given for the files of a hash, and whether they are there.
func (h *harness) uploadLink(key, hash string) (*url.URL, bool) {
	h.t.Helper()
	var out struct {
		Present bool   `json:"present"`
		URL     string `json:"url"`
	}
	h.send("GET", "/templates/web/files/"+hash, "", "X-API-Key", key).into(h.t, &out)
	at, err := url.Parse(out.URL)
	if err != nil {
		h.t.Fatal(err)
	}
	return at, out.Present
}

// ATTACK: whoever has one address for an upload, or has seen one, puts files where they have no right to. Each
// attempt is refused and nothing is kept; TWIN: the address itself works, once for each hash.
func TestAttackUploadLinks(t *testing.T) {
	h := newHarness(t)
	at, _ := h.uploadLink(h.key, "0a1b")
	victim, _ := h.uploadLink(h.other, "0a1b")
	archive := tarOf(t, "a", 1)
	sig := at.Query().Get("signature")
	owner := at.Query().Get("owner")
	change := func(set ...string) string {
		q := at.Query()
		for i := 0; i+1 < len(set); i += 2 {
			q.Set(set[i], set[i+1])
		}
		return "?" + q.Encode()
	}
	past := strconv.FormatInt(time.Now().Add(-time.Second).Unix(), 10)
	guess := newTokens([]byte("a guess of 16 bytes or more")).upload(owner, "0a1b", at.Query().Get("expires"))
	for what, target := range map[string]string{
		"another signature":           at.Path + change("signature", strings.Repeat("0", 64)),
		"a signature's beginning":     at.Path + change("signature", sig[:32]),
		"a signature and more":        at.Path + change("signature", sig+"00"),
		"in capital letters":          at.Path + change("signature", strings.ToUpper(sig)),
		"an empty signature":          at.Path + change("signature", ""),
		"made with a guessed secret":  at.Path + change("signature", guess),
		"a token of a data plane":     at.Path + change("signature", h.api.tokens.envd(owner)),
		"another key's files":         at.Path + change("owner", victim.Query().Get("owner")),
		"another key's signature":     at.Path + change("signature", victim.Query().Get("signature")),
		"no owner":                    at.Path + change("owner", ""),
		"two owners":                  at.Path + "?owner=" + victim.Query().Get("owner") + "&" + at.RawQuery,
		"another hash":                "/templates/web/files/ffff" + change(),
		"a hash that continues":       "/templates/web/files/0a1bc" + change(),
		"a NUL moved in the signed":   "/templates/web/files/1b" + change("owner", owner+"\x000a"),
		"more time":                   at.Path + change("expires", "99999999999"),
		"no time":                     at.Path + change("expires", ""),
		"a time that has passed":      at.Path + change("expires", past, "signature", h.api.tokens.upload(owner, "0a1b", past)),
		"a time that is none":         at.Path + change("expires", "never", "signature", h.api.tokens.upload(owner, "0a1b", "never")),
		"a path in the hash":          "/templates/web/files/..%2f..%2fetc%2fcron.d%2fx" + change(),
		"dots in the hash":            "/templates/web/files/%2e%2e" + change(),
		"a signed path in the hash":   "/templates/web/files/..%2fx" + change("signature", h.api.tokens.upload(owner, "../x", at.Query().Get("expires"))),
		"a sandbox as owner":          at.Path + change("owner", "sandbox:x", "signature", h.api.tokens.upload("sandbox:x", "0a1b", at.Query().Get("expires"))),
		"an owner that is a path":     at.Path + change("owner", "../../x", "signature", h.api.tokens.upload("../../x", "0a1b", at.Query().Get("expires"))),
		"the server's own principal":  at.Path + change("owner", "local", "signature", h.api.tokens.upload("local", "0a1b", at.Query().Get("expires"))),
		"an address without anything": at.Path,
	} {
		if a := h.send("PUT", target, archive); a.status != http.StatusForbidden {
			t.Errorf("%s: %d %s", what, a.status, a.body)
		}
	}
	// The signature stands for a key in an upload alone.
	for _, other := range []string{"GET " + at.RequestURI(), "GET /templates" + "?" + at.RawQuery, "DELETE /templates/web?" + at.RawQuery} {
		method, target, _ := strings.Cut(other, " ")
		if a := h.send(method, target, ""); a.status != http.StatusUnauthorized {
			t.Errorf("%s: %d %s", other, a.status, a.body)
		}
	}
	for _, key := range []string{h.key, h.other} {
		for _, hash := range []string{"0a1b", "ffff", "0a1bc", "1b"} {
			if _, there := h.uploadLink(key, hash); there {
				t.Errorf("files %s are there", hash)
			}
		}
	}
	h.nothingUploaded(0)
	// Twin.
	if a := h.send("PUT", at.RequestURI(), archive); a.status != http.StatusOK {
		t.Fatalf("twin: %d %s", a.status, a.body)
	}
	if _, there := h.uploadLink(h.key, "0a1b"); !there {
		t.Error("twin: the files are not there")
	}
	if _, there := h.uploadLink(h.other, "0a1b"); there {
		t.Error("another key has them, too")
	}
	h.nothingUploaded(1)
}

// nothingUploaded fails if other files lie there than so many archives.
func (h *harness) nothingUploaded(archives int) {
	h.t.Helper()
	testenv.Eventually(h.t, time.Minute, "what broke off is gone", func() bool {
		halves, err := filepath.Glob(filepath.Join(h.builds, "*", "upload-*"))
		return err == nil && len(halves) == 0
	})
	all, err := filepath.Glob(filepath.Join(h.builds, "*", "*.tar"))
	if err != nil || len(all) != archives {
		h.t.Errorf("%d archives are kept, want %d: %v", len(all), archives, err)
	}
}

// ATTACK: a key is revoked, and addresses that it was given before are still used. TWIN: before that they work.
func TestAttackUploadLinksOfARevokedKey(t *testing.T) {
	h := newHarness(t)
	at, _ := h.uploadLink(h.other, "0a1b")
	archive := tarOf(t, "a", 1)
	if a := h.send("PUT", at.RequestURI(), archive); a.status != http.StatusOK {
		t.Fatalf("twin: %d %s", a.status, a.body)
	}
	if _, err := h.keys.Revoke(t.Context(), at.Query().Get("owner")); err != nil {
		t.Fatal(err)
	}
	h.refused(h.send("PUT", at.RequestURI(), archive), http.StatusForbidden, "not valid any more")
}

// ATTACK: what is uploaded is no archive, one too many bytes, more than it seems, cut off, or leads out. TWIN: an
// archive as large as one may be is taken.
func TestAttackUploads(t *testing.T) {
	h := newHarness(t)
	at, _ := h.uploadLink(h.key, "0a1b")
	const most = 4 << 20 // the harness's
	zipped := func(size int) string {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		if _, err := io.Copy(z, io.LimitReader(zeros{}, int64(size))); err != nil {
			t.Fatal(err)
		}
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		return b.String()
	}
	for what, c := range map[string]struct {
		body   string
		status int
	}{
		"text":                   {"no archive at all, but text", 400},
		"too large":              {tarOf(t, "a", most), 413},
		"a bomb":                 {zipped(64 << 20), 413},
		"a cut bomb":             {zipped(64 << 20)[:1000], 400},
		"a cut archive":          {tarOf(t, "a", 100_000)[:50_000], 400},
		"a name that leads out":  {tarOf(t, "../../etc/cron.d/x", 1), 400},
		"half of gzip's head":    {"\x1f\x8b\x08", 400},
		"a size that is claimed": {tarOf(t, "a", 512)[:512], 400},
	} {
		if a := h.send("PUT", at.RequestURI(), c.body); a.status != c.status {
			t.Errorf("%s: %d %s, want %d", what, a.status, a.body, c.status)
		}
	}
	// Cut off on the wire, with and without a length.
	archive := tarOf(t, "a", 100_000)
	for _, head := range []string{"Content-Length: " + strconv.Itoa(len(archive)), "Transfer-Encoding: chunked"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(h.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		body := archive[:60_000]
		if strings.HasPrefix(head, "T") {
			body = fmt.Sprintf("%x\r\n%s\r\n", len(body), body)
		}
		fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n%s", at.RequestURI(), head, body)
		_ = conn.Close()
	}
	if _, there := h.uploadLink(h.key, "0a1b"); there {
		t.Error("what was refused is there")
	}
	h.nothingUploaded(0)
	for what, body := range map[string]string{"the largest": tarOf(t, "a", most-2048), "compressed": gzipped(t, archive)} {
		if a := h.send("PUT", at.RequestURI(), body); a.status != http.StatusOK {
			t.Errorf("twin: %s: %d %s", what, a.status, a.body)
		}
	}
	h.nothingUploaded(1)
}

type zeros struct{}

// Read implements io.Reader.
func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func gzipped(t *testing.T, body string) string {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := io.WriteString(z, body); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// ATTACK: whoever has one link to a sandbox's file reads and writes others with it. Each attempt is refused before
// the sandbox hears of it; TWIN: the link itself works, as a link, and where the sandbox is named as well.
func TestAttackSignedLinks(t *testing.T) {
	h := newHarness(t)
	mine, victim := h.create(""), h.create("")
	soon, past := strconv.FormatInt(time.Now().Unix()+600, 10), strconv.FormatInt(time.Now().Unix()-1, 10)
	link := func(s sandboxJSON, op, path, user, exp string) url.Values {
		return url.Values{
			"path": {path}, "username": {user}, "signature_expiration": {exp},
			"signature": {envd.Sign(path, op, user, s.EnvdAccessToken, exp)},
		}
	}
	set := func(q url.Values, changes ...string) url.Values {
		for i := 0; i+1 < len(changes); i += 2 {
			q.Set(changes[i], changes[i+1])
		}
		return q
	}
	good := func() url.Values { return link(mine, "read", "notes/a", "user", soon) }
	sig := good().Get("signature")
	for what, c := range map[string]struct {
		method string
		q      url.Values
		header []string
	}{
		"another file":               {"GET", set(good(), "path", "notes/b"), nil},
		"a file above":               {"GET", set(good(), "path", "notes/../../etc/shadow"), nil},
		"the same file otherwise":    {"GET", set(good(), "path", "notes//a"), nil},
		"another user":               {"GET", set(good(), "username", "root"), nil},
		"no user":                    {"GET", set(good(), "username", ""), nil},
		"writing with a read's":      {"POST", good(), nil},
		"reading with a write's":     {"GET", link(mine, "write", "notes/a", "user", soon), nil},
		"more time":                  {"GET", set(good(), "signature_expiration", "99999999999"), nil},
		"no limit":                   {"GET", set(good(), "signature_expiration", ""), nil},
		"a time that has passed":     {"GET", link(mine, "read", "notes/a", "user", past), nil},
		"a time that is none":        {"GET", link(mine, "read", "notes/a", "user", "1e99"), nil},
		"another signature":          {"GET", set(good(), "signature", "v1_"+strings.Repeat("A", 43)), nil},
		"without its version":        {"GET", set(good(), "signature", strings.TrimPrefix(sig, "v1_")), nil},
		"padded":                     {"GET", set(good(), "signature", sig+"="), nil},
		"its beginning":              {"GET", set(good(), "signature", sig[:20]), nil},
		"signed with nothing":        {"GET", set(good(), "signature", envd.Sign("notes/a", "read", "user", "", soon)), nil},
		"another sandbox's file":     {"GET", good(), to(victim.SandboxID, envdPort)},
		"another sandbox's, written": {"POST", link(mine, "write", "notes/a", "user", soon), to(victim.SandboxID, envdPort)},
		"a path that holds the end":  {"GET", set(link(mine, "read", "notes/a:read:user", "", ""), "path", "notes/a", "username", "user:read:"), nil},
		"two paths":                  {"GET", url.Values{"path": {"/etc/shadow", "notes/a"}, "username": {"user"}, "signature_expiration": {soon}, "signature": {sig}}, nil},
		"a token that is not its":    {"GET", good(), []string{"E2b-Sandbox-Id", victim.SandboxID, "E2b-Sandbox-Port", "49983", "X-Access-Token", mine.EnvdAccessToken}},
	} {
		before := h.envd.last()
		a := h.send(c.method, "/files?"+c.q.Encode(), "", c.header...)
		// This is one text for both readings; that user can't exist, since passwd's fields end at colons.
		if what == "a path that holds the end" && a.status == http.StatusOK {
			continue
		}
		if a.status != http.StatusUnauthorized || h.envd.last() != before {
			t.Errorf("%s: %d %s; the sandbox was asked %q", what, a.status, a.body, h.envd.last())
		}
	}
	for what, c := range map[string]struct {
		method string
		q      url.Values
		header []string
	}{
		"read":                    {"GET", good(), nil},
		"read, the sandbox named": {"GET", good(), to(mine.SandboxID, envdPort)},
		"write":                   {"POST", link(mine, "write", "notes/a", "user", soon), nil},
		"for ever":                {"GET", link(mine, "read", "notes/a", "user", ""), nil},
	} {
		if a := h.send(c.method, "/files?"+c.q.Encode(), "", c.header...); a.status != http.StatusOK {
			t.Errorf("twin: %s: %d %s", what, a.status, a.body)
		}
		if got := h.envd.last(); !strings.Contains(got, c.method+" /files "+mine.SandboxID) {
			t.Errorf("twin: %s: the sandbox was asked %q", what, got)
		}
	}
}
