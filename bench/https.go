package bench

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/fakenet"
)

// The names of the fake internet: one whose connections are passed through, and one on whose requests a key is put.
const (
	passedName = "passed.test"
	keyedName  = "keyed.test"
)

// httpsProbe asks a host again and again over one connection and prints the times in seconds, as JSON. With an
// address it goes there, without asking a name server. The first twenty are not counted.
const httpsProbe = `
import http.client, json, os, socket, ssl, subprocess, sys, time
way, name, address, ca, rounds = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
key = "Bearer " + os.environ.get("KEY", "none")
if way == "h2":
    argv = ["curl", "-sS", "-o", "/dev/null", "-w", "%{time_total} %{http_version} %{http_code}\\n", "--http2", "-H", "Authorization: " + key]
    argv += ["--resolve", name + ":443:" + address, "--cacert", ca] if address else []
    out = subprocess.run(argv + ["https://%s/?[1-%d]" % (name, rounds + 20)], check=True, stdout=subprocess.PIPE).stdout.split(b"\n")
    lines = [l.split() for l in out if l]
    assert all(l[1:] == [b"2", b"200"] for l in lines), lines[0]
    times = [float(l[0]) for l in lines]
else:
    if address:
        lookup = socket.getaddrinfo
        socket.getaddrinfo = lambda host, *a, **k: lookup(address, *a, **k)
    c = http.client.HTTPSConnection(name, context=ssl.create_default_context(cafile=ca or None))
    times = []
    for _ in range(rounds + 20):
        t = time.perf_counter()
        c.request("GET", "/", headers={"Authorization": key})
        r = c.getresponse()
        r.read()
        assert r.status == 200, r.status
        times.append(time.perf_counter() - t)
print(json.dumps({"times": times[20:]}))
`

// Internet is where HTTPS measures: a fake internet, and a server in it which trusts its authority.
type Internet struct {
	Net    *fakenet.Net
	Client *client.Client
	// CAFile holds the authority's certificate.
	CAFile string
	// Gateway is the process id of the server's gateway, once a sandbox has a network.
	Gateway func() (int, error)
}

// HTTPS measures what a request over a kept-alive connection with TLS costs: directly, passed through the gateway, and
// looked into with a credential put on it, in turns. Its peers and budgets belong to the row "gateway".
func HTTPS(ctx context.Context, o Options, i Internet) (Row, error) {
	b := &bench{o: o, c: i.Client}
	h := &https{bench: b, i: i}
	if err := h.open(ctx); err != nil {
		return Row{}, err
	}
	defer h.close()
	rounds := b.rounds(1000)
	all, cpu := map[string]probed{}, map[string]float64{}
	for range 3 {
		for _, w := range h.ways() {
			got, used, err := h.once(ctx, w, rounds)
			if err != nil {
				return Row{}, fmt.Errorf("%s: %w", w.name, err)
			}
			all[w.name] = best(all[w.name], got)
			if cpu[w.name] == 0 || used < cpu[w.name] {
				cpu[w.name] = used
			}
		}
	}
	r := Row{Peers: map[string]Stats{}}
	for name, p := range all {
		r.Peers[name] = p.stats()
	}
	const most = 1.0
	r.budget("with a credential adds ≤ 1 ms, p50", r.Peers["HTTPS, credential"].P50-r.Peers["HTTPS, direct"].P50, most, most)
	r.budget("the same over HTTP/2", r.Peers["HTTP/2, credential"].P50-r.Peers["HTTP/2, direct"].P50, most, most)
	var used []string
	for _, name := range slices.Sorted(maps.Keys(cpu)) {
		if cpu[name] > 0 {
			used = append(used, fmt.Sprintf("%s %.2f", name, cpu[name]))
		}
	}
	r.Note = "ms of the gateway's CPU for a request: " + strings.Join(used, "; ")
	return r, nil
}

// way is one way to the same web server.
type way struct {
	name, probe, host string
	inside            bool
}

