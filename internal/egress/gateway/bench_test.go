package gateway

import (
	"context"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/rules"
	"casemate.dev/internal/linux/netns"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
)

// loopback is the same work between two sockets of the host, without a gateway.
func loopback(b *testing.B) net.Conn {
	b.Helper()
	if err := netns.LoopbackUp(); err != nil {
		b.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = l.Close() })
	go serveBench(l)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	return c
}

// serveBench answers "e": echo bytes, "s": take all, "g": give for ever.
func serveBench(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = c.Close() }()
			var kind [1]byte
			if _, err := io.ReadFull(c, kind[:]); err != nil {
				return
			}
			buf := make([]byte, 64<<10)
			switch kind[0] {
			case 'e':
				for {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					_, _ = c.Write(buf[:n])
				}
			case 's':
				for {
					if _, err := c.Read(buf); err != nil {
						return
					}
				}
			case 'g':
				for {
					if _, err := c.Write(buf); err != nil {
						return
					}
				}
			}
		}()
	}
}

func throughGateway(b *testing.B) net.Conn {
	b.Helper()
	w := world.New(b)
	go serveBench(w.Listen(world.Web + ":7000"))
	box := newBox(b, newGateway(b, nil), "one", policyOf(b, "allow "+world.Web+":7000"))
	c, err := box.dial("tcp", world.Web+":7000")
	if err != nil {
		b.Fatal(err)
	}
	return c
}

func benchRoundTrip(b *testing.B, c net.Conn) {
	defer func() { _ = c.Close() }()
	_, _ = c.Write([]byte("e"))
	buf := make([]byte, 100)
	for b.Loop() {
		_, _ = c.Write(buf)
		if _, err := io.ReadFull(c, buf); err != nil {
			b.Fatal(err)
		}
	}
}

func benchOut(b *testing.B, c net.Conn) {
	defer func() { _ = c.Close() }()
	_, _ = c.Write([]byte("s"))
	buf := make([]byte, 256<<10)
	b.SetBytes(int64(len(buf)))
	for b.Loop() {
		if _, err := c.Write(buf); err != nil {
			b.Fatal(err)
		}
	}
}

func benchIn(b *testing.B, c net.Conn) {
	defer func() { _ = c.Close() }()
	_, _ = c.Write([]byte("g"))
	buf := make([]byte, 256<<10)
	b.SetBytes(int64(len(buf)))
	for b.Loop() {
		if _, err := io.ReadFull(c, buf); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkGateway measures what a connection through the gateway costs, beside loopback in the same run.
func BenchmarkGateway(b *testing.B) {
	for _, way := range []struct {
		name string
		open func(*testing.B) net.Conn
	}{{"loopback", loopback}, {"gateway", throughGateway}} {
		b.Run("roundtrip/"+way.name, func(b *testing.B) { benchRoundTrip(b, way.open(b)) })
		b.Run("out/"+way.name, func(b *testing.B) { benchOut(b, way.open(b)) })
		b.Run("in/"+way.name, func(b *testing.B) { benchIn(b, way.open(b)) })
	}
}

// Sandboxes that do nothing cost little: no thread, and memory that a thousand of them could have.
func TestManyIdle(t *testing.T) {
	world.New(t)
	g := newGateway(t, nil)
	before, threads := memory(), len(tasks(t))
	const n = 200
	for i := range n {
		newBox(t, g, fmt.Sprintf("box%d", i), egress.Policy{})
	}
	used := (memory() - before) / n
	t.Logf("%d bytes of heap and stack each, %d threads more in all", used, len(tasks(t))-threads)
	if used > 300<<10 {
		t.Errorf("a sandbox costs %d bytes", used)
	}
	if more := len(tasks(t)) - threads; more > 20 {
		t.Errorf("%d threads for %d sandboxes", more, n)
	}
}

func memory() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapInuse + m.StackInuse)
}

