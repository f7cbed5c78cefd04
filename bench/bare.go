package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"time"
)

// bare is "bare HTTP" while it runs.
type bare struct {
	server *exec.Cmd
	socket string
}

// maxBare is how many clients it serves at a time.
const maxBare = 8

// newBare starts this program as the server, or returns nil where there is no floor's program.
func newBare(ctx context.Context, f *floor) (*bare, error) {
	self, err := os.Executable()
	if err != nil || f.program == "" {
		return nil, err
	}
	b := &bare{socket: filepath.Join(f.dir, "bare.sock")}
	b.server = exec.CommandContext(ctx, self, "bench", "bare", b.socket, f.program) // the command line's hidden word
	b.server.Stderr = os.Stderr
	ready, err := b.server.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := b.server.Start(); err != nil {
		return nil, fmt.Errorf("start bare HTTP: %w", err)
	}
	if _, err := io.ReadFull(ready, make([]byte, 1)); err != nil {
		b.close()
		return nil, fmt.Errorf("start bare HTTP: %w", err)
	}
	return b, nil
}

func (b *bare) close() {
	_ = b.server.Process.Kill()
	_ = b.server.Wait() // killed
}

// each starts count processes for each of some clients.
func (b *bare) each(ctx context.Context, clients, count int) (Stats, error) {
	begun := time.Now()
	results := make([][]time.Duration, clients)
	err := atOnce(clients, func(i int) error {
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", b.socket)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		r := bufio.NewReader(c)
		results[i], err = repeat(ctx, count, func() error { return bareCall(c, r) })
		return err
	})
	if err != nil {
		return Stats{}, fmt.Errorf("bare HTTP: %w", err)
	}
	took := time.Since(begun)
	all := slices.Concat(results...)
	s := summarize(all)
	s.Rate = float64(len(all)) / took.Seconds()
	return s, nil
}

// bareCall makes one call.
func bareCall(c net.Conn, r *bufio.Reader) error {
	if _, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: bare\r\nContent-Length: 1\r\n\r\nx"); err != nil {
		return err
	}
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New("status " + strconv.Itoa(resp.StatusCode))
	}
	return err
}

// ServeBare is the server of "bare HTTP": it listens on socket and has program start a process for each
// request. It writes a byte to ready once it listens, and ends with ctx.
func ServeBare(ctx context.Context, socket, program string, ready io.Writer) error {
	idle := make(chan net.Conn, maxBare)
	for range maxBare {
		c, err := startBare(ctx, program)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		idle <- c
	}
	l, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return err
	}
	s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(io.LimitReader(r.Body, 1))
		if err == nil {
			c := <-idle
			if _, err = c.Write(body); err == nil {
				_, err = io.ReadFull(c, body)
			}
			idle <- c
		}
		if err != nil {
			w.WriteHeader(http.StatusInternalServerError)
		}
		_, _ = w.Write(body)
	})}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if _, err := ready.Write([]byte{'\n'}); err != nil {
		return err
	}
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// startBare starts the floor's program on the other end of a socket.
func startBare(ctx context.Context, program string) (net.Conn, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socketpair", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "bare"), os.NewFile(uintptr(fds[1]), "bare")
	defer func() { _ = ours.Close(); _ = theirs.Close() }()
	cmd := exec.CommandContext(ctx, program, "serve")
	cmd.Stdin = theirs
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return net.FileConn(ours)
}
