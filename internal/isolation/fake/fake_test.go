package fake_test

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/fake"
)

func limits() isolation.Limits {
	return isolation.Limits{MemoryBytes: 1 << 30, CPUs: 1, Pids: 64, OpenFiles: 256, DiskBytes: 1 << 20}
}

func start(t *testing.T, b *fake.Backend) isolation.Instance {
	t.Helper()
	i, err := b.Start(t.Context(), isolation.Spec{ID: id.Sandbox(), Profile: isolation.Locked, Limits: limits()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = i.Destroy(context.Background()) })
	return i
}

// run runs a script to its end and returns its output and state.
func run(t *testing.T, i isolation.Instance, src string) (stdout, stderr string, info guestwire.ProcessInfo) {
	t.Helper()
	c := guestwire.NewClient(i.Dial)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, s, err := c.Run(ctx, guestwire.RunProcess{
		Start:  guestwire.StartProcess{ID: id.New(id.Process), Argv: []string{"sh", "-c", src}},
		Output: guestwire.OutputRequest{Follow: true},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var out, errOut bytes.Buffer
	for {
		item, err := s.Next()
		if err == io.EOF {
			return out.String(), errOut.String(), s.Info()
		}
		if err != nil {
			t.Fatal(err)
		}
		if item.Stream == guestwire.Stderr {
			errOut.Write(item.Data)
		} else {
			out.Write(item.Data)
		}
	}
}

func TestScripts(t *testing.T) {
	i := start(t, fake.New(fake.Config{}))
	for _, tt := range []struct {
		name, src, stdout, stderr string
		code                      int
	}{
		{"words", `echo  a "b  c" 'd $X' e\ f`, "a b  c d $X e f\n", "", 0},
		{"status", `false; echo $?; exit 7`, "1\n", "", 7},
		{"and or", `true && echo a || echo b; false && echo c || echo d`, "a\nd\n", "", 0},
		{"variables", `X=1; Y="$X 2"; echo $Y ${Z:-none} $((X+4*2))`, "1 2 none 10\n", "", 0},
		{"substitution", `echo "<$(echo in; echo side)>"`, "<in\nside>\n", "", 0},
		{"pipes", `printf 'a\nb\n' | cat | wc -c`, "4\n", "", 0},
		{"redirections", `echo x > f; echo y >> f; cat f; echo e >&2; cat nothing 2>/dev/null`, "x\ny\n", "e\n", 1},
		{"loops", `for i in 1 2 3; do echo $i; done; i=0; while [ $i -lt 2 ]; do i=$((i+1)); done; echo $i`, "1\n2\n3\n2\n", "", 0},
		{"if", `if [ -e /nothing ]; then echo a; elif true; then echo b; else echo c; fi`, "b\n", "", 0},
		{"groups", `(cd /; pwd); { pwd; } ; ! true; echo $?`, "/\n/home/user\n1\n", "", 0},
		{"background", `{ sleep 0.01; echo late; } & wait; echo done`, "late\ndone\n", "", 0},
		{"unknown", `nothing-such`, "", "sh: nothing-such: not found\n", 127},
		{"syntax", `echo "`, "", "sh: syntax error: a double quote is not closed\n", 2},
		{"files", `mkdir -p d/e; echo 1 > d/e/f; ls d; mv d/e/f g; cat g; rm -r d; test -d d; echo $?`, "e\n1\n1\n", "", 0},
		{"python", `python3 -c 'print(6*7)'`, "42\n", "", 0},
		{"full disk", `spam 2000000 > big || echo full`, "full\n", "", 0},
	} {
		out, errOut, info := run(t, i, tt.src)
		if out != tt.stdout || errOut != tt.stderr || info.End != guestwire.EndExited || info.Code != tt.code {
			t.Errorf("%s: got %q %q %s %d, want %q %q %d", tt.name, out, errOut, info.End, info.Code, tt.stdout, tt.stderr, tt.code)
		}
	}
}

func TestFaults(t *testing.T) {
	b := fake.New(fake.Config{})
	spec := isolation.Spec{ID: id.Sandbox(), Profile: isolation.Locked, Limits: limits()}
	b.SetFaults(fake.Faults{FailAt: fake.StepClone, Debris: true})
	if _, err := b.Start(t.Context(), spec); !errs.Is(err, errs.Internal) {
		t.Errorf("start with a fault: got %v", err)
	}
	if got := b.Host().Leftovers(); len(got) != 1 || got[0] != spec.ID {
		t.Errorf("leftovers: got %v", got)
	}
	if removed, err := b.Sweep(t.Context(), nil); err != nil || len(removed) != 1 || len(b.Host().Leftovers()) != 0 {
		t.Errorf("sweep: got %v, %v", removed, err)
	}
	b.SetFaults(fake.Faults{StartDelay: time.Hour})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Start(ctx, spec); err == nil {
		t.Error("start went on though its context had ended")
	}
}

func TestGuestDies(t *testing.T) {
	b := fake.New(fake.Config{})
	for _, how := range []string{"crash", "kill"} {
		i := start(t, b)
		if how == "kill" {
			b.Host().Kill(i.ID())
		} else {
			c := guestwire.NewClient(i.Dial)
			_, _ = c.Start(t.Context(), guestwire.StartProcess{ID: "prc_1", Argv: []string{"crash"}}, nil)
		}
		select {
		case <-i.Done():
		case <-time.After(time.Minute):
			t.Fatalf("%s: the instance goes on", how)
		}
		if r := i.Exit().Reason; !strings.HasPrefix(r, "guest_") {
			t.Errorf("%s: got reason %q", how, r)
		}
		if _, err := guestwire.NewClient(i.Dial).Status(t.Context()); !errs.Is(err, errs.Unavailable) {
			t.Errorf("%s: a call to the dead guest gave %v", how, err)
		}
	}
}
