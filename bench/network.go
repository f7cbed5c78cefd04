package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// probe is a Python program that talks to a server of the bench and prints what it measured, as JSON: the
// times of requests on one kept-alive connection in seconds, and bytes a second one way and the other.
const probe = `
import http.client, json, socket, sys, time
web, sink, source, rounds, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
host, port = web.split(":")
c = http.client.HTTPConnection(host, int(port))
times = []
for _ in range(rounds + 20):
    t = time.perf_counter()
    c.request("GET", "/")
    c.getresponse().read()
    times.append(time.perf_counter() - t)
c.close()
def out():
    s = socket.create_connection((host, sink))
    b = bytes(1 << 20)
    t = time.perf_counter()
    for _ in range(size >> 20):
        s.sendall(b)
    s.shutdown(socket.SHUT_WR)
    s.recv(1)
    return size / (time.perf_counter() - t)
def back():
    s = socket.create_connection((host, source))
    b = bytearray(1 << 20)
    s.sendall(str(size).encode() + b"\n")
    n, t = 0, time.perf_counter()
    while n < size:
        got = s.recv_into(b)
        if not got: raise EOFError
        n += got
    return size / (time.perf_counter() - t)
print(json.dumps({"times": times[20:], "out": out(), "back": back()}))
`

// probed is what the probe prints.
type probed struct {
	Times     []float64 `json:"times"`
	Out, Back float64
}

func (p probed) stats() Stats {
	all := make([]time.Duration, len(p.Times))
	for i, t := range p.Times {
		all[i] = time.Duration(t * float64(time.Second))
	}
	return summarize(all)
}

// rateShare is the part of loopback's rate, in percent, that one connection through the gateway shall reach.
const rateShare = 20

// gatewayRow measures what the gateway adds: the same program with the same servers, on one of the host's own
// addresses, once on the host, where that is loopback, and once in a sandbox that may reach it, in turns.
func gatewayRow(ctx context.Context, b *bench) (Row, error) {
	s, err := newServers()
	if err != nil || s == nil {
		return Row{Unit: "ms", Note: "this host has no address beside loopback's, so that no sandbox could reach a server on it"}, err
	}
	defer s.close()
	req := &client.CreateRequest{
		Isolation: b.o.Isolation, Template: b.o.Template, Profile: b.o.Profile,
		Labels: map[string]string{"casemate": "bench"}, Lifetime: durationpb.New(30 * time.Minute),
		Network: &client.NetworkRules{Rules: []string{"allow " + s.addr + ":*"}},
	}
	sb, err := b.c.Sandboxes.Create(ctx, req)
	if err != nil {
		return Row{}, err
	}
	defer func() { _ = b.delete(ctx, sb.GetId()) }()
	var inside, host probed
	args := s.args(b.rounds(1000), int64(b.rounds(512))<<20)
	for range 3 {
		got, err := onHost(ctx, args)
		if err != nil {
			return Row{}, err
		}
		host = best(host, got)
		if got, err = b.inSandbox(ctx, sb.GetId(), args); err != nil {
			return Row{}, err
		}
		inside = best(inside, got)
	}
	in, out := inside.stats(), host.stats()
	r := Row{Unit: "ms", Stats: in, Peers: map[string]Stats{"loopback": out}}
	const most = 0.5
	r.budget("adds ≤ 0.5 ms to a request, p50", in.P50-out.P50, most, most)
	r.atLeast("MB/s out ≥ 20 % of loopback", inside.Out/1e6, rateShare*host.Out/1e8, host.Out/1e6)
	r.atLeast("MB/s back ≥ 20 % of loopback", inside.Back/1e6, rateShare*host.Back/1e8, host.Back/1e6)
	err = b.addHTTPS(ctx, &r)
	return r, err
}

