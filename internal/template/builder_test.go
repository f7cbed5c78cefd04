package template

import (
	"context"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/testenv"
)

func TestBuildBySteps(t *testing.T) {
	s := newWorld(t).serve()
	b := s.build(alice, Request{Name: "web", Tags: []string{"v1"}, From: "base", Steps: []Step{
		{Type: "ENV", Args: []string{"GREETING", "hello there", "EMPTY", ""}},
		run("echo $GREETING; echo oops >&2"),
		{Type: "USER", Args: []string{"user"}},
		{Type: "WORKDIR", Args: []string{"app"}},
	}})
	if b.State != Ready || b.Reason != nil {
		t.Fatalf("build is %s: %+v", b.State, b.Reason)
	}
	if b.Done != 4 || b.Of != 4 || len(b.Steps) != 4 || b.User != "user" || b.Dir != "/app" {
		t.Errorf("build is %+v", b)
	}
	log := s.logText(alice, b.ID)
	for _, want := range []string{"2|stdout|hello there", "2|stderr|oops", "base||FROM base", "finalize||template web is ready"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
	for _, ref := range []string{"web", "web:v1"} {
		made, err := s.manager.Create(context.Background(), alice, sandbox.Spec{Template: ref}, sandbox.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		r, err := s.manager.Execute(context.Background(), alice, made.ID, sandbox.ProcessSpec{Argv: []string{"sh", "-c", "echo $GREETING"}, Dir: "/"}, sandbox.RunOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got := string(r.Stdout); got != "hello there\n" || made.Spec.User != "user" || made.Spec.Dir != "/app" {
			t.Errorf("a sandbox of %s prints %q as %s", ref, got, made.Spec.User)
		}
		if _, err := s.manager.Delete(context.Background(), alice, made.ID); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Get(context.Background(), bob, b.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("another sees the build: %v", err)
	}
	if n := s.sandboxes(); n != 0 {
		t.Errorf("%d sandboxes are left", n)
	}
}

func TestStepsAreKept(t *testing.T) {
	s := newWorld(t).serve()
	steps := func(last string) Request {
		return Request{Name: "web", From: "base", Steps: []Step{run("echo one"), run(last)}}
	}
	cached := func(b Build) string {
		var out []string
		for _, st := range b.Steps {
			out = append(out, map[bool]string{true: "kept", false: "ran"}[st.Cached])
		}
		return strings.Join(out, " ")
	}
	for _, c := range []struct {
		name  string
		who   sandbox.Principal
		r     Request
		want  string
		shape func(*Request)
	}{
		{name: "the first", who: alice, r: steps("echo two"), want: "ran ran"},
		{name: "again", who: alice, r: steps("echo two"), want: "kept kept"},
		{name: "another last step", who: alice, r: steps("echo three"), want: "kept ran"},
		{name: "somebody else's", who: bob, r: steps("echo two"), want: "ran ran"},
		{name: "without cache", who: alice, r: steps("echo two"), want: "ran ran", shape: func(r *Request) { r.NoCache = true }},
		{name: "forced", who: alice, r: steps("echo two"), want: "kept ran", shape: func(r *Request) { r.Steps[1].Force = true }},
		{name: "another epoch", who: alice, r: steps("echo two"), want: "ran ran", shape: func(r *Request) { r.Epoch = time.Unix(1e9, 0) }},
	} {
		if c.shape != nil {
			c.shape(&c.r)
		}
		if got := cached(s.build(c.who, c.r)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestFailedStep(t *testing.T) {
	s := newWorld(t).serve()
	b := s.build(alice, Request{Name: "web", From: "base", Steps: []Step{run("echo fine"), run("echo no such luck; exit 7"), run("echo never")}})
	r := b.Reason
	if b.State != Failed || r == nil || r.Step != "2" || r.ExitCode != 7 || !strings.Contains(r.Message, "exit code 7: no such luck") {
		t.Fatalf("build is %s: %+v", b.State, r)
	}
	if b.Commit != "" || s.sandboxes() != 0 {
		t.Errorf("commit %q, %d sandboxes are left", b.Commit, s.sandboxes())
	}
	if log := s.logText(alice, b.ID); strings.Contains(log, "never") || !strings.Contains(log, "no such luck") {
		t.Errorf("the log is:\n%s", log)
	}
}

func TestCancel(t *testing.T) {
	s := newWorld(t).serve()
	ctx := context.Background()
	b, err := s.Start(ctx, alice, Request{Name: "web", From: "base", Steps: []Step{run("echo begun; sleep 1000")}})
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "the step runs", func() bool { return strings.Contains(s.logText(alice, b.ID), "|stdout|begun") })
	if _, err := s.Cancel(ctx, bob, b.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("another cancels: %v", err)
	}
	got, err := s.Cancel(ctx, alice, b.ID)
	if err != nil || got.State != Canceled {
		t.Fatalf("%v, %v", got.State, err)
	}
	if n := s.sandboxes(); n != 0 {
		t.Errorf("%d sandboxes are left", n)
	}
	if got, err = s.Cancel(ctx, alice, b.ID); err != nil || got.State != Canceled {
		t.Errorf("a second time: %v, %v", got.State, err)
	}
}

func TestKilledServerLeavesNothing(t *testing.T) {
	w := newWorld(t)
	first := w.serve()
	ctx := context.Background()
	b, err := first.Start(ctx, alice, Request{Name: "web", From: "base", Steps: []Step{run("echo one"), run("echo begun; sleep 1000")}})
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, "the second step runs", func() bool { return strings.Contains(first.logText(alice, b.ID), "|stdout|begun") })
	killed := first.copyDir()
	log := first.logPath(b.ID)
	if first.sandboxes() != 1 {
		t.Fatalf("%d sandboxes run", first.sandboxes())
	}
	w2 := &world{t: t, dir: killed, host: w.host, roots: w.roots}
	second := w2.serve(func(c *Config) { c.Dir = w.dir + "/templates" })
	if n := second.sandboxes(); n != 0 {
		t.Errorf("%d sandboxes are left", n)
	}
	got, err := second.Get(ctx, alice, b.ID)
	if err != nil || got.State != Failed || got.Reason == nil || !strings.Contains(got.Reason.Message, "server was stopped") {
		t.Fatalf("%+v, %v (log %s)", got, err, log)
	}
	again := second.build(alice, Request{Name: "web", From: "base", Steps: []Step{run("echo one"), run("echo two")}})
	if again.State != Ready || !again.Steps[0].Cached || again.Steps[1].Cached {
		t.Errorf("the next build is %s: %+v", again.State, again.Steps)
	}
}

func TestServiceIsReady(t *testing.T) {
	s := newWorld(t).serve()
	b := s.build(alice, Request{Name: "web", From: "base", Start: "sleep 1000", Ready: "true"})
	if b.State != Ready {
		t.Fatalf("%+v", b.Reason)
	}
	made, err := s.manager.Create(context.Background(), alice, sandbox.Spec{Template: "web"}, sandbox.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.manager.FindProcess(context.Background(), alice, made.ID, 0, sandbox.ServiceTag)
	if err != nil || p.End != sandbox.EndNone {
		t.Errorf("the service is %+v, %v", p, err)
	}
	bad := s.build(alice, Request{Name: "bad", From: "base", Start: "sleep 1000", Ready: "false", ReadyWithin: time.Second})
	if bad.State != Failed || bad.Reason.Step != StepFinalize || !strings.Contains(bad.Reason.Message, "not ready within 1s") {
		t.Errorf("%s: %+v", bad.State, bad.Reason)
	}
	dead := s.build(alice, Request{Name: "dead", From: "base", Start: "echo no port left; exit 3", Ready: "false"})
	if dead.State != Failed || !strings.Contains(dead.Reason.Message, "no port left") {
		t.Errorf("%s: %+v", dead.State, dead.Reason)
	}
}

func TestRequestsThatCantBe(t *testing.T) {
	s := newWorld(t).serve()
	for want, r := range map[string]Request{
		"has no name":         {From: "base"},
		"no template's name":  {Name: "We b", From: "base"},
		"nothing to begin":    {Name: "web"},
		"type \"COPYY\"":      {Name: "web", From: "base", Steps: []Step{{Type: "COPYY"}}},
		"names no files":      {Name: "web", From: "base", Steps: []Step{{Type: "COPY", Args: []string{"a", "b"}}}},
		"there are no files":  {Name: "web", From: "base", Steps: []Step{{Type: "COPY", Args: []string{"a", "b"}, FilesHash: "0"}}},
		"names and values":    {Name: "web", From: "base", Steps: []Step{{Type: "ENV", Args: []string{"a"}}}},
		"not both":            {Name: "web", From: "base", Dockerfile: &Dockerfile{Text: "FROM base"}},
		"Dockerfile:2: ":      {Name: "web", Dockerfile: &Dockerfile{Text: "FROM base\nRUNN x"}},
		"Dockerfile:3: RUN -": {Name: "web", Dockerfile: &Dockerfile{Text: "FROM base\n\nRUN --mount=type=secret,id=x true"}},
		"no ARG V":            {Name: "web", Dockerfile: &Dockerfile{Text: "FROM base\n", Args: map[string]string{"V": "1"}}},
		"no stage nothing":    {Name: "web", Dockerfile: &Dockerfile{Text: "FROM base AS one\n", Target: "nothing"}},
		"is not downloaded":   {Name: "web", Dockerfile: &Dockerfile{Text: "FROM base\nADD https://example.com/x /x\n"}},
	} {
		_, err := s.Start(context.Background(), alice, r)
		text, _ := errs.PublicText(err)
		if err == nil || !strings.Contains(text, want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}

func TestDockerfileWords(t *testing.T) {
	s := newWorld(t).serve()
	b := s.build(alice, Request{Name: "web", Dockerfile: &Dockerfile{Args: map[string]string{"V": "2"}, Text: `# syntax=docker/dockerfile:1
ARG BASE=base
ARG V=1
FROM ${BASE} AS first
ARG V
ENV PATH=/opt/bin:$PATH NAME="a b"
RUN echo "v=$V name=$NAME path=$PATH"
FROM first
RUN echo "second: v=${V:-none} name=$NAME"
LABEL version=$V who="${NAME}"
EXPOSE 80 53/udp
ENTRYPOINT ["/bin/app"]
CMD ["serve"]
USER user
`}})
	if b.State != Ready {
		t.Fatalf("%+v\n%s", b.Reason, s.logText(alice, b.ID))
	}
	log := s.logText(alice, b.ID)
	for _, want := range []string{"v=2 name=a b path=/opt/bin:/usr/bin:/bin", "second: v=none name=a b"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
	if i := b.Image; i.Labels["who"] != "a b" || len(i.Exposed) != 2 || i.Cmd[0] != "serve" || i.User != "user" {
		t.Errorf("the image is %+v", i)
	}
}
