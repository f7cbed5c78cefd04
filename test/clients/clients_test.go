package clients

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"casemate.dev/client"
	"casemate.dev/internal/testenv/world"
	"casemate.dev/test/stage"
)

func TestMain(m *testing.M) { os.Exit(stage.Main(m)) }

// The names of the fake internet. Connections to plain pass untouched; on those to keyed a credential is put; those to
// ruled are looked into for a rule; denied is not allowed.
const (
	plain  = "plain.example.com"
	keyed  = "keyed.example.com"
	ruled  = "ruled.example.com"
	denied = "denied.example.net"
	socket = "socket.example.com"
	port   = ":7000"
)

// value is a credential; what it is made of stands nowhere else.
var value = "canary-" + strings.Repeat("qZ4", 9)

// play is the server, its sites, and the sandbox that all clients run in.
type play struct {
	*stage.Stage
	site *stage.Site
	box  string
}

func start(t *testing.T) *play {
	p := &play{Stage: stage.Start(t), site: &stage.Site{}}
	p.site.Answer = func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "hello from %s", r.Host) }
	mux := http.NewServeMux()
	mux.Handle("/", p.site)
	for path, h := range map[string]http.Handler{"/simple/": index(t), "/greeting": npmRegistry(t), "/repo.git/": gitServer(t)} {
		h = guarded(h, func(r *http.Request) bool {
			_, pass, _ := r.BasicAuth()
			return r.Host != keyed || pass == value || r.Header.Get("Authorization") == "Bearer "+value
		})
		mux.Handle(path, h)
		if path == "/simple/" {
			mux.Handle("/files/", h)
		}
		if path == "/greeting" {
			mux.Handle("/greeting/", h)
		}
	}
	p.Serve(world.Web, mux, plain, keyed, ruled)
	p.Serve(world.Other, p.site, denied)
	p.echo(world.Web + port)
	p.World.Name(socket, world.Web)
	p.Secret("bearer", value, &client.SecretBinding{Hosts: []string{keyed}, Scheme: "bearer", Env: "KEY"})
	p.Secret("basic", value, &client.SecretBinding{Hosts: []string{keyed}, Scheme: "basic", Env: "PASSWORD"})
	p.box = p.Box("allow "+plain, "allow "+keyed, "allow GET https://"+ruled+"/open/*", "allow GET https://"+ruled+"/repo.git/info/refs",
		"allow POST https://"+ruled+"/repo.git/git-upload-pack", "allow "+socket+port)
	if out := p.Sh(p.box, `env | grep -i proxy`); out != "" {
		t.Errorf("variables for proxies are set: %s", out)
	}
	p.upload("fetch", fetcher(t))
	return p
}

// echo serves TCP that sends back what it gets.
func (p *play) echo(addr string) {
	p.World.Serve(addr, func(c net.Conn) { _, _ = io.Copy(c, c) })
}

// upload puts a program into the sandbox's home directory.
func (p *play) upload(name string, content []byte) {
	p.T.Helper()
	if _, err := p.Files.Write(p.T.Context(), p.box, "/home/user/"+name, bytes.NewReader(content), client.WriteOptions{Mode: 0o755}); err != nil {
		p.T.Fatal(err)
	}
}

