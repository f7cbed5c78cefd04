package secret

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/store"
	"casemate.dev/internal/testenv"
)

var (
	admin = Caller{ID: "local", Admin: true}
	user  = Caller{ID: "key_user"}
	other = Caller{ID: "key_other"}
)

// opened is a vault with what a test looks at.
type opened struct {
	*Vault
	db  *store.DB
	log *bytes.Buffer
	env map[string]string
}

func openVault(t testing.TB, dir string, key []byte) opened {
	t.Helper()
	db, err := store.Open(store.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	o := opened{db: db, log: &bytes.Buffer{}, env: map[string]string{}}
	o.Vault, err = Open(t.Context(), Config{
		DB: db, Journal: journal.Open(db, journal.Options{}), Key: key,
		Log: slog.New(slog.NewTextHandler(o.log, nil)), Getenv: func(k string) string { return o.env[k] },
	})
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func (o opened) set(t testing.TB, c Caller, name, value string) Secret {
	t.Helper()
	s, err := o.Set(t.Context(), c, SetRequest{Name: name, Value: NewValue([]byte(value))})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (o opened) bind(t testing.TB, c Caller, ref string, b Binding) Binding {
	t.Helper()
	_, b, err := o.Bind(t.Context(), c, ref, b)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func forAll(hosts ...string) Binding {
	return Binding{For: Selector{All: true}, Hosts: hosts, Place: Place{Scheme: Bearer}, Env: "TOKEN"}
}

func box(id, owner string) Subject { return Subject{ID: id, Owner: owner, Template: "base"} }

func TestSecretsSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	first := openVault(t, dir, testKey(1))
	s := first.set(t, admin, "github", canary())
	b := first.bind(t, admin, "github", forAll("API.GitHub.com"))
	first.Used(s.ID, time.Now())
	was := first.Grants(t.Context(), box("box1", "local"))
	if len(was) != 1 || string(was[0].Value.Reveal()) != canary() || was[0].Bindings[0].Hosts[0] != "api.github.com" {
		t.Fatalf("grants %+v", was)
	}
	first.Close()
	if !was[0].Value.Empty() {
		t.Error("a closed vault has its values in memory")
	}
	if err := first.db.Close(); err != nil {
		t.Fatal(err)
	}
	second := openVault(t, dir, testKey(1))
	now := second.Grants(t.Context(), box("box1", "local"))
	if len(now) != 1 || string(now[0].Value.Reveal()) != canary() || now[0].Placeholder != was[0].Placeholder || now[0].Bindings[0].ID != b.ID {
		t.Errorf("after a restart: %+v", now)
	}
	if got, err := second.Get(admin, s.ID); err != nil || got.UsedAt.IsZero() || got.Version != 1 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestRotation(t *testing.T) {
	dir := t.TempDir()
	v := openVault(t, dir, testKey(1))
	v.set(t, admin, "a", canary()+"1")
	v.bind(t, admin, "a", forAll("api.example.com"))
	sub := box("box1", "x")
	p := v.Grants(t.Context(), sub)[0].Placeholder
	for n := 2; n <= 4; n++ {
		changed := v.Changed()
		s, err := v.Rotate(t.Context(), admin, "a", NewValue([]byte(canary()+fmt.Sprint(n))))
		if err != nil || s.Version != uint64(n) {
			t.Fatalf("%+v, %v", s, err)
		}
		select {
		case <-changed:
		default:
			t.Error("nobody is told of the new value")
		}
		g := v.Grants(t.Context(), sub)[0]
		if string(g.Value.Reveal()) != canary()+fmt.Sprint(n) || string(g.Previous.Reveal()) != canary()+fmt.Sprint(n-1) || g.Placeholder != p {
			t.Errorf("version %d: %+v", n, g)
		}
	}
	rows, err := v.db.SecretVersions(t.Context(), v.Grants(t.Context(), sub)[0].Secret)
	if err != nil || len(rows) != 4 {
		t.Fatalf("%d versions, %v", len(rows), err)
	}
	for _, r := range rows {
		if kept := len(r.Sealed) > 0; kept != (r.Version >= 3) {
			t.Errorf("version %d is kept: %v", r.Version, kept)
		}
	}
	if _, err := v.Remove(t.Context(), admin, "a"); err != nil {
		t.Fatal(err)
	}
	if left, _ := v.db.SecretVersions(t.Context(), rows[0].Secret); len(left) != 0 || len(v.Grants(t.Context(), sub)) != 0 {
		t.Error("a removed secret is still there")
	}
}

func TestSwappedRowsDoNotOpen(t *testing.T) {
	dir := t.TempDir()
	v := openVault(t, dir, testKey(1))
	a, b := v.set(t, admin, "a", canary()+"a"), v.set(t, admin, "b", canary()+"b")
	rows, _ := v.db.SecretVersions(t.Context(), b.ID)
	// Who can write to the database, and has no master key, gives sandbox code of a the value of b.
	if err := v.db.Write(store.DeleteSecret(a.ID), store.AddSecretVersion(store.SecretVersion{Secret: a.ID, Version: 1, Sealed: rows[0].Sealed})); err != nil {
		t.Fatal(err)
	}
	if raw, err := v.read(a.ID, 1); err == nil {
		t.Errorf("it opens as %q", raw)
	}
	if raw, err := v.read(b.ID, 1); err != nil || string(raw) != canary()+"b" { // the twin: in its own place it does
		t.Errorf("%q, %v", raw, err)
	}
}

func TestWrongMasterKey(t *testing.T) {
	dir := t.TempDir()
	first := openVault(t, dir, testKey(1))
	first.set(t, admin, "a", canary())
	first.bind(t, admin, "a", forAll("api.example.com"))
	_ = first.db.Close()
	v := openVault(t, dir, testKey(2))
	g := v.Grants(t.Context(), box("box1", "x"))
	if len(g) != 1 || !g[0].Value.Empty() {
		t.Fatalf("%+v", g)
	}
	s, _ := v.Get(admin, "a")
	if !strings.Contains(s.Fault, "master key") || !strings.Contains(v.log.String(), "master key") {
		t.Errorf("fault %q; log %s", s.Fault, v.log)
	}
	v.set(t, admin, "a", canary()+"2") // and it can be set again
	if g := v.Grants(t.Context(), box("box1", "x")); string(g[0].Value.Reveal()) != canary()+"2" {
		t.Errorf("%+v", g)
	}
}

func TestWhoSeesWhat(t *testing.T) {
	v := openVault(t, t.TempDir(), testKey(1))
	v.set(t, admin, "shared", canary()+"s")
	v.set(t, user, "mine", canary()+"m")
	v.set(t, other, "mine", canary()+"o")
	for _, ref := range []struct{ c, name string }{{"", "shared"}, {user.ID, "mine"}, {other.ID, "mine"}} {
		c := Caller{ID: ref.c}
		if ref.c == "" {
			c = admin
		}
		v.bind(t, c, ref.name, forAll("api.example.com"))
	}
	if all, _ := v.List(user); len(all) != 1 || all[0].Owner != user.ID {
		t.Errorf("a user sees %v", all)
	}
	if all, _ := v.List(admin); len(all) != 3 {
		t.Errorf("an admin sees %v", all)
	}
	sandbox := Caller{ID: "sandbox:abc", Admin: true, Sandbox: true}
	if _, err := v.List(sandbox); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("a sandbox lists secrets: %v", err)
	}
	if _, err := v.Set(t.Context(), sandbox, SetRequest{Name: "x", Value: NewValue([]byte(canary()))}); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("a sandbox sets a secret: %v", err)
	}
	all, _ := v.List(other)
	for _, f := range []func() error{
		func() error { _, err := v.Get(user, all[0].ID); return err },
		func() error { _, err := v.Remove(t.Context(), user, all[0].ID); return err },
		func() error { _, err := v.Rotate(t.Context(), user, "shared", NewValue([]byte(canary()))); return err },
		func() error {
			_, _, err := v.Bind(t.Context(), user, all[0].ID, forAll("evil.example.com"))
			return err
		},
	} {
		if err := f(); !errs.Is(err, errs.NotFound) {
			t.Errorf("another's secret: %v", err)
		}
	}
	names := func(owner string) string {
		var b strings.Builder
		for _, g := range v.Grants(t.Context(), box("box1", owner)) {
			b.WriteString(string(g.Value.Reveal())[len(canary()):])
		}
		return b.String()
	}
	if names(user.ID) != "ms" || names(other.ID) != "os" || names("key_third") != "s" {
		t.Errorf("sandboxes get %s, %s, %s", names(user.ID), names(other.ID), names("key_third"))
	}
}

func TestSelectors(t *testing.T) {
	parent := Subject{ID: "p", Template: "base", Labels: map[string]string{"team": "a"}}
	child := Subject{ID: "c", Template: "base", Labels: map[string]string{"team": "a"}, Parent: &parent}
	stray := Subject{ID: "d", Template: "base", Labels: map[string]string{"team": "b"}, Parent: &parent}
	for _, c := range []struct {
		name string
		s    Selector
		sub  Subject
		want bool
	}{
		{"none", Selector{}, parent, false},
		{"all", Selector{All: true}, parent, true},
		{"by id", Selector{Sandboxes: []string{"p"}}, parent, true},
		{"by another's id", Selector{Sandboxes: []string{"q"}}, parent, false},
		{"template", Selector{Templates: []string{"base"}}, parent, true},
		{"other template", Selector{Templates: []string{"host"}}, parent, false},
		{"label", Selector{Labels: map[string]string{"team": "a"}}, parent, true},
		{"label of another value", Selector{Labels: map[string]string{"team": "b"}}, parent, false},
		{"label and template", Selector{Labels: map[string]string{"team": "a"}, Templates: []string{"base"}}, parent, true},
		{"label and other template", Selector{Labels: map[string]string{"team": "a"}, Templates: []string{"host"}}, parent, false},
		{"empty label is no missing one", Selector{Labels: map[string]string{"x": ""}}, parent, false},
		{"child of one that has it", Selector{Labels: map[string]string{"team": "a"}}, child, true},
		{"child named like what its parent has not", Selector{Labels: map[string]string{"team": "b"}}, stray, false},
		{"child by id, parent not", Selector{Sandboxes: []string{"c"}}, child, false},
		{"parent by id, child not", Selector{Sandboxes: []string{"p"}}, child, false},
		{"both by id", Selector{Sandboxes: []string{"p", "c"}}, child, true},
	} {
		if got := c.s.Matches(c.sub); got != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestBadRequestsSayWhatIsWrong(t *testing.T) {
	v := openVault(t, t.TempDir(), testKey(1))
	v.set(t, user, "ok", canary())
	set := func(r SetRequest) error { _, err := v.Set(t.Context(), user, r); return err }
	bind := func(change func(*Binding)) error {
		b := forAll("api.example.com")
		change(&b)
		_, _, err := v.Bind(t.Context(), user, "ok", b)
		return err
	}
	value := func(s string) Value { return NewValue([]byte(s)) }
	for name, err := range map[string]error{
		"short":         set(SetRequest{Name: "a", Value: value("1234567")}),
		"no value":      set(SetRequest{Name: "a"}),
		"line break":    set(SetRequest{Name: "a", Value: value("abcdefgh\nijkl")}),
		"NUL":           set(SetRequest{Name: "a", Value: value("abcdefgh\x00ijkl")}),
		"space":         set(SetRequest{Name: "a", Value: value("abcdefghijkl ")}),
		"long":          set(SetRequest{Name: "a", Value: value(strings.Repeat("a", MaxValue+1))}),
		"name":          set(SetRequest{Name: "../a", Value: value(canary())}),
		"class":         set(SetRequest{Name: "a", Class: "x", Value: value(canary())}),
		"shape":         set(SetRequest{Name: "a", Value: value(canary()), Shape: &Shape{Prefix: " "}}),
		"no host":       bind(func(b *Binding) { b.Hosts = nil }),
		"address":       bind(func(b *Binding) { b.Hosts = []string{"10.0.0.1"} }),
		"metadata":      bind(func(b *Binding) { b.Hosts = []string{"169.254.169.254"} }),
		"top level":     bind(func(b *Binding) { b.Hosts = []string{"*.com"} }),
		"star":          bind(func(b *Binding) { b.Hosts = []string{"*"} }),
		"url":           bind(func(b *Binding) { b.Hosts = []string{"https://api.example.com/"} }),
		"userinfo":      bind(func(b *Binding) { b.Hosts = []string{"api.example.com@evil.test"} }),
		"port":          bind(func(b *Binding) { b.Hosts = []string{"api.example.com:0"} }),
		"nobody":        bind(func(b *Binding) { b.For = Selector{} }),
		"all and some":  bind(func(b *Binding) { b.For.Sandboxes = []string{"x"} }),
		"host header":   bind(func(b *Binding) { b.Place = Place{Scheme: Header, Name: "Host"} }),
		"framing":       bind(func(b *Binding) { b.Place = Place{Scheme: Header, Name: "Transfer-Encoding"} }),
		"header name":   bind(func(b *Binding) { b.Place = Place{Scheme: Header, Name: "a b"} }),
		"bearer header": bind(func(b *Binding) { b.Place = Place{Scheme: Bearer, Name: "X-Key"} }),
		"scheme":        bind(func(b *Binding) { b.Place = Place{} }),
		"parameter":     bind(func(b *Binding) { b.Place = Place{Scheme: Query, Name: "a&b"} }),
		"format":        bind(func(b *Binding) { b.Place, b.Always = Place{Scheme: Header, Name: "X", Format: "a"}, true }),
		"path":          bind(func(b *Binding) { b.Paths = []string{"v1"} }),
		"path star":     bind(func(b *Binding) { b.Paths = []string{"/*/x"} }),
		"method":        bind(func(b *Binding) { b.Methods = []string{"GET /"} }),
		"env":           bind(func(b *Binding) { b.Env = "A=B" }),
	} {
		text, _ := errs.PublicText(err)
		if !errs.Is(err, errs.InvalidArgument) || text == "" || strings.Contains(text, canary()) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := set(SetRequest{Name: "a", Source: Source{Kind: File, Path: "/etc/shadow"}}); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("a user reads the host's files: %v", err)
	}
}

// Prices are those of a million tokens; what they come to is rounded up, and never runs over.
func TestPrice(t *testing.T) {
	b := Budget{PriceIn: 3_000_000, PriceOut: 15_000_000}
	for _, c := range []struct{ in, out, want int64 }{
		{0, 0, 0}, {1, 0, 3}, {0, 1, 15}, {1000, 2000, 33_000}, {-5, 1, 15}, {math.MaxInt64, math.MaxInt64, math.MaxInt64},
	} {
		if got := b.Price(c.in, c.out); got != c.want {
			t.Errorf("%d and %d tokens cost %d, want %d", c.in, c.out, got, c.want)
		}
	}
	if got := (Budget{PriceIn: 1}).Price(1, 0); got != 1 {
		t.Errorf("a part of a millionth is %d", got)
	}
	route := Route{Provider: "p", Family: OpenAI, BaseURL: "https://models.example.com", For: Selector{All: true}}
	for _, bad := range []Budget{{Cost: 1}, {Cost: -1, PriceIn: 1}, {PriceOut: -1}, {Tokens: -1}} {
		route.Budget = bad
		if err := route.check(); !errs.Is(err, errs.InvalidArgument) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	route.Budget = Budget{Cost: 1, PriceOut: 1}
	if err := route.check(); err != nil {
		t.Error(err)
	}
}

func TestHosts(t *testing.T) {
	for _, c := range []struct {
		pattern, name string
		port          uint16
		want          bool
	}{
		{"api.example.com", "api.example.com", 443, true},
		{"API.Example.COM.", "api.example.com", 443, true},
		{"api.example.com", "api.example.com", 80, false},
		{"api.example.com", "evilapi.example.com", 443, false},
		{"api.example.com", "api.example.com.evil.test", 443, false},
		{"*.example.com", "a.example.com", 443, true},
		{"*.example.com", "a.b.example.com", 443, true},
		{"*.example.com", "example.com", 443, false},
		{"*.example.com", "evilexample.com", 443, false},
		{"*.example.com", ".example.com", 443, false},
		{"a.example.com:8443", "a.example.com", 8443, true},
	} {
		h, err := ParseHost(c.pattern)
		if err != nil {
			t.Fatal(err)
		}
		if got := h.Matches(c.name, c.port); got != c.want {
			t.Errorf("%s against %s:%d: %v", c.pattern, c.name, c.port, got)
		}
		if again, err := ParseHost(h.String()); err != nil || again != h {
			t.Errorf("%s becomes %s", c.pattern, h)
		}
	}
}

func TestClassPolicies(t *testing.T) {
	dir := t.TempDir()
	v := openVault(t, dir, testKey(1))
	s, err := v.Set(t.Context(), user, SetRequest{Name: "k", Class: ModelKey, Value: NewValue([]byte(canary()))})
	if err != nil {
		t.Fatal(err)
	}
	v.bind(t, user, "k", forAll("api.evil.test"))
	policy := func(p ClassPolicy) {
		t.Helper()
		if err := v.SetClassPolicy(t.Context(), admin, ModelKey, p); err != nil {
			t.Fatal(err)
		}
	}
	count := func(sub Subject) int { return len(v.Grants(t.Context(), sub)) }
	sub := box("box1", user.ID)
	if count(sub) != 1 {
		t.Fatal("no grant to begin with: the rest proves nothing")
	}
	if err := v.SetClassPolicy(t.Context(), user, ModelKey, ClassPolicy{}); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("a user sets a policy: %v", err)
	}
	policy(ClassPolicy{Hosts: []string{"*.example.com"}})
	if count(sub) != 0 {
		t.Error("a binding outside of the policy still counts")
	}
	for host, ok := range map[string]bool{"a.example.com": true, "*.b.example.com": true, "*.example.com": true, "example.com": false, "*.example.org": false, "a.example.com:8443": false} {
		_, _, err := v.Bind(t.Context(), user, s.ID, forAll(host))
		if ok != (err == nil) || err != nil && !errs.Is(err, errs.PermissionDenied) {
			t.Errorf("bind to %s: %v", host, err)
		}
	}
	policy(ClassPolicy{Templates: []string{"locked-down"}})
	if count(sub) != 0 {
		t.Error("a template outside of the policy gets it")
	}
	policy(ClassPolicy{RoutesOnly: true})
	if count(sub) != 0 {
		t.Error("it is granted although only routes may use it")
	}
	policy(ClassPolicy{})
	if count(sub) != 1 {
		t.Error("without a policy it is not granted")
	}
}

func TestExternalSources(t *testing.T) {
	v := openVault(t, t.TempDir(), testKey(1))
	path := filepath.Join(t.TempDir(), "token")
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(canary() + "1\n")
	v.env["DEPLOY_TOKEN"] = canary() + "env"
	for name, src := range map[string]Source{
		"file":    {Kind: File, Path: path, Refresh: time.Second},
		"env":     {Kind: Env, Name: "DEPLOY_TOKEN"},
		"command": {Kind: Command, Argv: []string{"/bin/sh", "-c", "cat " + path}},
	} {
		if _, err := v.Set(t.Context(), admin, SetRequest{Name: name, Source: src}); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		v.bind(t, admin, name, forAll("api.example.com"))
	}
	get := func() map[string]string {
		out := map[string]string{}
		for _, g := range v.Grants(t.Context(), box("box1", "x")) {
			out[g.Name] = strings.TrimPrefix(string(g.Value.Reveal()), canary())
		}
		return out
	}
	if g := get(); g["file"] != "1" || g["command"] != "1" || g["env"] != "env" {
		t.Fatalf("%v", g)
	}
	write(canary() + "2\n")
	if s, err := v.Rotate(t.Context(), admin, "command", Value{}); err != nil || s.Version != 2 {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err := v.Rotate(t.Context(), admin, "env", Value{}); err != nil || s.Version != 1 {
		t.Errorf("unchanged, and %+v, %v", s, err)
	}
	// The file is read again by itself.
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { v.Run(ctx); close(done) }()
	deadline := time.After(time.Minute)
	for get()["file"] != "2" {
		select {
		case <-v.Changed():
		case <-deadline:
			t.Fatal("the file was not read again")
		}
	}
	cancel()
	testenv.Receive(t, "it ends", done)
	// One that fails keeps its value and says so.
	write("short")
	if _, err := v.Rotate(t.Context(), admin, "file", Value{}); !errs.Is(err, errs.Unavailable) {
		t.Errorf("%v", err)
	}
	if s, _ := v.Get(admin, "file"); s.Fault == "" || get()["file"] != "2" {
		t.Errorf("fault %q, value %s", s.Fault, get()["file"])
	}
	if _, err := v.Rotate(t.Context(), admin, "file", NewValue([]byte(canary()))); !errs.Is(err, errs.InvalidArgument) {
		t.Errorf("a value for an external secret: %v", err)
	}
}

func TestSourcesThatFail(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if out, err := exec.Command("mkfifo", fifo).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for name, src := range map[string]Source{
		"missing":  {Kind: File, Path: filepath.Join(dir, "none")},
		"fifo":     {Kind: File, Path: fifo},
		"device":   {Kind: File, Path: "/dev/zero"},
		"unset":    {Kind: Env, Name: "NOT_THERE"},
		"fails":    {Kind: Command, Argv: []string{"/bin/sh", "-c", "echo " + canary() + "; exit 3"}},
		"hangs":    {Kind: Command, Argv: []string{"/bin/sh", "-c", "sleep 60 & sleep 60"}, Timeout: 200 * time.Millisecond},
		"floods":   {Kind: Command, Argv: []string{"/bin/sh", "-c", "yes " + canary()}},
		"no such":  {Kind: Command, Argv: []string{"/no/such/program"}},
		"nothing":  {Kind: Command, Argv: []string{"/bin/true"}},
		"relative": {Kind: Command, Argv: []string{"sh"}},
	} {
		began := time.Now()
		err := src.check()
		if err == nil {
			_, err = src.read(t.Context(), func(string) string { return "" })
		}
		if err == nil || strings.Contains(err.Error(), canary()) || time.Since(began) > 50*time.Second {
			t.Errorf("%s: %v after %s", name, err, time.Since(began))
		}
	}
}

// TestAcknowledgedSecretsSurviveKill runs a child that sets secrets and says so, and kills it with -9.
func TestAcknowledgedSecretsSurviveKill(t *testing.T) {
	if dir := os.Getenv("SECRET_TEST_CHILD"); dir != "" {
		v := openVault(t, dir, testKey(1))
		for n := 1; ; n++ {
			v.set(t, admin, "a", fmt.Sprintf("%s%d", canary(), n))
			fmt.Printf("acknowledged %d\n", n)
		}
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run=^TestAcknowledgedSecretsSurviveKill$")
	cmd.Env = append(os.Environ(), "SECRET_TEST_CHILD="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	last := 0
	for {
		n := 0
		if _, err := fmt.Fscanf(out, "acknowledged %d\n", &n); err != nil {
			break
		}
		if last = n; n == 200 {
			_ = cmd.Process.Kill()
		}
	}
	_ = cmd.Wait()
	v := openVault(t, dir, testKey(1))
	s, err := v.Get(admin, "a")
	if err != nil || s.Version < uint64(last) || last < 200 {
		t.Fatalf("acknowledged %d, found %+v, %v", last, s, err)
	}
	raw, err := v.read(s.ID, s.Version)
	if err != nil || string(raw) != fmt.Sprintf("%s%d", canary(), s.Version) {
		t.Errorf("version %d holds %q, %v", s.Version, raw, err)
	}
}

// TestValuesLeakNowhere looks for a value in everything that outlives a call: the files of the data
// directory, the journal, the log, errors, answers as JSON, and what /proc shows of this process.
func TestValuesLeakNowhere(t *testing.T) {
	dir := t.TempDir()
	v := openVault(t, dir, testKey(1))
	v.set(t, admin, "a", canary()+"1")
	b := v.bind(t, admin, "a", forAll("api.example.com"))
	v.set(t, admin, "a", canary()+"2")
	_, errSet := v.Set(t.Context(), admin, SetRequest{Name: "bad name", Value: NewValue([]byte(canary()))})
	_, errLong := v.Set(t.Context(), admin, SetRequest{Name: "b", Value: NewValue([]byte(strings.Repeat(canary(), 1000)))})
	grants := v.Grants(t.Context(), box("box1", "x"))
	if _, err := v.Unbind(t.Context(), admin, "a", b.ID); err != nil {
		t.Fatal(err)
	}
	all, _ := v.List(admin)
	events, err := v.cfg.Journal.Events(t.Context(), journal.ServerStream, 0, 100)
	if err != nil || len(events) < 4 {
		t.Fatalf("%d events, %v", len(events), err)
	}
	texts := map[string]string{"log": v.log.String(), "errors": fmt.Sprintf("%+v %+v", errSet, errLong), "grants": fmt.Sprintf("%+v", grants)}
	for name, x := range map[string]any{"events": events, "list": all, "grants as JSON": grants} {
		j, err := json.Marshal(x)
		if err != nil {
			t.Fatal(err)
		}
		texts[name] = string(j)
	}
	for _, f := range []string{"cmdline", "environ"} {
		raw, err := os.ReadFile("/proc/self/" + f)
		if err != nil {
			t.Fatal(err)
		}
		texts["/proc/self/"+f] = string(raw)
	}
	if err := v.db.Flush(); err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	if len(files) < 2 {
		t.Fatalf("files %v", files)
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		texts[f] = string(raw)
	}
	for name, text := range texts {
		for _, form := range forms([]byte(canary())) {
			if strings.Contains(text, form) {
				t.Errorf("%s holds the value as %q", name, form)
			}
		}
	}
	// The twin: what is stored without a seal would be found.
	if err := v.db.Write(store.PutSetting("twin", canary())); err != nil {
		t.Fatal(err)
	}
	found := false
	for _, f := range files {
		raw, _ := os.ReadFile(f)
		found = found || bytes.Contains(raw, []byte(canary()))
	}
	if !found {
		t.Error("plain text is not found in the data directory's files: the test proves nothing")
	}
}

// forms are the ways in which a value might stand in a text.
func forms(raw []byte) []string {
	quoted, _ := json.Marshal(string(raw))
	b64, _ := json.Marshal(raw)
	return []string{string(raw), strings.Trim(string(quoted), `"`), strings.Trim(string(b64), `"=`), fmt.Sprintf("%x", raw)}
}

// A sandbox's proxy goes with its transforms: to forks of whoever set it, over a restart, and nowhere else.
func TestSandboxProxies(t *testing.T) {
	dir := t.TempDir()
	v := openVault(t, dir, testKey(1))
	word := canary()
	proxyOf := func(id string) string { return string(v.ProxyOf(id).Reveal()) }
	if err := v.SetTransforms(t.Context(), user, "box1", nil, NewValue([]byte(word))); err != nil {
		t.Fatal(err)
	}
	for to, by := range map[string]Caller{"fork": user, "admins": admin, "theirs": other} {
		if err := v.CopyTransforms(t.Context(), by, "box1", to); err != nil {
			t.Errorf("%s: %v", to, err)
		}
	}
	if proxyOf("box1") != word || proxyOf("fork") != word || proxyOf("admins") != word || proxyOf("theirs") != "" {
		t.Errorf("box1 %q, fork %q, admins %q, theirs %q", proxyOf("box1"), proxyOf("fork"), proxyOf("admins"), proxyOf("theirs"))
	}
	if g := v.Grants(t.Context(), box("box1", user.ID)); len(g) != 0 {
		t.Errorf("it is put on requests: %+v", g)
	}
	if all, err := v.List(admin); err != nil || len(all) != 0 {
		t.Errorf("it is listed: %v, %v", all, err)
	}
	if err := v.SetTransforms(t.Context(), user, "box1", nil, Value{}); err != nil || proxyOf("box1") != "" || proxyOf("fork") != word {
		t.Errorf("removed: %v; box1 %q, fork %q", err, proxyOf("box1"), proxyOf("fork"))
	}
	_ = v.db.Close()
	if v = openVault(t, dir, testKey(1)); proxyOf("fork") != word || proxyOf("box1") != "" {
		t.Errorf("after a restart: fork %q, box1 %q", proxyOf("fork"), proxyOf("box1"))
	}
}

func TestTransforms(t *testing.T) {
	dir := t.TempDir()
	v := openVault(t, dir, testKey(1))
	list := func(values ...string) (out []Transform) {
		for _, s := range values {
			out = append(out, Transform{Host: "api.example.com", Header: "X-" + s[:1], Value: NewValue([]byte(s))})
		}
		return out
	}
	values := func(v opened, id string) string {
		var out []string
		for _, g := range v.Grants(t.Context(), box(id, user.ID)) {
			out = append(out, string(g.Value.Reveal()))
		}
		return strings.Join(out, " ")
	}
	if err := v.SetTransforms(t.Context(), user, "box1", list("a1", "b1"), Value{}); err != nil {
		t.Fatal(err)
	}
	if err := v.CopyTransforms(t.Context(), user, "box1", "box2"); err != nil {
		t.Fatal(err)
	}
	if err := v.SetTransforms(t.Context(), user, "box1", list("c1"), Value{}); err != nil {
		t.Fatal(err)
	}
	if values(v, "box1") != "c1" || values(v, "box2") != "a1 b1" || values(v, "box3") != "" {
		t.Errorf("%s; %s; %s", values(v, "box1"), values(v, "box2"), values(v, "box3"))
	}
	if err := v.CopyTransforms(t.Context(), other, "box1", "box3"); err != nil || values(v, "box3") != "" {
		t.Errorf("another copies them: %v", err)
	}
	if err := v.SetTransforms(t.Context(), Caller{ID: "sandbox:x", Sandbox: true}, "box1", nil, Value{}); !errs.Is(err, errs.PermissionDenied) {
		t.Errorf("a sandbox changes them: %v", err)
	}
	if all, _ := v.List(admin); len(all) != 0 {
		t.Errorf("they are listed: %v", all)
	}
	_ = v.db.Close()
	v = openVault(t, dir, testKey(1))
	if values(v, "box1") != "c1" || values(v, "box2") != "a1 b1" {
		t.Errorf("after a restart: %s; %s", values(v, "box1"), values(v, "box2"))
	}
	gone := func(id string) bool { return id == "box2" }
	if err := v.SweepTransforms(gone); err != nil || values(v, "box2") == "" {
		t.Errorf("new ones are swept: %v", err) // their sandbox may be about to start
	}
	for _, e := range v.entries {
		e.CreatedAt = e.CreatedAt.Add(-time.Hour)
	}
	if err := v.SweepTransforms(gone); err != nil || values(v, "box1") != "c1" || values(v, "box2") != "" {
		t.Errorf("%v; %s; %s", err, values(v, "box1"), values(v, "box2"))
	}
	if rows, _ := v.db.Secrets(t.Context()); len(rows) != 1 {
		t.Errorf("%d rows are left", len(rows))
	}
}
