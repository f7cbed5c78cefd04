package sandbox

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// VULNERABILITY: a file call may rightly take long, so it has no deadline of its own.
// ATTACK: a guest that takes connections and never answers.
// VERIFIES: the call ends, and says why. The twin is the same guest that answers a status, for whom the
// call waits on.
func TestMuteGuest(t *testing.T) {
	for _, answers := range []bool{false, true} {
		l, err := net.Listen("unix", t.TempDir()+"/s")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					gc := guestwire.NewConn(c)
					call, _, err := gc.ReadCall()
					if err == nil && call.Method == guestwire.MethodStatus && answers {
						_ = gc.Reply(guestwire.Status{Version: guestwire.Version})
					}
					_, _ = io.Copy(io.Discard, c)
				}()
			}
		}()
		m := &Manager{cfg: Config{Defaults: Defaults{Connect: 30 * time.Millisecond}}}
		b := &box{guest: guestwire.NewClient(func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", l.Addr().String())
		})}
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		gctx, stop := m.attended(ctx, b)
		began := time.Now()
		_, err = b.guest.Write(gctx, guestwire.WriteRequest{}, strings.NewReader("x"))
		err = cause(gctx, err)
		stop()
		switch took := time.Since(began); {
		case answers && took < time.Second:
			t.Errorf("twin: the call of a guest that answers ended after %v: %v", took, err)
		case !answers && (took > time.Second || !errs.Is(err, errs.DeadlineExceeded)):
			t.Errorf("the call of a mute guest ended after %v: %v", took, err)
		}
	}
}
