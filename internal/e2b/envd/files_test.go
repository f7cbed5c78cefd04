package envd_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/errs"
)

func zipped(t testing.TB, text string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = w.Write([]byte(text))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// form is a body as SDKs send files: the name of each part is its path.
func form(t testing.TB, files ...string) (kind, body string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i+1 < len(files); i += 2 {
		part, err := w.CreatePart(textproto.MIMEHeader{
			"Content-Disposition": {`form-data; name="file"; filename="` + files[i] + `"`}, "Content-Type": {"application/octet-stream"},
		})
		if err != nil {
			t.Fatal(err)
		}
		_, _ = part.Write([]byte(files[i+1]))
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return w.FormDataContentType(), b.String()
}

func testUploadForms(t *testing.T, h *harness) {
	kind, body := form(t, "/home/user/x", "text")
	resp, text := h.do("POST", "/files?path=%2Fhome%2Fuser%2Fx", body, "Content-Type", kind)
	if resp.StatusCode != 200 || strings.TrimSpace(text) != `[{"path":"/home/user/x","name":"x","type":"file"}]` {
		t.Errorf("one file: %d %s", resp.StatusCode, text)
	}
	kind, body = form(t, "a.txt", "A", "/deep/er/ü b.txt", "B", "~/c", "C")
	resp, text = h.do("POST", "/files", body, "Content-Type", kind)
	var got []object
	if err := json.Unmarshal([]byte(text), &got); err != nil || len(got) != 3 || got[0]["path"] != "/home/user/a.txt" ||
		got[1]["path"] != "/deep/er/ü b.txt" || got[2]["path"] != "/home/user/c" {
		t.Errorf("several: %d %s", resp.StatusCode, text)
	}
	if _, text = h.do("GET", "/files?path=/deep/er/%C3%BC%20b.txt", ""); text != "B" {
		t.Errorf("read back: %q", text)
	}
	entry := h.must("/filesystem.Filesystem/Stat", object{"path": "/deep/er"})["entry"].(object)
	if entry["owner"] != "user" || entry["mode"] != 493.0 {
		t.Errorf("a directory on the way: %v", entry)
	}
	if resp, text = h.do("POST", "/files", zippedForm(t, "g.txt", "packed"), "Content-Type", "multipart/form-data; boundary=b", "Content-Encoding", "gzip"); resp.StatusCode != 200 {
		t.Errorf("a form with gzip: %d %s", resp.StatusCode, text)
	}
	if _, text = h.do("GET", "/files?path=g.txt", ""); text != "packed" {
		t.Errorf("read back: %q", text)
	}
	kind, body = form(t)
	if resp, text = h.do("POST", "/files", body, "Content-Type", kind); resp.StatusCode != 200 || strings.TrimSpace(text) != "[]" {
		t.Errorf("no file: %d %s", resp.StatusCode, text)
	}
}

func zippedForm(t testing.TB, name, text string) string {
	t.Helper()
	return zipped(t, "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\""+name+"\"\r\n\r\n"+text+"\r\n--b--\r\n")
}

const octets = "application/octet-stream"

func testUploadBytes(t *testing.T, h *harness) {
	long := strings.Repeat("0123456789", 100_000)
	if resp, text := h.do("POST", "/files?path=big", long, "Content-Type", octets); resp.StatusCode != 200 {
		t.Errorf("bytes: %d %s", resp.StatusCode, text)
	}
	if _, text := h.do("GET", "/files?path=/home/user/big", ""); text != long {
		t.Errorf("%d bytes back", len(text))
	}
	if resp, text := h.do("POST", "/files?path=big", zipped(t, "short"), "Content-Type", octets, "Content-Encoding", "gzip"); resp.StatusCode != 200 {
		t.Errorf("gzip: %d %s", resp.StatusCode, text)
	}
	if _, text := h.do("GET", "/files?path=big", ""); text != "short" {
		t.Errorf("after a shorter one: %q", text)
	}
	if resp, text := h.do("POST", "/files?path=own&username=root", "x", "Content-Type", octets); resp.StatusCode != 200 || !strings.Contains(text, `"/root/own"`) {
		t.Errorf("as root: %d %s", resp.StatusCode, text)
	}
	if e := h.must("/filesystem.Filesystem/Stat", object{"path": "/root/own"})["entry"].(object); e["owner"] != "root" {
		t.Errorf("root's file: %v", e)
	}
}

func testUploadsThatAreRefused(t *testing.T, h *harness) {
	twice, body := form(t, "same", "1", "./same", "2")
	for _, c := range []struct {
		query, body, kind, encoding string
		status                      int
		text                        string
	}{
		{"?path=/tmp", "x", octets, "", 400, "path is a directory: /tmp"},
		{"", "x", octets, "", 400, "needs the query parameter path"},
		{"?path=x", "x", "text/plain", "", 400, "unsupported content type: text/plain, expected multipart/form-data or application/octet-stream"},
		{"?path=x", "x", octets, "br", 400, "unsupported Content-Encoding"},
		{"?path=x", "not gzip", octets, "gzip", 400, "gzip"},
		{"?path=x", zipped(t, strings.Repeat("x", 1000))[:20], octets, "gzip", 400, ""},
		{"?path=x&username=zz", "x", octets, "", 401, "error looking up user 'zz': user: unknown user zz"},
		{"", body, twice, "", 400, "you cannot upload multiple files to the same path"},
		{"", "garbage", "multipart/form-data; boundary=x", "", 400, "multipart"},
	} {
		header := []string{"Content-Type", c.kind}
		if c.encoding != "" {
			header = append(header, "Content-Encoding", c.encoding)
		}
		resp, text := h.do("POST", "/files"+c.query, c.body, header...)
		var e struct {
			Code    int
			Message string
		}
		if err := json.Unmarshal([]byte(text), &e); err != nil || resp.StatusCode != c.status || e.Code != c.status || !strings.Contains(e.Message, c.text) {
			t.Errorf("%s %s: %d %s, want %d %s", c.query, c.kind, resp.StatusCode, text, c.status, c.text)
		}
	}
	if _, text := h.do("GET", "/files?path=same", ""); text != "1" {
		t.Errorf("the first of two files with one path: %q", text)
	}
}

func testMetadata(t *testing.T, h *harness) {
	put := func(header ...string) (int, string) {
		t.Helper()
		resp, text := h.do("POST", "/files?path=m", "x", append([]string{"Content-Type", octets}, header...)...)
		return resp.StatusCode, strings.TrimSpace(text)
	}
	if _, text := put("X-Metadata-Author", "mish", "X-Metadata-purpose", "upload"); text != `[{"path":"/home/user/m","name":"m","type":"file","metadata":{"author":"mish","purpose":"upload"}}]` {
		t.Errorf("uploaded: %s", text)
	}
	stat := func() object {
		t.Helper()
		return h.must("/filesystem.Filesystem/Stat", object{"path": "m"})["entry"].(object)
	}
	if got := fmt.Sprint(stat()["metadata"]); got != "map[author:mish purpose:upload]" {
		t.Errorf("kept: %s", got)
	}
	moved := h.must("/filesystem.Filesystem/Move", object{"source": "m", "destination": "new/m"})["entry"].(object)
	list := h.must("/filesystem.Filesystem/ListDir", object{"path": "new"})["entries"].([]any)
	if fmt.Sprint(moved["metadata"]) != "map[author:mish purpose:upload]" || fmt.Sprint(list[0].(object)["metadata"]) != fmt.Sprint(moved["metadata"]) {
		t.Errorf("moved: %v, listed: %v", moved, list)
	}
	put("X-Metadata-A", "1")
	if put(); stat()["metadata"] != nil {
		t.Errorf("after an upload without: %v", stat())
	}
	for name, value := range map[string]string{
		"X-Metadata-" + strings.Repeat("k", 247): "v", "X-Metadata-Long": strings.Repeat("v", 4097), "X-Metadata-": "v", "X-Metadata-U": "ü",
	} {
		if status, text := put(name, value); status != 400 || !strings.Contains(text, "invalid metadata") {
			t.Errorf("%.20s: %d %s", name, status, text)
		}
	}
}

func testDownload(t *testing.T, h *harness) {
	h.do("POST", "/files?path=f.txt", "0123456789", "Content-Type", octets)
	resp, text := h.do("GET", "/files?path=f.txt", "")
	head := resp.Header
	if text != "0123456789" || head.Get("Content-Disposition") != "inline; filename=f.txt" || head.Get("Content-Type") != "text/plain; charset=utf-8" ||
		head.Get("Accept-Ranges") != "bytes" || head.Get("Vary") != "Accept-Encoding" || head.Get("Last-Modified") == "" || resp.ContentLength != 10 {
		t.Errorf("whole: %q %v", text, head)
	}
	for _, c := range []struct {
		span, want, content string
		status              int
	}{
		{"bytes=0-3", "0123", "bytes 0-3/10", 206},
		{"bytes=8-", "89", "bytes 8-9/10", 206},
		{"bytes=-2", "89", "bytes 8-9/10", 206},
		{"bytes=4-99", "456789", "bytes 4-9/10", 206},
		{"bytes=10-", "", "bytes */10", 416},
		{"bytes=3-2", "0123456789", "", 200},
		{"bytes=0-0,2-3", "0123456789", "", 200},
		{"lines=1-2", "0123456789", "", 200},
	} {
		resp, text := h.do("GET", "/files?path=f.txt", "", "Range", c.span)
		if resp.StatusCode != c.status || c.status != 416 && text != c.want || resp.Header.Get("Content-Range") != c.content {
			t.Errorf("%s: %d %q %v", c.span, resp.StatusCode, text, resp.Header)
		}
	}
	if resp, answer := h.do("GET", "/files?path=f.txt", "", "If-Unmodified-Since", "Mon, 01 Jan 2001 00:00:00 GMT"); resp.StatusCode != 412 {
		t.Errorf("written since: %d %s", resp.StatusCode, answer)
	}
	if resp, _ := h.do("GET", "/files?path=f.txt", "", "If-Unmodified-Since", head.Get("Last-Modified")); resp.StatusCode != 200 {
		t.Errorf("not written since: %d", resp.StatusCode)
	}
	if resp, _ := h.do("GET", "/files?path=f.txt", "", "If-Modified-Since", head.Get("Last-Modified")); resp.StatusCode != 304 {
		t.Errorf("not modified: %d", resp.StatusCode)
	}
	if resp, text := h.do("GET", "/files?path=f.txt", "", "Range", "bytes=0-3", "If-Range", "Thu, 01 Jan 1970 00:00:00 GMT"); resp.StatusCode != 200 || len(text) != 10 {
		t.Errorf("a part of another state: %d %q", resp.StatusCode, text)
	}
	if resp, text := h.do("HEAD", "/files?path=f.txt", ""); resp.StatusCode != 200 || text != "" || resp.ContentLength != 10 {
		t.Errorf("HEAD: %d %q %d", resp.StatusCode, text, resp.ContentLength)
	}
	h.do("POST", "/files?path=empty", "", "Content-Type", octets)
	if resp, text := h.do("GET", "/files?path=empty", ""); resp.StatusCode != 200 || text != "" || resp.ContentLength != 0 {
		t.Errorf("an empty file: %d %q %v", resp.StatusCode, text, resp.Header)
	}
	for _, c := range []struct {
		query  string
		status int
		text   string
	}{
		{"/nope", 404, `{"code":404,"message":"path '/nope' does not exist"}`},
		{"nope", 404, `{"code":404,"message":"path '/home/user/nope' does not exist"}`},
		{"/etc", 400, `{"code":400,"message":"path '/etc' is a directory"}`},
		{"", 400, `{"code":400,"message":"path '/home/user' is a directory"}`},
		{"/etc/passwd&username=zz", 401, `{"code":401,"message":"error looking up user 'zz': user: unknown user zz"}`},
	} {
		if resp, text := h.do("GET", "/files?path="+c.query, ""); resp.StatusCode != c.status || strings.TrimSpace(text) != c.text {
			t.Errorf("%s: %d %s", c.query, resp.StatusCode, text)
		}
	}
}

func testDownloadEncodings(t *testing.T, h *harness) {
	long := strings.Repeat("text ", 10_000)
	h.do("POST", "/files?path=f", long, "Content-Type", octets)
	for accept, want := range map[string]string{
		"gzip": "gzip", "gzip;q=1.0": "gzip", "identity;q=0, gzip": "gzip", "": "", "identity": "", "gzip, deflate, br": "", "gzip;q=0": "",
	} {
		resp, text := h.do("GET", "/files?path=f", "", "Accept-Encoding", accept)
		if want == "gzip" {
			r, err := gzip.NewReader(strings.NewReader(text))
			if err != nil {
				t.Fatalf("%q: %v", accept, err)
			}
			plain, err := io.ReadAll(r)
			if text = string(plain); err != nil {
				t.Error(err)
			}
		}
		if resp.Header.Get("Content-Encoding") != want || text != long {
			t.Errorf("%q: %v, %d bytes", accept, resp.Header, len(text))
		}
	}
	if resp, text := h.do("GET", "/files?path=f", "", "Accept-Encoding", "br, identity;q=0"); resp.StatusCode != 406 {
		t.Errorf("none of ours: %d %s", resp.StatusCode, text)
	}
}

func testCompose(t *testing.T, h *harness) {
	for _, name := range []string{"1", "2", "3"} {
		h.do("POST", "/files?path=part"+name, "<"+name+">", "Content-Type", octets)
	}
	resp, text := h.do("POST", "/files/compose", `{"source_paths":["part1","part2","/home/user/part3"],"destination":"new/whole"}`)
	if resp.StatusCode != 200 || strings.TrimSpace(text) != `{"path":"/home/user/new/whole","name":"whole","type":"file"}` {
		t.Errorf("composed: %d %s", resp.StatusCode, text)
	}
	if _, text = h.do("GET", "/files?path=new/whole", ""); text != "<1><2><3>" {
		t.Errorf("whole: %q", text)
	}
	if resp, _ = h.do("GET", "/files?path=part2", ""); resp.StatusCode != 404 {
		t.Errorf("a source is still there: %d", resp.StatusCode)
	}
	resp, text = h.do("POST", "/files/compose", `{"source_paths":["new/whole","missing"],"destination":"never"}`)
	if resp.StatusCode != 404 || !strings.Contains(text, "path '/home/user/missing' does not exist") {
		t.Errorf("a source that is missing: %d %s", resp.StatusCode, text)
	}
	if resp, _ = h.do("GET", "/files?path=never", ""); resp.StatusCode != 404 {
		t.Errorf("half a file: %d", resp.StatusCode)
	}
	for _, bad := range []string{`{}`, `no`, `{"source_paths":["a"]}`} {
		if resp, _ := h.do("POST", "/files/compose", bad); resp.StatusCode != 400 {
			t.Errorf("%s: %d", bad, resp.StatusCode)
		}
	}
}

func testOwnRoutes(t *testing.T, h *harness) {
	if resp, text := h.do("GET", "/health", ""); resp.StatusCode != 204 || text != "" || resp.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("health: %d %q", resp.StatusCode, text)
	}
	var m map[string]float64
	if _, text := h.do("GET", "/metrics", ""); json.Unmarshal([]byte(text), &m) != nil || m["ts"] == 0 || m["cpu_count"] == 0 || m["mem_total"] == 0 || m["disk_total"] == 0 {
		t.Errorf("metrics: %s", text)
	}
	for _, path := range []string{"/init", "/freeze", "/nothing"} {
		if resp, text := h.do("POST", path, "{}"); resp.StatusCode != 404 || !strings.Contains(text, `"code":404`) {
			t.Errorf("%s: %d %s", path, resp.StatusCode, text)
		}
	}
}

func TestSignatures(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	sign := envd.Sign("/a b", "read", "", "token", "")
	if want := "v1_"; !strings.HasPrefix(sign, want) || strings.HasSuffix(sign, "=") {
		t.Errorf("signature %s", sign)
	}
	for _, c := range []struct {
		method, query, text string
	}{
		{"GET", "path=/a+b&signature=" + escape(sign), ""},
		{"GET", "path=/other&signature=" + escape(sign), "invalid signature"},
		{"POST", "path=/a+b&signature=" + escape(sign), "invalid signature"},
		{"GET", "path=/a+b&username=root&signature=" + escape(sign), "invalid signature"},
		{"GET", "path=/a+b", "missing signature query parameter"},
		{"POST", "path=/a&username=root&signature=" + escape(envd.Sign("/a", "write", "root", "token", "")), ""},
		{"GET", "path=/a&signature_expiration=1700000001&signature=" + escape(envd.Sign("/a", "read", "", "token", "1700000001")), ""},
		{"GET", "path=/a&signature_expiration=1699999999&signature=" + escape(envd.Sign("/a", "read", "", "token", "1699999999")), "signature is already expired"},
		{"GET", "path=/a&signature_expiration=1800000001&signature=" + escape(envd.Sign("/a", "read", "", "token", "1699999999")), "invalid signature"},
	} {
		err := envd.VerifySignature(httptest.NewRequestWithContext(t.Context(), c.method, "/files?"+c.query, http.NoBody), "token", now)
		var s *envd.SignatureError
		if c.text == "" && err == nil {
			continue
		}
		if err == nil || err.Error() != c.text || !errs.Is(err, errs.Unauthenticated) || !errors.As(err, &s) || s.Expired != strings.Contains(c.text, "expired") {
			t.Errorf("%s %s: %v, want %q", c.method, c.query, err, c.text)
		}
	}
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/files?path=/a&signature="+escape(envd.Sign("/a", "read", "", "", "")), http.NoBody)
	if err := envd.VerifySignature(r, "", now); err == nil {
		t.Error("a sandbox without a token takes signatures")
	}
}

func escape(s string) string { return strings.NewReplacer("+", "%2B", "/", "%2F").Replace(s) }