// fetcher builds the Go program of testdata.
func fetcher(t *testing.T) []byte {
	t.Helper()
	out := filepath.Join(t.TempDir(), "fetch")
	cmd := exec.Command("go", "build", "-trimpath", "-o", out, "./testdata/fetch")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// TestClients is one server and one sandbox for all clients: the later ones use what the earlier ones install.
func TestClients(t *testing.T) {
	p := start(t)
	for _, c := range []struct {
		name string
		test func(t *testing.T, p *play)
	}{
		{"pip", pip},
		{"npm", npm},
		{"git", git},
		{"fetch", fetch},
		{"refused", refused},
		{"trust", trust},
		{"sockets", sockets},
	} {
		t.Run(c.name, func(t *testing.T) {
			p.T = t
			c.test(t, p)
		})
	}
}

// ok runs a script that must succeed, and returns what it prints.
func (p *play) ok(script string) string {
	p.T.Helper()
	out, end := p.Run(p.box, script)
	if end.GetCode() != 0 || end.GetEnd() != "exited" {
		p.T.Errorf("%s\nended as %s, code %d: %s", script, end.GetEnd(), end.GetCode(), out)
	}
	return strings.TrimSpace(out)
}

// pip installs from an index: through a connection that passes, and with a password that it does not know. What is
// installed is used by the tests that follow.
func pip(_ *testing.T, p *play) {
	p.ok(`python3 -m venv venv && venv/bin/pip install -q --no-compile --disable-pip-version-check --no-cache-dir --index-url https://` + plain + `/simple requests`)
	p.ok(`venv/bin/pip install -q --no-compile --disable-pip-version-check --no-cache-dir --index-url https://anybody:$PASSWORD@` + keyed + `/simple aiohttp`)
	// The twin: without the password, and from an index that is not allowed, there is nothing.
	for _, url := range []string{"https://" + keyed + "/simple", "https://anybody:wrong@" + keyed + "/simple", "https://" + denied + "/simple"} {
		out, end := p.Run(p.box, `venv/bin/pip install -q --no-input --disable-pip-version-check --no-cache-dir --retries 0 --target other --index-url `+url+` attrs`)
		if end.GetCode() == 0 {
			p.T.Errorf("from %s: %s", url, out)
		}
	}
}

func npm(t *testing.T, p *play) {
	const install = `rm -rf n && mkdir n && cd n && npm install --no-audit --no-fund --no-update-notifier --fetch-retries 0 --loglevel error --prefix . --registry https://`
	const use = ` greeting && node -p 'require("greeting")'`
	if out := p.ok(install + plain + use); !strings.HasSuffix(out, "hello from npm") {
		t.Error(out)
	}
	if out := p.ok(install + keyed + ` '--//` + keyed + `/:_authToken='$KEY` + use); !strings.HasSuffix(out, "hello from npm") {
		t.Error(out)
	}
	for _, from := range []string{keyed, denied, ruled} {
		if out, end := p.Run(p.box, install+from+use); end.GetCode() == 0 {
			t.Errorf("from %s: %s", from, out)
		}
	}
}

// git clones and pushes; where the rules name what a clone asks for, it can't push.
func git(t *testing.T, p *play) {
	const commit = ` && cd g && wc -l < numbers && git config user.name a && git config user.email a@example.com && seq 200000 > more && git add . && git commit -q -m two && git push -q origin HEAD:refs/heads/`
	for i, url := range []string{"https://" + plain + "/repo.git", "https://anybody:$PASSWORD@" + keyed + "/repo.git", "-c http.version=HTTP/1.1 https://" + plain + "/repo.git"} {
		if out := p.ok(fmt.Sprintf(`rm -rf g && git clone -q %s g%sb%d`, url, commit, i)); out != "20000" {
			t.Error(out)
		}
	}
	if out := p.ok(`rm -rf g && git -c http.extraHeader="Authorization: Bearer $KEY" clone -q https://` + keyed + `/repo.git g && git -C g branch -r | wc -l`); out != "5" {
		t.Errorf("%s branches", out)
	}
	if out := p.ok(`rm -rf g && git clone -q https://` + ruled + `/repo.git g && wc -l < g/numbers`); out != "20000" {
		t.Error(out)
	}
	out, end := p.Run(p.box, `rm -rf g && git clone -q https://`+ruled+`/repo.git g`+commit+"ruled")
	if end.GetCode() == 0 || !strings.Contains(out, "403") {
		t.Errorf("a push that no rule allows: %s", out)
	}
	if out, end := p.Run(p.box, `GIT_TERMINAL_PROMPT=0 git ls-remote https://`+keyed+`/repo.git`); end.GetCode() == 0 {
		t.Errorf("without the password: %s", out)
	}
}

// fetchers print what $URL holds, with the key $KEY; they fail where the answer is no success.
func fetchers() map[string]string {
	return map[string]string{
		"curl":         `curl -sSf -m 60 -H "Authorization: Bearer $KEY" "$URL"`,
		"curl http1.1": `curl -sSf -m 60 --http1.1 -H "Authorization: Bearer $KEY" "$URL"`,
		"urllib": `python3 -c 'import urllib.request as u, os
print(u.urlopen(u.Request(os.environ["URL"], headers={"Authorization": "Bearer " + os.environ["KEY"]})).read().decode(), end="")'`,
		"requests": `venv/bin/python -c 'import requests, os
r = requests.get(os.environ["URL"], headers={"Authorization": "Bearer " + os.environ["KEY"]}); r.raise_for_status(); print(r.text, end="")'`,
		"aiohttp": `venv/bin/python -c 'import aiohttp, asyncio, os
async def main():
    async with aiohttp.ClientSession(raise_for_status=True) as s, s.get(os.environ["URL"], headers={"Authorization": "Bearer " + os.environ["KEY"]}) as r:
        print(await r.text(), end="")
asyncio.run(main())'`,
		"node fetch": `node -e 'fetch(process.env.URL, {headers: {Authorization: "Bearer " + process.env.KEY}}).then(async r => { process.stdout.write(await r.text()); process.exit(r.ok ? 0 : 1) }, e => { console.error(e); process.exit(1) })'`,
		"node https": `node -e 'require("https").get(process.env.URL, {headers: {Authorization: "Bearer " + process.env.KEY}}, r => { process.exitCode = r.statusCode === 200 ? 0 : 1; r.pipe(process.stdout) }).on("error", e => { console.error(e); process.exit(1) })'`,
		"go":         `./fetch "$URL"`,
		"bare curl":  `env -i PATH="$PATH" curl -sSf -m 60 -H "Authorization: Bearer $KEY" "$URL"`,
		"bare go":    `env -i KEY=$KEY ./fetch "$URL"`,
	}
}

// fetch: every client gets what the rules allow, as it is where nobody looks, and with the key where one is due.
func fetch(t *testing.T, p *play) {
	for name, script := range fetchers() {
		for host, key := range map[string]string{plain: "csm-placeholder-", keyed: value, ruled: "csm-placeholder-"} {
			out := p.ok(`export URL=https://` + host + `/open/fetch; ` + script)
			got := p.site.Last(t)
			if out != "hello from "+host || got.Host != host || !strings.HasPrefix(got.Header.Get("Authorization"), "Bearer "+key) {
				t.Errorf("%s from %s: %s; the host got %s", name, host, out, got.Text())
			}
		}
	}
}

// refused: every client fails where the rules do not allow it, and its end tells why.
func refused(t *testing.T, p *play) {
	before := len(p.site.All())
	for name, script := range fetchers() {
		for url, reason := range map[string]string{"https://" + denied + "/": denied, "https://" + plain + ":8443/": ":8443", "https://" + ruled + "/shut": "/shut"} {
			out, end := p.Run(p.box, `export URL=`+url+`; `+script)
			if end.GetEnd() != "exited" || end.GetCode() == 0 {
				t.Errorf("%s from %s: %s %s", name, url, end.GetEnd(), out)
			}
			found := false
			for _, r := range end.GetRefused() {
				found = found || strings.Contains(r.String(), reason)
			}
			if !found {
				t.Errorf("%s from %s: its end tells of %v", name, url, end.GetRefused())
			}
		}
	}
	if after := len(p.site.All()); after != before {
		t.Errorf("%d requests arrived", after-before)
	}
}

// issuer prints who signed what a host shows.
const issuer = `python3 -c 'import socket, ssl, sys
s = ssl.create_default_context().wrap_socket(socket.create_connection((sys.argv[1], 443)), server_hostname=sys.argv[1])
print(dict(x[0] for x in s.getpeercert()["issuer"])["commonName"])' `

// trust: connections that pass show the host's own certificate, those that are looked into one of the gateway's; and
// a client that trusts neither gets nothing, so that it is the sandbox's settings that the others work by.
func trust(t *testing.T, p *play) {
	for host, want := range map[string]string{plain: "test CA", keyed: "Casemate gateway of server", ruled: "Casemate gateway of server"} {
		if out := p.ok(issuer + host); !strings.HasPrefix(out, want) {
			t.Errorf("%s is signed by %s", host, out)
		}
	}
	for _, without := range []string{
		`curl -sSf -m 60 --cacert /usr/share/ca-certificates/mozilla/ISRG_Root_X1.crt https://`,
		`NODE_EXTRA_CA_CERTS= node -e 'fetch(process.argv[1]).catch(e => process.exit(1))' https://`,
		`SSL_CERT_FILE=/dev/null SSL_CERT_DIR=/var/empty ./fetch https://`,
	} {
		for _, host := range []string{plain, keyed} {
			if out, end := p.Run(p.box, without+host+`/`); end.GetCode() == 0 {
				t.Errorf("%s%s: %s", without, host, out)
			}
		}
	}
}

// sockets: programs that speak no HTTP reach the ports that rules name, by any library, and no others.
func sockets(t *testing.T, p *play) {
	const speak = `python3 -c 'import socket, sys
s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 60); s.sendall(b"over a socket"); print(s.recv(64).decode())' `
	if out := p.ok(speak + socket + " 7000"); out != "over a socket" {
		t.Error(out)
	}
	if out := p.ok(`exec 3<>/dev/tcp/` + socket + `/7000; echo bash >&3; head -n 1 <&3`); out != "bash" {
		t.Error(out)
	}
	if out := p.ok(`node -e 'const c = require("net").connect(7000, "` + socket + `", () => c.write("node")); c.on("data", d => { console.log(String(d)); c.end() })'`); out != "node" {
		t.Error(out)
	}
	for _, to := range []string{socket + " 7001", plain + " 7000", denied + " 7000", world.Web + " 7000"} {
		out, end := p.Run(p.box, speak+to)
		if end.GetCode() == 0 || strings.Contains(out, "timed out") || len(end.GetRefused()) == 0 {
			t.Errorf("%s: %s, refused %v", to, out, end.GetRefused())
		}
	}
}
