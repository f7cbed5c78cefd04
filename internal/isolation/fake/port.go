package fake

import (
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"sync"

	"casemate.dev/internal/isolation/fake/script"
)

// runEchoServer listens on a port and sends back what it gets, until it is killed.
func runEchoServer(sh *script.Shell, argv []string) int {
	return listenUntilKilled(sh, argv, func(c net.Conn) { _, _ = io.Copy(c, c) })
}

// runHTTPServer answers each request with the request as it arrived, so that tests see what a
// proxy let through.
func runHTTPServer(sh *script.Shell, argv []string) int {
	l := &queue{conns: make(chan net.Conn), closed: make(chan struct{})}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		dump, err := httputil.DumpRequest(r, true)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = w.Write(dump)
	})}
	go func() { _ = server.Serve(l) }()
	defer func() { _ = server.Close() }()
	return listenUntilKilled(sh, argv, func(c net.Conn) {
		done := make(chan struct{})
		select {
		case l.conns <- &tracked{Conn: c, done: done}:
			<-done
		case <-l.closed:
		}
	})
}

func listenUntilKilled(sh *script.Shell, argv []string, serve func(net.Conn)) int {
	t, port := taskOf(sh), int(number(argv, 1))
	if err := t.machine.listen(port, serve); err != nil {
		return complain(sh, argv[0], "port %d: %v", port, err)
	}
	defer t.machine.unlisten(port)
	_ = out(sh, "listening on %d\n", port)
	<-t.ctx.Done()
	return 128
}

// queue is a net.Listener fed by hand.
type queue struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.closed:
		return nil, net.ErrClosed
	}
}

func (q *queue) Close() error {
	q.once.Do(func() { close(q.closed) })
	return nil
}

func (q *queue) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

// tracked tells when the server is done with a connection.
type tracked struct {
	net.Conn
	done chan struct{}
	once sync.Once
}

func (t *tracked) Close() error {
	defer t.once.Do(func() { close(t.done) })
	return t.Conn.Close()
}
