package network

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"casemate.dev/client"
	"casemate.dev/internal/linux/netns"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// A sandbox without a network is as if there were none: no device, no gateway process.
func TestNone(t *testing.T) {
	p := newPlace(t)
	s := p.create()
	if got := s.GetApplied().GetNetwork(); got != "none" {
		t.Errorf("applied %q", got)
	}
	p.expect(s, `grep -c : /proc/net/dev; cat /etc/resolv.conf; wc -l < /proc/net/route`, "1\n1")
	p.expect(s, `python3 -c "
import socket
for f,a in ((2,('93.184.215.14',80)),(10,('2606:2800::1',80))):
  try: socket.socket(f,1).connect(a)
  except OSError as e: print(e.errno)
"`, fmt.Sprintf("%d\n%d", syscall.ENETUNREACH, syscall.ENETUNREACH))
	if _, err := os.Stat(filepath.Join(p.dir, "r", "gateway.json")); err == nil {
		t.Error("a gateway process was started")
	}
	if _, err := p.Network.Set(t.Context(), s.GetId(), &client.NetworkRules{Rules: []string{"allow a.test"}}); client.KindOf(err) != client.FailedPrecondition {
		t.Errorf("giving it rules: %v", err)
	}
}

// curlTimeout is curl's exit code where it gave up waiting: what is refused fails at once.
const curlTimeout = 28

// Programs of every kind work without a proxy variable, and are refused as the rules say; the end of the process
// that met a refusal says what would allow it.
func TestPrograms(t *testing.T) {
	p := newPlace(t)
	seen := p.web("allowed.test", "denied.test")
	s := p.create("allow allowed.test")
	if got := s.GetApplied().GetNetwork(); got != "eth0 to the gateway" {
		t.Errorf("applied %q", got)
	}
	p.expect(s, `curl -sS https://allowed.test/curl`, "hello from allowed.test")
	p.expect(s, `curl -sS http://allowed.test/plain`, "hello from allowed.test")
	p.expect(s, `curl -sS -6 http://allowed.test/six`, "hello from allowed.test")
	p.expect(s, `python3 -c "
import urllib.request
print(urllib.request.urlopen('https://allowed.test/py').read().decode())"`, "hello from allowed.test")
	p.expect(s, `node -e "fetch('https://allowed.test/node').then(r=>r.text()).then(console.log)"`, "hello from allowed.test")
	p.expect(s, `git ls-remote https://allowed.test/x.git; echo $?`, "0")
	for _, script := range []string{
		`git ls-remote https://denied.test/x.git`, `curl -sS --max-time 60 http://denied.test/`, `curl -sS --max-time 60 http://` + world.Other + `/`,
		`curl -sS --max-time 60 --connect-to allowed.test:80:` + world.Web + `:80 http://allowed.test/`,
		`curl -sS --max-time 60 http://allowed.test:8080/`, `curl -sSk --max-time 60 --connect-to denied.test:443:allowed.test:443 https://denied.test/`,
		`curl -sS --max-time 60 -H 'Host: denied.test' http://allowed.test/`,
		`python3 -c "import socket; socket.create_connection(('denied.test',443),5)"`,
		`node -e "fetch('http://denied.test/').catch(e=>process.exit(7))"`,
	} {
		out, end := p.sh(s, script)
		if end.GetCode() == 0 || strings.HasPrefix(script, "curl") && end.GetCode() == curlTimeout {
			t.Errorf("%s: exit code %d: %s", script, end.GetCode(), out)
		}
		if len(end.GetRefused()) == 0 || end.GetRefused()[0].GetReason() == "" {
			t.Errorf("%s: its end carries no refusal", script)
		}
	}
	for _, line := range seen.All() {
		if !strings.HasPrefix(line, "allowed.test") {
			t.Errorf("the server saw %s", line)
		}
	}
	_, end := p.sh(s, `curl -sS http://denied.test/`)
	if r := end.GetRefused(); len(r) != 1 || r[0].GetHint() != "denied.test" || r[0].GetProto() != "dns" {
		t.Errorf("refused %v", r)
	}
	// The twin: what was refused arrives once it is allowed, live.
	if _, err := p.Network.Set(t.Context(), s.GetId(), &client.NetworkRules{Rules: []string{"allow denied.test"}}); err != nil {
		t.Fatal(err)
	}
	p.expect(s, `curl -sS http://denied.test/`, "hello from denied.test")
	p.journalHas(s, "network.opened", "network.closed", "network.refused")
}