// addHTTPS adds what HTTPS measures to a row.
func (b *bench) addHTTPS(ctx context.Context, r *Row) error {
	if b.o.HTTPS == nil {
		r.Note = "HTTPS is left out: it is measured in a fake internet, which only root can make"
		return nil
	}
	more, err := b.o.HTTPS(ctx)
	if err != nil {
		return err
	}
	maps.Copy(r.Peers, more.Peers)
	r.Budgets = append(r.Budgets, more.Budgets...)
	r.Note = more.Note
	return nil
}

func onHost(ctx context.Context, args []string) (probed, error) {
	out, err := exec.CommandContext(ctx, "/usr/bin/python3", args...).Output() //nolint:forbidigo // the measure, not a sandbox
	if err != nil {
		return probed{}, fmt.Errorf("probe on the host: %w", err)
	}
	return parseProbe(out)
}

func (b *bench) inSandbox(ctx context.Context, id string, args []string) (probed, error) {
	spec := &client.ProcessSpec{Argv: append([]string{"/usr/bin/python3"}, args...), Timeout: durationpb.New(5 * time.Minute)}
	res, err := b.c.Processes.Execute(ctx, id, spec, nil)
	if err != nil {
		return probed{}, err
	}
	if p := res.GetProcess(); p.GetEnd() != "exited" || p.GetCode() != 0 {
		return probed{}, fmt.Errorf("probe in a sandbox: %s, code %d: %s", p.GetEnd(), p.GetCode(), res.GetStderr())
	}
	return parseProbe(res.GetStdout())
}

func parseProbe(out []byte) (probed, error) {
	var p probed
	err := json.Unmarshal(out, &p)
	if err == nil && len(p.Times) == 0 {
		err = errors.New("the probe measured nothing")
	}
	return p, err
}

// servers are what the probe talks to.
type servers struct {
	addr string
	list [3]net.Listener // HTTP, one that takes bytes, one that gives them
}

// newServers listens on one of the host's own addresses; nil where it has none but loopback.
func newServers() (*servers, error) {
	addr, err := ownAddress()
	if err != nil || addr == "" {
		return nil, err
	}
	s := &servers{addr: addr}
	for i := range s.list {
		if s.list[i], err = net.Listen("tcp", net.JoinHostPort(addr, "0")); err != nil {
			s.close()
			return nil, err
		}
	}
	web := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "hello")
	})}
	go func() { _ = web.Serve(s.list[0]) }()
	go acceptAll(s.list[1], func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	go acceptAll(s.list[2], give)
	return s, nil
}

func ownAddress() (string, error) {
	list, err := net.InterfaceAddrs()
	if err != nil {
		return "", err
	}
	for _, a := range list {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			return n.IP.String(), nil
		}
	}
	return "", nil
}

func acceptAll(l net.Listener, serve func(net.Conn)) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			serve(c)
			_ = c.Close()
		}()
	}
}

// give sends as many bytes as the other side asks for in its first line.
func give(c net.Conn) {
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return
	}
	n, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	buf := make([]byte, 1<<20)
	for err == nil && n > 0 {
		var wrote int
		wrote, err = c.Write(buf[:min(n, int64(len(buf)))])
		n -= int64(wrote)
	}
}

// args are the probe's, for as many requests and bytes.
func (s *servers) args(requests int, size int64) []string {
	port := func(i int) string { return strconv.Itoa(s.list[i].Addr().(*net.TCPAddr).Port) }
	return []string{"-c", probe, s.list[0].Addr().String(), port(1), port(2), strconv.Itoa(requests), strconv.FormatInt(size, 10)}
}

func (s *servers) close() {
	for _, l := range s.list {
		if l != nil {
			_ = l.Close()
		}
	}
}

// best keeps the best of two runs, as the floor does: what slows the machine down has no part in the answer.
func best(a, b probed) probed {
	if a.Times == nil || b.stats().P50 < a.stats().P50 {
		a.Times = b.Times
	}
	a.Out, a.Back = max(a.Out, b.Out), max(a.Back, b.Back)
	return a
}
