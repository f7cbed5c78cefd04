package sandbox

import (
	"context"
	"io"
	"net"
	"strings"
	"sync/atomic"
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
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var answered atomic.Int32
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
						if answered.Add(1) == 2 {
							cancel() // the caller has waited long enough
						}
					}
					_, _ = io.Copy(io.Discard, c)
				}()
			}
		}()
		connect := 30 * time.Millisecond
		if answers { // also on a busy machine
			connect = 3 * time.Second
		}
		m := &Manager{cfg: Config{Defaults: Defaults{Connect: connect}}}
		b := &box{guest: guestwire.NewClient(func(ctx context.Context) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", l.Addr().String())
		})}
		gctx, stop := m.attended(ctx, b)
		_, err = b.guest.Write(gctx, guestwire.WriteRequest{}, strings.NewReader("x"))
		err = cause(gctx, err)
		stop()
		switch late := ctx.Err() != nil; {
		case answers && !late:
			t.Errorf("twin: the call of a guest that answers ended before its caller's limit: %v", err)
		case !answers && (late || !errs.Is(err, errs.DeadlineExceeded)):
			t.Errorf("the call of a mute guest ended with: %v (the caller's limit is over: %v)", err, late)
		}
	}
}