func (p *place) journalHas(s *client.Sandbox, types ...string) {
	p.t.Helper()
	for _, want := range types {
		testenv.Eventually(p.t, time.Minute, "the journal has "+want, func() bool {
			list, err := p.Journal.Events(p.t.Context(), s.GetId(), 0, 1000)
			if err != nil {
				p.t.Fatal(err)
			}
			for _, e := range list {
				if e.GetType() == want {
					return true
				}
			}
			return false
		})
	}
}

// Inside, in profile standard with root, the device can't be changed, nor packets made by hand.
func TestDeviceIsOutOfReach(t *testing.T) {
	p := newPlace(t)
	s := p.create("allow 93.184.215.14:*")
	p.expect(s, `python3 - <<'E'
import socket,fcntl,struct,os
def t(name,f):
  try: f(); print(name,'WORKED')
  except OSError as e: print(name,e.errno in (1,2,13,22,30,93,97))
t('raw', lambda: socket.socket(2,3,6))
t('packet', lambda: socket.socket(17,3,0))
s=socket.socket(2,2)
t('down', lambda: fcntl.ioctl(s,0x8914,struct.pack('16sH14s',b'eth0',0,b'')))
t('addr', lambda: fcntl.ioctl(s,0x8916,struct.pack('16sHH4s8s',b'eth0',2,0,socket.inet_aton('198.18.0.9'),b'')))
t('tun', lambda: os.open('/dev/net/tun',os.O_RDWR))
t('rename', lambda: fcntl.ioctl(s,0x8923,struct.pack('16s16s',b'eth0',b'x')))
t('mark', lambda: s.setsockopt(1,36,1))
t('device', lambda: s.setsockopt(0,19,1))
t('write', lambda: open('/etc/resolv.conf','w'))
E`, "raw True\npacket True\ndown True\naddr True\ntun True\nrename True\nmark True\ndevice True\nwrite True")
}

// clientScript keeps one connection and says each second's echo.
const clientScript = `exec python3 -u -c "
import socket,time
s=socket.create_connection(('` + world.Web + `',7000))
n=0
while True:
  s.sendall(b'x'); assert s.recv(1)==b'x'
  n+=1
  open('/tmp/n','w').write(str(n))
  time.sleep(.02)
"`

func (p *place) count(s *client.Sandbox) int {
	p.t.Helper()
	out, _ := p.sh(s, `cat /tmp/n 2>/dev/null || echo 0`)
	var n int
	_, _ = fmt.Sscan(out, &n)
	return n
}

func (p *place) grows(s *client.Sandbox) {
	p.t.Helper()
	from := p.count(s)
	testenv.Eventually(p.t, time.Minute, "the connection carries on", func() bool { return p.count(s) > from+3 })
}

