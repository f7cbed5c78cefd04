package guest

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/spawn"
	"casemate.dev/internal/guestwire"
)

// A memory image can't hold a socket of the host but the one that connections come on: so before one is made, the
// guest closes every connection of the server, and with them those that it joined with ports inside. The next
// connection that comes, here or where the image was restored, opens it up again.

// links are the server's connections. The zero value is open and ready.
type links struct {
	// mu guards the fields below.
	mu     sync.Mutex
	all    map[net.Conn]struct{}
	closed bool
}

// add notes a connection, until remove. Where all are to be closed it closes it and reports false.
func (l *links) add(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = c.Close()
		return false
	}
	if l.all == nil {
		l.all = make(map[net.Conn]struct{})
	}
	l.all[c] = struct{}{}
	return true
}

func (l *links) remove(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.all, c)
}

func (l *links) open() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = false
}

// close closes all connections but one, and those that are added later.
func (l *links) close(but net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for c := range l.all {
		if c != but {
			_ = c.Close()
		}
	}
}

const (
	// prepareLimit bounds the closing of connections. Those who hold one only have to notice.
	prepareLimit = 5 * time.Second
	prepareEvery = 2 * time.Millisecond
)

// prepareImage closes every connection to the server, and answers when none is left but c, which goes last.
func (g *Guest) prepareImage(c *guestwire.Conn) error {
	if !g.cfg.Images {
		return errs.New(errs.Unsupported, "this sandbox's kernel has no memory images")
	}
	g.links.close(c.Conn)
	for end := time.Now().Add(prepareLimit); ; {
		// Calls that were under way may hand on their connections meanwhile.
		g.workers.end()
		// The thread that starts processes may attend to a connection, which it leaves for this.
		g.cfg.Spawner.Attend(spawn.Post{FD: -1, Ready: func(*spawn.Seat) bool { return false }, Relieved: func() {}})
		left, err := g.heldOpen()
		if err != nil {
			g.links.open()
			return err
		}
		if len(left) <= 1 { // c
			break
		}
		if time.Now().After(end) {
			g.links.open()
			return errs.New(errs.FailedPrecondition, "something inside keeps %d connections to the server open", len(left)-1)
		}
		<-time.After(prepareEvery)
	}
	if err := c.Reply(nil); err != nil {
		g.links.open()
		return err
	}
	return c.Close()
}

// heldOpen returns the files of the host that any process has open, beside those that an image may hold.
func (g *Guest) heldOpen() ([]string, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	var left []string
	for _, p := range append(all, procStat{pid: os.Getpid()}) {
		files, err := hostFiles(strconv.Itoa(p.pid))
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			if !slices.Contains(g.own, f) && !slices.Contains(left, f) {
				left = append(left, f)
			}
		}
	}
	return left, nil
}

// hostFiles returns what a process has open of the host, as gVisor names it (pkg/sentry/fsimpl/host): once each.
func hostFiles(pid string) ([]string, error) {
	dir := "/proc/" + pid + "/fd/"
	all, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // it has ended
	}
	if err != nil {
		return nil, fmt.Errorf("look at open files: %w", err)
	}
	var found []string
	for _, e := range all {
		to, err := os.Readlink(dir + e.Name())
		if err == nil && strings.HasPrefix(to, "host:[") && !slices.Contains(found, to) {
			found = append(found, to)
		}
	}
	return found, nil
}
