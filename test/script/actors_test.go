package script

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

func guestName() string { return "guest-linux-" + runtime.GOARCH }

// badKey has the shape of a key, and nobody gave it out.
const badKey = "csm_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

// actors are those who may call, by name.
func actors() map[string]func(k *actorKeys) (url, key string) {
	return map[string]func(k *actorKeys) (url, key string){
		"casemate": func(k *actorKeys) (string, string) { return k.socket, "" },
		"user":     func(k *actorKeys) (string, string) { return k.url, k.user },
		"other":    func(k *actorKeys) (string, string) { return k.url, k.other },
		"attacker": func(k *actorKeys) (string, string) { return k.url, badKey },
		"stranger": func(k *actorKeys) (string, string) { return k.url, "" },
	}
}

// commands are what scripts have beside testscript's own.
func commands() map[string]func(ts *testscript.TestScript, neg bool, args []string) {
	cmds := map[string]func(ts *testscript.TestScript, neg bool, args []string){
		"exits":      cmdExits,
		"http":       cmdHTTP,
		"eventually": cmdEventually,
		"within":     cmdWithin,
		"port":       cmdPort,
		"sh":         cmdSh,
		"image":      cmdImage,
	}
	for name := range actors() {
		cmds[name] = func(ts *testscript.TestScript, neg bool, args []string) {
			check(ts, neg, act(ts, name, args))
		}
	}
	return cmds
}

func check(ts *testscript.TestScript, neg bool, err error) {
	switch {
	case err != nil && !neg:
		ts.Fatalf("%v", err)
	case err == nil && neg:
		ts.Fatalf("it succeeded, and should not have")
	}
}

// act runs casemate as an actor.
func act(ts *testscript.TestScript, actor string, args []string) error {
	who, ok := actors()[actor]
	if !ok {
		ts.Fatalf("nobody is called %q", actor)
	}
	k := ts.Value(keysKey{}).(*actorKeys)
	url, key := who(k)
	oldURL, oldKey := ts.Getenv("CASEMATE_URL"), ts.Getenv("CASEMATE_API_KEY")
	ts.Setenv("CASEMATE_URL", url)
	ts.Setenv("CASEMATE_API_KEY", key)
	defer func() {
		ts.Setenv("CASEMATE_URL", oldURL)
		ts.Setenv("CASEMATE_API_KEY", oldKey)
	}()
	return ts.Exec(k.program, args...)
}

// exits CODE ACTOR ARG…
func cmdExits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE ACTOR ARG…")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = act(ts, args[1], args[2:])
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// patience is how long what happens by itself may take on a busy machine.
const patience = 2 * time.Minute

// eventually ACTOR ARG…
func cmdEventually(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 1 {
		ts.Fatalf("usage: eventually ACTOR ARG…")
	}
	deadline := time.Now().Add(patience)
	for {
		err := act(ts, args[0], args[1:])
		if (err == nil) != neg {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("not within %v: %v", patience, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// within DURATION ACTOR ARG…
func cmdWithin(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 {
		ts.Fatalf("usage: within DURATION ACTOR ARG…")
	}
	limit, err := time.ParseDuration(args[0])
	ts.Check(err)
	start := time.Now()
	check(ts, neg, act(ts, args[1], args[2:]))
	if took := time.Since(start); took > limit {
		ts.Fatalf("it took %v, more than %v", took, limit)
	}
}

// port NAME
func cmdPort(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: port NAME")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	defer l.Close()
	ts.Setenv(args[0], strconv.Itoa(l.Addr().(*net.TCPAddr).Port))
}

// sh SCRIPT
func cmdSh(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: sh SCRIPT")
	}
	check(ts, neg, ts.Exec("/bin/sh", "-ec", args[0]))
}

// http ACTOR METHOD PATH [HEADER: VALUE]… [BODY]
func cmdHTTP(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 3 {
		ts.Fatalf("usage: http ACTOR METHOD PATH [HEADER: VALUE]… [BODY]")
	}
	k := ts.Value(keysKey{}).(*actorKeys)
	_, key := actors()[args[0]](k)
	body, header := "", http.Header{}
	for _, a := range args[3:] {
		if name, value, ok := strings.Cut(a, ": "); ok && !strings.HasPrefix(a, "{") {
			header.Add(name, value)
			continue
		}
		body = a
	}
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	req, err := http.NewRequestWithContext(ctx, args[1], k.url+args[2], strings.NewReader(body))
	ts.Check(err)
	req.Header = header
	if h := header.Get("Host"); h != "" {
		req.Host = h
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	if body != "" && req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	ts.Check(err)
	defer resp.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	ts.Check(err)
	out := fmt.Sprintf("status %d\n", resp.StatusCode)
	for _, name := range []string{"Content-Type", "Content-Security-Policy", "Set-Cookie", "Retry-After"} {
		if v := resp.Header.Get(name); v != "" {
			out += fmt.Sprintf("%s: %s\n", strings.ToLower(name), v)
		}
	}
	// Through a program, so that the script's "stdout" sees it.
	ts.Setenv("HTTP_ANSWER", out+"\n"+string(raw))
	ts.Check(ts.Exec("/bin/sh", "-c", `printf '%s' "$HTTP_ANSWER"`))
	if ok := resp.StatusCode < 400; ok == neg {
		ts.Fatalf("status %d", resp.StatusCode)
	}
}
