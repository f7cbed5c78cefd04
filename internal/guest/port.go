package guest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// dialLimit bounds connecting to a port: it is on this very machine.
const dialLimit = 5 * time.Second

const (
	// maxDials bounds the connections to ports at one time.
	maxDials = 256
	// wireQueue and portQueue bound what the kernel queues on a connection whose other end does not read;
	// it takes about twice that. By default it is 200 KB on a Unix socket and megabytes on TCP, charged to
	// the guest: 300 clients of a port that stood still ended a sandbox.
	wireQueue = 32 << 10
	portQueue = 64 << 10
	// maxWide is how many connections to the server may have the kernel's usual queue, which carries a
	// quarter more.
	maxWide = 64
)

// narrow bounds what the kernel queues on a connection to the server, unless it is one of few. It costs a
// system call, so it is for connections that carry much; done says that this one is through.
func (g *Guest) narrow(c net.Conn) (done func()) {
	if g.wide.Add(1) > maxWide {
		if u, ok := c.(*net.UnixConn); ok {
			_ = u.SetWriteBuffer(wireQueue) // fails only on a connection that is gone
		}
	}
	return func() { g.wide.Add(-1) }
}

// narrowPort does so on both ways of a connection to a port. Before the connection is made, since the
// window that is agreed on then depends on it (tcp(7)).
func narrowPort(_, _ string, raw syscall.RawConn) error {
	var err error
	cerr := raw.Control(func(fd uintptr) {
		err = errors.Join(
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, portQueue),
			unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, portQueue))
	})
	return errors.Join(cerr, err)
}

// dial connects to a TCP port of the sandbox and joins it with the call's connection.
func (g *Guest) dial(c *guestwire.Conn, call guestwire.Call) error {
	var r guestwire.DialRequest
	if err := guestwire.Unmarshal(call.Body, &r); err != nil {
		return badBody(err)
	}
	port, err := dialPort(r)
	if err != nil {
		return err
	}
	return g.joinPort(c, port)
}

// joinPort joins a connection of the sandbox's ports, which it closes, with the call's.
func (g *Guest) joinPort(c *guestwire.Conn, port net.Conn) error {
	defer port.Close()
	if g.dials.Add(1) > maxDials {
		g.dials.Add(-1)
		return errs.New(errs.ResourceExhausted, "%d connections of the sandbox's ports are open already", maxDials)
	}
	defer g.dials.Add(-1)
	defer g.narrow(c.Conn)()
	if err := c.Reply(nil); err != nil {
		return err
	}
	join(c.Conn, port, &g.chunks)
	return nil
}

func dialPort(r guestwire.DialRequest) (net.Conn, error) {
	if r.Network != "" && r.Network != "tcp" {
		return nil, errs.New(errs.InvalidArgument, "unknown network: %s", quote(r.Network))
	}
	if r.Port < 1 || r.Port > 65535 {
		return nil, errs.New(errs.InvalidArgument, "no such port: %d", r.Port)
	}
	hosts := []string{"127.0.0.1", "::1"}
	if r.Host != "" {
		// A name would be looked up by the guest, through files that the sandbox's code wrote.
		if net.ParseIP(r.Host) == nil {
			return nil, errs.New(errs.InvalidArgument, "not an address: %s", quote(r.Host))
		}
		hosts = []string{r.Host}
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialLimit)
	defer cancel()
	var all error
	for _, host := range hosts {
		conn, err := (&net.Dialer{Control: narrowPort}).DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(r.Port)))
		if err == nil {
			return conn, nil
		}
		all = errors.Join(all, err)
	}
	if errors.Is(all, unix.ECONNREFUSED) {
		return nil, errs.Wrap(all, errs.Unavailable, "nothing listens on port %d", r.Port)
	}
	return nil, errs.Wrap(all, errs.Unavailable, "port %d can't be reached", r.Port)
}

// join moves bytes both ways until both are done. The end of one way is handed on as such, so that
// protocols which close one way only work.
//
// It reads and writes rather than let Go splice(2), whose pipes would pile up: for each way two
// descriptors and a buffer of the kernel's, until two garbage collections later. A connection on
// which nothing moves holds no buffer.
func join(a, b net.Conn, lend *chunks) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		oneWay(b, a, lend)
	}()
	oneWay(a, b, lend)
	<-done
}

func oneWay(dst, src net.Conn, lend *chunks) {
	err := move(dst, src, lend)
	if half, ok := dst.(interface{ CloseWrite() error }); ok && err == nil {
		_ = half.CloseWrite()
		return
	}
	// After an error neither way is of use.
	_ = dst.Close()
	_ = src.Close()
}

// move copies until src ends.
func move(dst, src net.Conn, lend *chunks) error {
	s, ok := src.(syscall.Conn)
	if !ok {
		_, err := io.Copy(dst, src)
		return err
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	for {
		buf, n := receive(raw, lend, func(bool) {})
		if buf == nil || n < 0 {
			if buf != nil {
				lend.put(buf)
			}
			return net.ErrClosed
		}
		if n > 0 {
			_, err = dst.Write(buf[:n])
		}
		lend.put(buf)
		if n == 0 || err != nil {
			return err
		}
	}
}

// maxSocketTable bounds /proc/net/tcp as far as it is read: 150 bytes for each socket.
const maxSocketTable = 16 << 20

// listenings returns the TCP ports that something listens on.
func listenings() ([]int, error) {
	var ports []int
	for _, name := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		f, err := os.Open(name)
		if err != nil {
			if errors.Is(err, os.ErrNotExist) {
				continue // no IPv6
			}
			return nil, err
		}
		b, err := io.ReadAll(io.LimitReader(f, maxSocketTable))
		_ = f.Close()
		if err != nil {
			return nil, err
		}
		ports = append(ports, parseListenings(b)...)
	}
	slices.Sort(ports)
	return slices.Compact(ports), nil
}

// parseListenings reads proc_pid_net(5): "sl local_address rem_address st …", addresses as
// HEX:PORT, and st 0A is TCP_LISTEN.
func parseListenings(b []byte) []int {
	var ports []int
	for line := range bytes.SplitSeq(b, []byte("\n")) {
		f := bytes.Fields(line)
		if len(f) < 4 || string(f[3]) != "0A" {
			continue
		}
		_, hex, ok := bytes.Cut(f[1], []byte(":"))
		if !ok {
			continue
		}
		if port, err := strconv.ParseUint(string(hex), 16, 16); err == nil {
			ports = append(ports, int(port))
		}
	}
	return ports
}