// A connection outlives the server, which finds its gateway again; rules hold meanwhile and afterwards.
func TestServerRestart(t *testing.T) {
	p := newPlace(t)
	p.echo(world.Web + ":7000")
	s := p.create("allow " + world.Web + ":7000")
	proc, err := p.Processes.Start(t.Context(), s.GetId(), &client.ProcessSpec{Argv: []string{"bash", "-c", clientScript}})
	if err != nil {
		t.Fatal(err)
	}
	p.grows(s)
	before := p.gatewayPID()
	p.stop(false)
	p.start()
	if now := p.gatewayPID(); now != before {
		t.Errorf("the gateway is %d, was %d", now, before)
	}
	p.grows(s)
	if q, err := p.Processes.Get(t.Context(), s.GetId(), proc.GetId()); err != nil || q.GetEnd() != "" {
		t.Errorf("the process ended: %v %v", q, err)
	}
	p.expect(s, `curl -sS --max-time 60 http://`+world.Other+`/ 2>/dev/null; echo $?`, "7")
	if _, err := p.Network.Set(t.Context(), s.GetId(), &client.NetworkRules{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "the connection is cut by the new rules", func() bool {
		q, err := p.Processes.Get(t.Context(), s.GetId(), proc.GetId())
		return err == nil && q.GetEnd() == "exited"
	})
}

func (p *place) gatewayPID() int {
	p.t.Helper()
	b, err := os.ReadFile(filepath.Join(p.dir, "r", "gateway.json"))
	if err != nil {
		p.t.Fatal(err)
	}
	var r struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal(b, &r); err != nil {
		p.t.Fatal(err)
	}
	return r.PID
}

// A gateway that is killed takes its connections along; the next one takes up every device, with its rules.
func TestGatewayDies(t *testing.T) {
	p := newPlace(t)
	p.web("allowed.test")
	a, b := p.create("allow allowed.test"), p.create()
	c := p.create("deny allowed.test", "allow @open")
	p.expect(a, `curl -sS http://allowed.test/`, "hello from allowed.test")
	before := p.gatewayPID()
	if err := syscall.Kill(before, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "another gateway runs", func() bool { return p.gatewayPID() != before })
	testenv.Eventually(t, time.Minute, "it serves the sandbox", func() bool {
		out, _ := p.sh(a, `curl -sS --max-time 60 http://allowed.test/`)
		return out == "hello from allowed.test"
	})
	p.expect(c, `curl -sS --max-time 60 http://allowed.test/ 2>/dev/null; echo $?`, "6")
	p.expect(b, `curl -sS --max-time 60 http://allowed.test/ 2>/dev/null; echo $?`, "6")
	p.journalHas(a, "gap")
}

// A device that is not the one that was made, as whoever had rights over it inside could bring about, is taken up by no
// gateway: the sandbox ends, and says why. What a name alone would open, package tap's tests show.
func TestDeviceWasExchanged(t *testing.T) {
	p := newPlace(t)
	p.web("allowed.test")
	bad, good := p.create("allow allowed.test"), p.create("allow allowed.test")
	mark := fmt.Sprintf("427217.%d", os.Getpid()) // a time that nothing else sleeps for
	if _, err := p.Processes.Start(t.Context(), bad.GetId(), &client.ProcessSpec{Argv: []string{"sleep", mark}}); err != nil {
		t.Fatal(err)
	}
	var pid int
	testenv.Eventually(t, time.Minute, "its process is seen", func() bool {
		all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, path := range all {
			if b, err := os.ReadFile(path); err == nil && string(b) == "sleep\x00"+mark+"\x00" {
				pid, _ = strconv.Atoi(strings.Split(path, "/")[2])
			}
		}
		return pid != 0
	})
	ns, err := netns.Of(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ns.Close() }()
	err = netns.In(ns, func() error {
		h, err := netlink.NewHandle(syscall.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		link, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		return h.LinkDel(link)
	})
	if err != nil {
		t.Fatal(err)
	}
	before := p.gatewayPID()
	if err := syscall.Kill(before, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "the sandbox ends", func() bool {
		s, err := p.Sandboxes.Get(t.Context(), bad.GetId())
		return err == nil && s.GetState() == "stopped" && s.GetEndReason() == "lost" && strings.Contains(s.GetEndDetail(), "not the one that was made")
	})
	// The twin: one whose device is its own goes on.
	testenv.Eventually(t, time.Minute, "the other is served", func() bool {
		out, _ := p.sh(good, `curl -sS --max-time 60 http://allowed.test/`)
		return out == "hello from allowed.test"
	})
}

// devices counts the devices that a process holds.
func devices(pid int) int {
	n := 0
	fds, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	for _, fd := range fds {
		if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name())); to == "/dev/net/tun" {
			n++
		}
	}
	return n
}

