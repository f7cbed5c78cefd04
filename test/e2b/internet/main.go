// Command internet runs a command where stand-ins answer for what E2B's own suite asks of the internet, and of nothing
// else: 1.1.1.1 and 8.8.8.8 with the redirects that the suite knows, connectivitycheck.gstatic.com with its 204, and
// https://*.boxes.test, which leads to the machine's own port 443, as a load balancer would lead to it.
//
// It needs root and a network namespace of its own (unshare --net), and changes nothing else of the machine's network.
// Usage: internet CA-FILE COMMAND…, where CA-FILE is written: the authority of the stand-ins' certificates.
package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"time"

	"casemate.dev/internal/fakenet"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "internet:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return errors.New("usage: internet CA-FILE COMMAND…")
	}
	n, err := fakenet.Open()
	if err != nil {
		return err
	}
	defer n.Close()
	if err := os.WriteFile(args[0], n.CAPEM(), 0o600); err != nil {
		return err
	}
	for addr, site := range map[string]struct {
		name, to string
		status   int
	}{
		"1.1.1.1":   {"one.one.one.one", "https://one.one.one.one/", http.StatusMovedPermanently},
		"8.8.8.8":   {"dns.google", "https://dns.google/", http.StatusFound},
		fakenet.Web: {"connectivitycheck.gstatic.com", "", http.StatusNoContent},
	} {
		conf, err := n.TLS(site.name, addr)
		if err != nil {
			return err
		}
		l, err := n.Listen(addr + ":443")
		if err != nil {
			return err
		}
		n.Name(site.name, addr)
		srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			if site.to != "" {
				w.Header().Set("Location", site.to)
			}
			w.WriteHeader(site.status)
		})}
		go func() { _ = srv.Serve(tls.NewListener(l, conf)) }()
	}
	l, err := n.Listen(fakenet.Other + ":443")
	if err != nil {
		return err
	}
	n.Name("*.boxes.test", fakenet.Other)
	go forward(l)
	cmd := exec.Command(args[1], args[2:]...) //nolint:gosec // what the caller wants
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), "FAKE_RESOLVER="+fakenet.Resolver)
	return cmd.Run()
}

// forward leads connections to this machine's port 443.
func forward(l net.Listener) {
	for {
		in, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer in.Close()
			out, err := net.Dial("tcp", "127.0.0.1:443")
			if err != nil {
				return
			}
			defer out.Close()
			go func() { _, _ = io.Copy(out, in); _ = out.Close() }()
			_, _ = io.Copy(in, out)
		}()
	}
}