func (h *https) ways() []way {
	return []way{
		{"HTTPS, direct", "h1", passedName, false},
		{"HTTPS, passed through", "h1", passedName, true},
		{"HTTPS, credential", "h1", keyedName, true},
		{"HTTP/2, direct", "h2", passedName, false},
		{"HTTP/2, credential", "h2", keyedName, true},
	}
}

// https is the web server and the sandbox of one measurement.
type https struct {
	*bench
	i     Internet
	srv   *http.Server
	box   string
	value string
	keyed atomic.Int64 // requests that held the key
}

func (h *https) open(ctx context.Context) (err error) {
	var r [12]byte
	_, _ = rand.Read(r[:]) // never fails: crypto/rand.Read
	h.value = hex.EncodeToString(r[:])
	if err := h.serve(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	if _, err = h.c.Secrets.Set(ctx, &client.SetSecretRequest{Name: "bench", Value: h.value}); err != nil {
		return err
	}
	if _, err = h.c.Secrets.Bind(ctx, "bench", &client.SecretBinding{
		For: &client.SandboxSelector{All: true}, Hosts: []string{keyedName}, Scheme: "bearer", Env: "KEY",
	}); err != nil {
		return err
	}
	sb, err := h.c.Sandboxes.Create(ctx, &client.CreateRequest{
		Isolation: h.o.Isolation, Lifetime: durationpb.New(30 * time.Minute),
		Network: &client.NetworkRules{Rules: []string{"allow " + passedName, "allow " + keyedName}},
	})
	h.box = sb.GetId()
	return err
}

// serve opens the web server, which counts the requests that hold the key.
func (h *https) serve() error {
	conf, err := h.i.Net.TLS(passedName, keyedName)
	if err != nil {
		return err
	}
	l, err := h.i.Net.Listen(fakenet.Web + ":443")
	if err != nil {
		return err
	}
	for _, name := range []string{passedName, keyedName} {
		h.i.Net.Name(name, fakenet.Web)
	}
	conf.NextProtos = []string{"h2", "http/1.1"}
	h.srv = &http.Server{
		ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") == "Bearer "+h.value {
				h.keyed.Add(1)
			}
			_, _ = w.Write([]byte("hello"))
		}),
	}
	go func() { _ = h.srv.Serve(tls.NewListener(l, conf)) }()
	return nil
}

func (h *https) close() { _ = h.srv.Close() }

// once takes one way and returns the CPU time of the gateway for a request too, in milliseconds.
func (h *https) once(ctx context.Context, w way, rounds int) (probed, float64, error) {
	args := []string{"-c", httpsProbe, w.probe, w.host, fakenet.Web, h.i.CAFile, strconv.Itoa(rounds)}
	if !w.inside {
		got, err := onHost(ctx, args)
		return got, 0, err
	}
	args[4], args[5] = "", ""
	keyed := h.keyed.Load()
	pid, err := h.i.Gateway()
	if err != nil {
		return probed{}, 0, err
	}
	before, err := cpuTime(pid)
	if err != nil {
		return probed{}, 0, err
	}
	got, err := h.inSandbox(ctx, h.box, args)
	if err != nil {
		return probed{}, 0, err
	}
	after, err := cpuTime(pid)
	if err == nil && w.host == keyedName && h.keyed.Load()-keyed < int64(rounds) {
		err = errors.New("the credential was not put on every request")
	}
	return got, milliseconds(after-before) / float64(rounds), err
}

// cpuTime is how long a process has used the CPUs, by the clock of ticks that the kernel counts in (proc(5)).
func cpuTime(pid int) (time.Duration, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	text := string(raw)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const user, system, tick = 11, 12, 10 * time.Millisecond // after the name; USER_HZ is 100 everywhere
	if len(fields) <= system {
		return 0, fmt.Errorf("/proc/%d/stat is cut off", pid)
	}
	u, uerr := strconv.ParseInt(fields[user], 10, 64)
	s, serr := strconv.ParseInt(fields[system], 10, 64)
	return time.Duration(u+s) * tick, errors.Join(uerr, serr)
}