// The gateway process holds no right and no file that a packet could make it use.
func TestGatewayPosture(t *testing.T) {
	p := newPlace(t)
	p.create("allow a.test")
	pid := p.gatewayPID()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(status)) {
		k, v, _ := strings.Cut(line, ":")
		fields[k] = strings.TrimSpace(v)
	}
	for k, want := range map[string]string{
		"CapEff": "0000000000000000", "CapPrm": "0000000000000000", "CapInh": "0000000000000000", "CapAmb": "0000000000000000",
		"NoNewPrivs": "1", "Seccomp": "2", "Groups": "",
	} {
		if fields[k] != want {
			t.Errorf("%s is %q", k, fields[k])
		}
	}
	for _, id := range strings.Fields(fields["Uid"] + " " + fields["Gid"]) {
		if len(id) != 10 {
			t.Errorf("id %s is not of the range for sandboxes", id)
		}
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, fd.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		switch {
		case to == "/dev/net/tun", to == os.DevNull, strings.HasPrefix(to, "socket:"), strings.HasPrefix(to, "anon_inode:"), strings.HasSuffix(to, "/gateway.log"):
		default:
			t.Errorf("it holds %s", to)
		}
	}
	if n := devices(pid); n != 1 {
		t.Errorf("it holds %d devices", n)
	}
	other := p.create("allow b.test")
	if n := devices(pid); n != 2 {
		t.Errorf("it holds %d devices, of two sandboxes", n)
	}
	if _, err := p.Sandboxes.Delete(t.Context(), other.GetId()); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "it has let go of the device of a sandbox that has gone", func() bool { return devices(pid) == 1 })
	// Every thread is behind the walls.
	threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, th := range threads {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/status", pid, th.Name()))
		if !strings.Contains(string(b), "Seccomp:\t2") || !strings.Contains(string(b), "NoNewPrivs:\t1") {
			t.Errorf("thread %s is outside", th.Name())
		}
	}
}

// listenScript takes TCP and UDP on every address, and writes what comes to a file.
const listenScript = `exec python3 -u - <<'E'
import socket, threading
def note(text):
    with open('/tmp/heard', 'a') as f: f.write(text + '\n')
t = socket.create_server(('::', 7000), family=socket.AF_INET6, dualstack_ipv6=True)
u = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM); u.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0); u.bind(('::', 7000))
def packets():
    while True: note('udp ' + u.recv(64).decode())
threading.Thread(target=packets, daemon=True).start()
open('/tmp/listens', 'w')
while True:
    c, _ = t.accept(); note('tcp ' + c.recv(64).decode()); c.close()
E`

// knockScript sends a word to every address that could be a sandbox's, its own among them.
const knockScript = `python3 - <<'E'
import socket, sys
for a in ('198.18.0.1', '198.18.0.2', '198.18.0.3', '198.19.0.77', '255.255.255.255', '224.0.0.1', 'fdca:5e00:5a9d::1', 'fdca:5e00:5a9d::2', 'fdca:5e00:5a9d::3', 'fe80::1%%eth0', 'ff02::1%%eth0', 'fc00::1'):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            to = socket.getaddrinfo(a, 7000, type=kind)[0]
            s = socket.socket(to[0], kind); s.settimeout(5); s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            s.connect(to[4]); s.sendall(b'%s'); s.close()
        except OSError: pass
E`