// stormSize is how many connections a storm begins.
const stormSize = 10000

// 10,000 connections that one sandbox begins and nobody answers do not keep another's waiting, and hold no more of the
// gateway than the limit on connections that are not established lets them. How long the other's take is logged: it
// depends on what else the machine does.
func TestHalfOpenDoesNotSlowOthers(t *testing.T) {
	w := world.New(t)
	echoServer(w, world.Web+":7000")
	g := newGateway(t, nil)
	good := newBox(t, g, "good", policyOf(t, "allow "+world.Web+":7000"))
	// Nobody has this address, so that the gateway's dials hang.
	bad := newBox(t, g, "bad", policyOf(t, "allow 93.184.215.77:*"))
	c, err := good.dial("tcp", world.Web+":7000")
	if err != nil {
		t.Fatal(err)
	}
	quiet := roundTrips(t, c)
	before, routines := memory(), runtime.NumGoroutine()
	most := watchPending(t, g, "bad")
	begun := bad.flood(t, "93.184.215.77", stormSize)
	testenv.Eventually(t, time.Minute, "the limit is reached", func() bool {
		list, err := g.Refused("bad", time.Time{})
		return err == nil && len(list) > 0
	})
	busy := roundTrips(t, c)
	fresh := time.Now()
	c2, err := good.dial("tcp", world.Web+":7000")
	if err != nil {
		t.Fatal(err)
	}
	speak(t, c2, "new")
	more, limit := memory()-before, egress.DefaultLimits().Pending
	t.Logf("%d begun, %d pending at most; round trips p50, p99: %v quiet, %v while they hang; a new connection %v; %d KB and %d goroutines more",
		begun, most(), quiet, busy, time.Since(fresh), more>>10, runtime.NumGoroutine()-routines)
	if begun < stormSize {
		t.Errorf("only %d connections were begun", begun)
	}
	bad.refused(rules.Limit)
	if most() > limit {
		t.Errorf("%d connections were pending, and the limit is %d", most(), limit)
	}
	if more > 32<<20 {
		t.Errorf("the storm holds %d bytes", more)
	}
	// Behind dials that hang, each round trip would take their time limit.
	if busy[0] > dialTimeout/2 {
		t.Errorf("a round trip takes %v meanwhile", busy[0])
	}
}

// The twin: without that limit as many dials hang as first packets are answered at once.
func TestHalfOpenWithoutLimit(t *testing.T) {
	world.New(t)
	g := newGateway(t, nil)
	p := policyOf(t, "allow 93.184.215.77:*")
	p.Limits = egress.Limits{Pending: stormSize, Connections: stormSize}
	bad := newBox(t, g, "bad", p)
	most := watchPending(t, g, "bad")
	bad.flood(t, "93.184.215.77", stormSize)
	testenv.Eventually(t, time.Minute, "more are pending than the limit lets be", func() bool { return most() > 2*egress.DefaultLimits().Pending })
}

// watchPending returns a function that tells how many connections of a sandbox were pending at once, at most.
func watchPending(t *testing.T, g *Gateway, id string) func() int {
	t.Helper()
	g.mu.Lock()
	s := g.sandboxes[id]
	g.mu.Unlock()
	most := 0
	var mu sync.Mutex
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	look := func() int {
		s.mu.Lock()
		n := s.pending
		s.mu.Unlock()
		mu.Lock()
		defer mu.Unlock()
		most = max(most, n)
		return most
	}
	go func() {
		defer close(done)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			<-tick.C
			look()
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return look
}

// roundTrips returns the median of some, and what one in a hundred takes.
func roundTrips(t *testing.T, c net.Conn) [2]time.Duration {
	t.Helper()
	const n = 400
	var all []time.Duration
	for range n {
		began := time.Now()
		speak(t, c, "x")
		all = append(all, time.Since(began))
	}
	slices.Sort(all)
	return [2]time.Duration{all[n/2], all[n-n/100]}
}
