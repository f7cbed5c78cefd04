package template

import (
	"context"
	"encoding/json"
	"fmt"
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

// TestDiff: two builds differ in what their steps set.
func TestDiff(t *testing.T) {
	s, ctx := newWorld(t).serve(), t.Context()
	docker := func(text string) Request {
		return Request{Name: "web", Dockerfile: &Dockerfile{Text: "FROM base\n" + text}}
	}
	one := docker("ENV A=1 SAME=x\nLABEL who=me\nCMD [\"a\"]\nWORKDIR /home/user\nHEALTHCHECK CMD true")
	two := docker("ENV A=2 SAME=x B=3\nCMD [\"a\", \"b\"]\nUSER root\nWORKDIR /home/user\nSTOPSIGNAL INT")
	two.Limits = sandbox.Limits{MemoryBytes: 1 << 30}
	a, b := s.build(alice, one), s.build(alice, two)
	d, err := s.Diff(ctx, alice, a.ID, b.ID)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range d.Settings {
		if c.Name == "healthcheck" {
			c.From, c.To = "", ""
		}
		got = append(got, fmt.Sprintf("%s: %s -> %s", c.Name, c.From, c.To))
	}
	want := []string{
		`cmd: ["a"] -> ["a" "b"]`, "env A: 1 -> 2", "env B:  -> 3", "healthcheck:  -> ", "label who: me -> ", "limit memory:  -> 1073741824",
		"stopsignal:  -> INT", "user: user -> root",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if d, err := s.Diff(ctx, alice, "web", b.ID); err != nil || len(d.Settings)+len(d.Files)+len(d.Packages) != 0 {
		t.Errorf("the newest and itself: %+v, %v", d, err)
	}
	if _, err := s.Diff(ctx, bob, a.ID, b.ID); !errs.Is(err, errs.NotFound) {
		t.Errorf("another's: %v", err)
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
		"no stage nothing":    {Name: "web", Dockerfile: &Dockerfile{Text: "FROM base AS one\n", Target: "nothing"}},
		"is not downloaded":   {Name: "web", Dockerfile: &Dockerfile{Text: "FROM base\nADD https://example.com/x /x\n"}},
		"no number of sec":    {Name: "web", Dockerfile: &Dockerfile{Text: "FROM base\n", Args: map[string]string{"SOURCE_DATE_EPOCH": "now"}}},
	} {
		_, err := s.Start(context.Background(), alice, r)
		text, _ := errs.PublicText(err)
		if err == nil || !strings.Contains(text, want) {
			t.Errorf("%v does not say %q", err, want)
		}
	}
}

// What a Dockerfile asks for that can't be is refused before anything is built, and the error names the line.
func TestRefusedInstructions(t *testing.T) {
	s := newWorld(t).serve()
	for instruction, want := range map[string]string{
		"RUN --mount=type=secret,id=x true": "no secret ever enters", "RUN --mount=type=ssh true": "no agent's socket",
		"RUN --network=host true": "never the host's network", "RUN --security=insecure true": "no step leaves its walls",
		"RUN --device=vendor.com/x=all true": "no device of this machine", "RUN --nope true": "unknown flag: --nope",
		"ADD https://example.com/x /x": "is not downloaded", "ADD git@example.com:x.git /x": "is not downloaded",
		"ADD --checksum=sha256:00 https://example.com/x /x": "it downloads nothing", "COPY https://example.com/x /x": "COPY takes files",
		"COPY --from=0 /a /b": "there is no stage 0 before this one", "COPY --from=7 /a /b": "there is no stage 7 before this one",
		"RUN --mount=from=0,target=/x true": "there is no stage 0 before this one", "COPY --from=$X /a /b": "variables are not expanded here",
		"ONBUILD ONBUILD RUN true": "ONBUILD", "ONBUILD FROM base": "FROM isn't allowed", "ONBUILD NOPE": "unknown instruction",
		"NOPE x": "unknown instruction", "EXPOSE": "requires at least one argument", "COPY <<A <<B /x\n1\nA\n2\nB": "",
	} {
		text := "FROM base AS one\n" + instruction + "\n"
		_, err := s.Start(context.Background(), alice, Request{Name: "web", Dockerfile: &Dockerfile{Text: text}})
		public, _ := errs.PublicText(err)
		if want != "" && (err == nil || !strings.HasPrefix(public, "Dockerfile:2: ") || !strings.Contains(public, want)) {
			t.Errorf("%s: %v, want %q", instruction, err, want)
		}
	}
	for syntax, ok := range map[string]bool{
		"docker/dockerfile:1": true, "docker.io/docker/dockerfile:1.7-labs": true, "docker/dockerfile-upstream:master": true,
		"evil/dockerfile:1": false, "docker/dockerfiles": false,
	} {
		_, err := s.Start(context.Background(), alice, Request{Name: "web", Dockerfile: &Dockerfile{Text: "# syntax=" + syntax + "\nFROM base\n"}})
		if (err == nil) != ok {
			t.Errorf("# syntax=%s: %v", syntax, err)
		}
	}
	for instruction, want := range map[string]string{
		"EXPOSE 0": "that is no port", "EXPOSE 9-8": "that is no port", "EXPOSE 1-9000": "more than 4096 ports", "STOPSIGNAL SIGFOO": "that is no signal",
		"COPY --chmod=u+x a b": "no mode", "RUN --mount=target=/ true": "would hide everything",
	} {
		b := s.build(alice, Request{Name: "web", Dockerfile: &Dockerfile{Text: "FROM base\n" + instruction + "\n"}})
		if b.State != Failed || !strings.Contains(b.Reason.Message, want) || b.Reason.At != "Dockerfile:2" {
			t.Errorf("%s: %s %+v, want %q", instruction, b.State, b.Reason, want)
		}
	}
}

func TestOnBuild(t *testing.T) {
	s := newWorld(t).serve()
	parent := s.build(alice, Request{Name: "parent", Dockerfile: &Dockerfile{Text: `FROM base
ONBUILD ARG WHO=nobody
ONBUILD RUN echo "trigger for $WHO"
ONBUILD ENV FROM=trigger
RUN echo "in the parent: ${FROM:-nothing}"
`}})
	if parent.State != Ready || len(parent.Image.OnBuild) != 3 {
		t.Fatalf("%+v %+v", parent.Reason, parent.Image)
	}
	if log := s.logText(alice, parent.ID); !strings.Contains(log, "|stdout|in the parent: nothing") || strings.Contains(log, "|stdout|trigger") {
		t.Errorf("the parent's log is:\n%s", log)
	}
	child := s.build(alice, Request{Name: "child", Dockerfile: &Dockerfile{
		Text: "FROM parent AS one\nRUN echo \"child: $FROM\"\nFROM one\nRUN echo grandchild\n", Args: map[string]string{"WHO": "me"},
	}})
	log := s.logText(alice, child.ID)
	for _, want := range []string{`base||ONBUILD RUN echo "trigger for $WHO"`, "base|stdout|trigger for me", "1|stdout|child: trigger", "2|stdout|grandchild"} {
		if strings.Count(log, want) != 1 {
			t.Errorf("the log has not %q once:\n%s", want, log)
		}
	}
	if child.State != Ready || len(child.Image.OnBuild) != 0 || child.Of != 5 || child.Done != 5 {
		t.Errorf("%d of %d, %+v %+v", child.Done, child.Of, child.Reason, child.Image)
	}
	// Those of a stage are run for the stages upon it, and a step of E2B's kind has none.
	stages := s.build(alice, Request{Name: "stages", Dockerfile: &Dockerfile{Text: "FROM base AS a\nONBUILD RUN echo triggered\nFROM a AS b\nFROM b\n"}})
	if n := strings.Count(s.logText(alice, stages.ID), "|stdout|triggered"); n != 1 {
		t.Errorf("the trigger ran %d times", n)
	}
	steps := s.build(alice, Request{Name: "steps", From: "parent", Steps: []Step{run("true")}})
	if log := s.logText(alice, steps.ID); steps.State != Ready || !strings.Contains(log, "ONBUILD of parent is not run") {
		t.Errorf("%+v\n%s", steps.Reason, log)
	}
}

func TestArgs(t *testing.T) {
	s := newWorld(t).serve()
	b := s.build(alice, Request{Name: "web", Dockerfile: &Dockerfile{
		Args: map[string]string{"GIVEN": "g", "http_proxy": "http://proxy:1", "SOURCE_DATE_EPOCH": "1000000000"}, Text: `ARG TOP=top
FROM base AS one
RUN echo "1 ${TOP:-none}"
ARG TOP
ARG GIVEN=x A=a B=${A}b
RUN echo "2 $TOP $GIVEN $A $B $HTTP_PROXY $SOURCE_DATE_EPOCH"
ENV A=env
RUN echo "3 $A"
ARG A=again
RUN echo "4 $A"
FROM one
RUN echo "5 $TOP $A $B"
`,
	}})
	log := s.logText(alice, b.ID)
	for _, want := range []string{"1 none", "2 top g a ab http://proxy:1 1000000000", "3 env", "4 again", "5 top env ab"} {
		if !strings.Contains(log, "|stdout|"+want+"\n") {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
	unused := s.build(alice, Request{Name: "web", Dockerfile: &Dockerfile{Text: "FROM base\nRUN echo never\n", Args: map[string]string{"V": "1"}}})
	if unused.State != Failed || !strings.Contains(unused.Reason.Message, "no ARG V") || unused.Done != 0 {
		t.Errorf("%s: %+v", unused.State, unused.Reason)
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
CMD ["serve"]
ENTRYPOINT ["/bin/app"]
VOLUME /v /v
STOPSIGNAL SIGRTMIN+3
HEALTHCHECK --interval=5s --start-interval=1s CMD true
USER user
`}})
	if b.State != Ready {
		t.Fatalf("%+v\n%s", b.Reason, s.logText(alice, b.ID))
	}
	log := s.logText(alice, b.ID)
	for _, want := range []string{"v=2 name=a b path=/opt/bin:/usr/bin:/bin", "second: v=2 name=a b"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
	if i := b.Image; i.Labels["who"] != "a b" || len(i.Exposed) != 2 || len(i.Cmd) != 1 || len(i.Volumes) != 1 || i.Healthcheck.StartInterval != time.Second || i.User != "user" {
		t.Errorf("the image is %+v", i)
	}
}

// The credentials of a request are for the registry of the image that it begins with: not for one that stands in its
// place, and they print themselves nowhere.
func TestCredentialsOfOneImage(t *testing.T) {
	type pulled struct {
		ref  string
		auth Credentials
	}
	asked := make(chan pulled, 1)
	s := newWorld(t).serve(func(c *Config) {
		c.Aliases = map[string]string{"private.test/moved:1": "elsewhere.test/app:1"}
		c.Images = func(_ context.Context, _ sandbox.Principal, ref string, auth Credentials, _ func(string)) (sandbox.Commit, error) {
			asked <- pulled{ref, auth}
			return sandbox.Commit{}, errs.New(errs.NotFound, "there is no %s", ref)
		}
	})
	auth := Credentials{User: "robot", Password: "not-4-everybody"}
	for from, want := range map[string]pulled{
		"private.test/app:1":   {"private.test/app:1", auth},
		"private.test/moved:1": {"elsewhere.test/app:1", Credentials{}},
	} {
		b := s.build(alice, Request{Name: "web", From: from, FromAuth: auth})
		if got := testenv.Receive(t, "the image is asked for", asked); got != want {
			t.Errorf("%s: asked for %s, the right credentials: %v", from, got.ref, got.auth == want.auth)
		}
		if text := fmt.Sprintf("%v %+v %#v", b, b, b) + s.logText(alice, b.ID); strings.Contains(text, auth.Password) {
			t.Errorf("%s: the build tells the password", from)
		}
	}
	text, err := json.Marshal(auth)
	if err != nil || strings.Contains(fmt.Sprintf("%s %v %+v %#v", text, auth, auth, auth), auth.Password) {
		t.Errorf("they print themselves: %s, %v", text, err)
	}
	for what, r := range map[string]Request{
		"a Dockerfile": {Name: "web", FromAuth: auth, Dockerfile: &Dockerfile{Text: "FROM private.test/app:1\n"}},
		"nothing":      {Name: "web", FromAuth: auth},
	} {
		if _, err := s.Start(t.Context(), alice, r); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("of %s: %v", what, err)
		}
	}
}