// F06 between real sandboxes: what one listens on another can't reach, whatever both are allowed.
func TestNeighbours(t *testing.T) {
	p := newPlace(t)
	open := []string{"allow @open", "allow 0.0.0.0/0:*", "allow [::/0]:*", "allow udp://0.0.0.0/0:*", "allow 198.18.0.0/15:*", "allow udp://198.18.0.0/15:*", "allow [fdca:5e00:5a9d::/48]:*"}
	listener, other := p.create(open...), p.create(open...)
	if _, err := p.Processes.Start(t.Context(), listener.GetId(), &client.ProcessSpec{Argv: []string{"bash", "-c", listenScript}}); err != nil {
		t.Fatal(err)
	}
	heard := func() string { out, _ := p.sh(listener, `cat /tmp/heard 2>/dev/null`); return out }
	testenv.Eventually(t, time.Minute, "it listens", func() bool { out, _ := p.sh(listener, `ls /tmp/listens 2>/dev/null`); return out != "" })
	if out, _ := p.sh(other, fmt.Sprintf(knockScript, "stranger")); out != "" {
		t.Errorf("the knocking ends with %s", out)
	}
	// The twin: the same from inside is heard, and behind it nothing of the other's that was under way.
	p.sh(listener, fmt.Sprintf(knockScript, "itself"))
	testenv.Eventually(t, time.Minute, "it hears itself, over TCP and UDP", func() bool {
		return strings.Contains(heard(), "tcp itself") && strings.Contains(heard(), "udp itself")
	})
	if text := heard(); strings.Contains(text, "stranger") {
		t.Errorf("another sandbox was heard: %s", text)
	}
}

// Sets are files of the administrator's, and what can't be used says which line it is.
func TestSets(t *testing.T) {
	p := newPlace(t)
	p.web("allowed.test", "denied.test")
	dir := filepath.Join(p.dir, "n")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"team.rules": "# ours\nallowed.test\n\nother.test:8443\n", "broken.rules": "a.test\nhttp://\n", "README": "x"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	sets, err := p.Network.Sets(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]*client.NetworkSet{}
	for _, s := range sets {
		got[s.GetName()] = s
	}
	if len(got) != 4 || len(got["open"].GetRules()) != 1 || len(got["registries"].GetRules()) == 0 || strings.Join(got["team"].GetRules(), " ") != "allowed.test other.test:8443" ||
		!strings.Contains(got["broken"].GetFault(), "line 2 of the set") {
		t.Errorf("sets %v", sets)
	}
	s := p.create("allow @team")
	p.expect(s, `curl -sS http://allowed.test/`, "hello from allowed.test")
	p.expect(s, `curl -sS http://denied.test/ 2>/dev/null; echo $?`, "6") // the twin
	for set, want := range map[string]string{"broken": "line 2 of the set", "nobodys": "no set"} {
		_, err := p.Sandboxes.Create(t.Context(), &client.CreateRequest{Network: &client.NetworkRules{Rules: []string{"allow @" + set}}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("@%s: %v", set, err)
		}
	}
}

// A sandbox whose create says nothing of a network gets its template's, and whoever looks is told.
func TestTemplateDefault(t *testing.T) {
	p := newPlace(t)
	p.web("allowed.test")
	rules := &client.NetworkRules{Rules: []string{"allow allowed.test"}}
	if _, err := p.Network.SetTemplate(t.Context(), "host", rules); err != nil {
		t.Fatal(err)
	}
	s := p.create()
	p.expect(s, `curl -sS http://allowed.test/`, "hello from allowed.test")
	e, err := p.Network.Explain(t.Context(), s.GetId(), "http://allowed.test/", "")
	if err != nil || !e.GetAllowed() || e.GetTemplate() != "host" {
		t.Errorf("explained: %v %v", e, err)
	}
	if got, err := p.Sandboxes.Get(t.Context(), s.GetId()); err != nil || got.GetNetwork().GetTemplate() != "host" {
		t.Errorf("inspected: %v %v", got.GetNetwork(), err)
	}
	none, err := p.Sandboxes.Create(t.Context(), &client.CreateRequest{NoNetwork: true})
	if err != nil {
		t.Fatal(err)
	}
	p.expect(none, `grep -c : /proc/net/dev`, "1")
	// Other rules, live, are the sandbox's own.
	st, err := p.Network.Set(t.Context(), s.GetId(), &client.NetworkRules{})
	if err != nil || st.GetNetwork().GetTemplate() != "" {
		t.Errorf("its own: %v %v", st, err)
	}
	p.expect(s, `curl -sS http://allowed.test/ 2>/dev/null; echo $?`, "6")
}
