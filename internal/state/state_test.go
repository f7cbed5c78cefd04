package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"casemate.dev/internal/clock"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
	"casemate.dev/internal/testenv"
)

// box stands for the domain: it knows one sandbox and the commits of the store.
type box struct{ db *store.DB }

// Get implements Sandboxes.
func (box) Get(_ context.Context, _ sandbox.Principal, ref string) (sandbox.Sandbox, error) {
	if ref != "web" {
		return sandbox.Sandbox{}, errs.New(errs.NotFound, "no sandbox %s", ref)
	}
	return sandbox.Sandbox{ID: "webwebwebwebwebwebwe"}, nil
}

// GetCommit implements Sandboxes.
func (b box) GetCommit(ctx context.Context, _ sandbox.Principal, ref string) (sandbox.Commit, error) {
	c, ok, err := b.db.GetCommit(ctx, ref)
	if err == nil && !ok {
		err = errs.New(errs.NotFound, "no commit %s", ref)
	}
	return sandbox.Commit{ID: c.ID, Owner: c.Owner}, err
}

// still is a clock that stands unless it is told otherwise.
type still struct{ now time.Time }

// Now implements clock.Clock.
func (c *still) Now() time.Time { return c.now }

// AfterFunc implements clock.Clock.
func (c *still) AfterFunc(time.Duration, func()) clock.Timer { panic("nothing here waits") }

// world is documents over a store.
type world struct {
	*Documents
	db    *store.DB
	log   *journal.Log
	clock *still
}

func open(t testing.TB, dir string, maxBytes int64) *world {
	t.Helper()
	db, err := store.Open(store.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	w := &world{db: db, log: journal.Open(db, journal.Options{}), clock: &still{now: time.Unix(1_800_000_000, 0).UTC()}}
	w.Documents = New(Config{DB: db, Journal: w.log, Sandboxes: box{db}, MaxBytes: maxBytes, Clock: w.clock})
	return w
}

var (
	me    = sandbox.Principal{ID: "key_me"}
	other = sandbox.Principal{ID: "key_other"}
	admin = sandbox.Principal{ID: "key_admin", Admin: true}
)

func at(n uint64) *uint64 { return &n }

func plan() Ref { return Ref{Agent: "helper", Name: "plans/today"} }

// set writes content and fails the test where that fails.
func (w *world) set(t testing.TB, r Ref, content string, expect *uint64) Document {
	t.Helper()
	d, err := w.Set(t.Context(), me, SetRequest{Ref: r, Content: []byte(content), Expect: expect})
	if err != nil {
		t.Fatalf("set %s to %q: %v", r.Name, content, err)
	}
	return d
}

func kind(t testing.TB, what string, err error, want errs.Kind) {
	t.Helper()
	if !errs.Is(err, want) {
		t.Errorf("%s: %v, want %s", what, err, want)
	}
	if text, _ := errs.PublicText(err); text == "internal error" {
		t.Errorf("%s: it says nothing: %v", what, err)
	}
}

func TestVersionsAreDenseAndKept(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	for i, content := range []string{`{"a":1}`, "plain", ""} {
		d := w.set(t, plan(), content, nil)
		if d.Version != uint64(i+1) || d.Author != me.ID || !d.At.Equal(w.clock.now) || d.Content != nil {
			t.Errorf("version %d: %+v", i+1, d)
		}
	}
	w.set(t, Ref{Agent: "helper", Name: "other"}, "x", nil)
	for version, want := range map[uint64]string{1: `{"a":1}`, 2: "plain", 3: "", 0: ""} {
		d, err := w.Get(ctx, me, plan(), version)
		if err != nil || string(d.Content) != want || d.Size != int64(len(want)) {
			t.Errorf("version %d: %+v, %v", version, d, err)
		}
	}
	d, err := w.Get(ctx, me, plan(), 1)
	if err != nil || d.ContentType != JSON || d.Digest != "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862" {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err := w.Get(ctx, me, plan(), 2); err != nil || d.ContentType != Bytes {
		t.Errorf("%+v, %v", d, err)
	}
	_, err = w.Get(ctx, me, plan(), 4)
	kind(t, "a version to come", err, errs.NotFound)
	_, err = w.Get(ctx, me, Ref{Agent: "helper", Name: "none"}, 0)
	kind(t, "no document", err, errs.NotFound)
	all, err := w.History(ctx, me, plan(), 0, 2)
	if err != nil || len(all) != 2 || all[0].Version != 3 || all[1].Version != 2 || all[1].Content != nil {
		t.Errorf("history %+v, %v", all, err)
	}
	if all, err = w.History(ctx, me, plan(), 2, 0); err != nil || len(all) != 1 || all[0].Version != 1 {
		t.Errorf("history below 2: %+v, %v", all, err)
	}
}

func TestExpectedVersion(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	set := func(content string, expect uint64, who sandbox.Principal) (Document, error) {
		return w.Set(ctx, who, SetRequest{Ref: Ref{Owner: me.ID, Agent: "helper", Name: "n"}, Content: []byte(content), Expect: &expect})
	}
	_, err := set("a", 1, me)
	kind(t, "expecting a version that never was", err, errs.Conflict)
	if d, err := set("a", 0, me); err != nil || d.Version != 1 {
		t.Fatalf("%+v, %v", d, err)
	}
	_, err = set("b", 0, me)
	kind(t, "expecting none where there is one", err, errs.Conflict)
	if d, err := set("b", 1, me); err != nil || d.Version != 2 {
		t.Fatalf("%+v, %v", d, err)
	}
	// A document that says who holds a lock is the same for all who want it.
	_, err = set("b", 1, me)
	kind(t, "the same write at the same version", err, errs.Conflict)
	if _, hint := errs.PublicText(err); !strings.Contains(hint, "read it again") {
		t.Errorf("hint %q", hint)
	}
}

// TestOneOfManyWritersWins has writers race for each version: one gets it, and the sum of what they
// added is right.
func TestOneOfManyWritersWins(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	const writers, each = 8, 10
	r := Ref{Agent: "helper", Name: "sum"}
	w.set(t, r, "0", at(0))
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for done := 0; done < each; {
				d, err := w.Get(ctx, me, r, 0)
				if err != nil {
					t.Error(err)
					return
				}
				var n int
				_, _ = fmt.Sscan(string(d.Content), &n)
				_, err = w.Set(ctx, me, SetRequest{Ref: r, Content: fmt.Append(nil, n+1), Expect: &d.Version})
				switch {
				case err == nil:
					done++
				case !errs.Is(err, errs.Conflict):
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	d, err := w.Get(ctx, me, r, 0)
	if err != nil {
		t.Fatal(err)
	}
	if d.Version != uint64(1+writers*each) || string(d.Content) != fmt.Sprint(writers*each) {
		t.Errorf("version %d holds %q", d.Version, d.Content)
	}
	all, err := w.History(ctx, me, r, 0, maxPage)
	if err != nil {
		t.Fatal(err)
	}
	for i, d := range all {
		if d.Version != uint64(len(all)-i) {
			t.Fatalf("version %d at place %d of %d", d.Version, i, len(all))
		}
	}
	if len(w.locks)+len(w.agents) != 0 {
		t.Errorf("%d locks and %d agents are left in memory", len(w.locks), len(w.agents))
	}
}

func TestDeleteAndForget(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	w.set(t, plan(), "a", nil)
	_, err := w.Delete(ctx, me, DeleteRequest{Ref: plan(), Expect: at(7)})
	kind(t, "delete another version", err, errs.Conflict)
	d, err := w.Delete(ctx, me, DeleteRequest{Ref: plan(), Expect: at(1)})
	if err != nil || d.Version != 2 || !d.Deleted {
		t.Fatalf("%+v, %v", d, err)
	}
	_, err = w.Get(ctx, me, plan(), 0)
	kind(t, "get a deleted one", err, errs.NotFound)
	if !strings.Contains(err.Error(), "version 2") {
		t.Errorf("it does not say when: %v", err)
	}
	if d, err := w.Get(ctx, me, plan(), 1); err != nil || string(d.Content) != "a" {
		t.Errorf("its last version: %+v, %v", d, err)
	}
	_, err = w.Delete(ctx, me, DeleteRequest{Ref: plan()})
	kind(t, "delete it twice", err, errs.NotFound)
	if all, _, _, err := w.List(ctx, me, Query{Agent: "helper"}); err != nil || len(all) != 0 {
		t.Errorf("list: %+v, %v", all, err)
	}
	if all, _, _, err := w.List(ctx, me, Query{Agent: "helper", Deleted: true}); err != nil || len(all) != 1 || !all[0].Deleted {
		t.Errorf("list with deleted: %+v, %v", all, err)
	}
	if d := w.set(t, plan(), "b", at(0)); d.Version != 3 {
		t.Errorf("written again: version %d, want 3", d.Version)
	}
	if d, err := w.Forget(ctx, me, DeleteRequest{Ref: plan()}); err != nil || d.Version != 3 {
		t.Errorf("forget: %+v, %v", d, err)
	}
	_, err = w.History(ctx, me, plan(), 0, 0)
	kind(t, "history of a forgotten one", err, errs.NotFound)
	if a, err := w.db.GetStateAgent(ctx, me.ID, "helper"); err != nil || a.Bytes != 0 || a.Documents != 0 || a.Revision != 3 || a.Removed != 3 {
		t.Errorf("its agent: %+v, %v", a, err)
	}
	if d := w.set(t, plan(), "c", at(0)); d.Version != 1 || d.Revision != 4 {
		t.Errorf("after that: %+v", d)
	}
}

func TestListPages(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	for _, name := range []string{"b/1", "a", "b/2", "b", "b/é", "bc", "c"} {
		w.set(t, Ref{Agent: "helper", Name: name}, "x", nil)
	}
	names := func(q Query) (all []string) {
		t.Helper()
		q.Agent = "helper"
		for {
			page, next, revision, err := w.List(ctx, me, q)
			if err != nil || revision != 7 {
				t.Fatalf("%+v: revision %d, %v", q, revision, err)
			}
			for _, d := range page {
				all = append(all, d.Name)
			}
			if q.PageToken = next; next == "" {
				return all
			}
		}
	}
	if d := cmp.Diff([]string{"a", "b", "b/1", "b/2", "b/é", "bc", "c"}, names(Query{PageSize: 2})); d != "" {
		t.Errorf("all (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]string{"b/1", "b/2", "b/é"}, names(Query{Prefix: "b/", PageSize: 1})); d != "" {
		t.Errorf("a folder (-want +got):\n%s", d)
	}
	for _, q := range []Query{{Agent: "helper", PageSize: -1}, {Agent: "helper", PageSize: 1001}, {Agent: "helper", PageToken: "%"}, {Agent: "/"}, {Agent: "helper", Prefix: "\n"}} {
		_, _, _, err := w.List(ctx, me, q)
		kind(t, fmt.Sprintf("%+v", q), err, errs.InvalidArgument)
	}
}

// TestOthersSeeNothing: a key's documents are its own; an administrator names whose are meant.
func TestOthersSeeNothing(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	w.set(t, plan(), "mine", nil)
	mine := plan()
	mine.Owner = me.ID
	_, err := w.Get(ctx, other, plan(), 0)
	kind(t, "another's get", err, errs.NotFound)
	_, err = w.Get(ctx, other, mine, 0)
	kind(t, "another's get by owner", err, errs.PermissionDenied)
	_, err = w.Set(ctx, other, SetRequest{Ref: mine, Content: []byte("theirs")})
	kind(t, "another's set by owner", err, errs.PermissionDenied)
	_, err = w.Delete(ctx, other, DeleteRequest{Ref: mine})
	kind(t, "another's delete", err, errs.PermissionDenied)
	_, err = w.Forget(ctx, other, DeleteRequest{Ref: mine})
	kind(t, "another's forget", err, errs.PermissionDenied)
	_, err = w.Keep(ctx, other, me.ID, "helper", Retention{Versions: 1})
	kind(t, "another's retention", err, errs.PermissionDenied)
	_, _, err = w.Agents(ctx, other, "", true, 0, "")
	kind(t, "everybody's agents", err, errs.PermissionDenied)
	err = w.Watch(ctx, other, WatchQuery{Owner: me.ID, Agent: "helper"}, &tape{})
	kind(t, "another's watch", err, errs.PermissionDenied)
	for _, who := range []sandbox.Principal{{}, {ID: "sandbox:x", Sandbox: "x"}, {ID: me.ID, Sandbox: "x", Admin: true}} {
		_, err := w.Get(ctx, who, plan(), 0)
		kind(t, fmt.Sprintf("%+v", who), err, errs.PermissionDenied)
	}
	if d, err := w.Get(ctx, admin, mine, 0); err != nil || string(d.Content) != "mine" {
		t.Errorf("an administrator: %+v, %v", d, err)
	}
	_, err = w.Get(ctx, admin, plan(), 0)
	kind(t, "an administrator's own", err, errs.NotFound)
	if d, err := w.Set(ctx, admin, SetRequest{Ref: mine, Content: []byte("changed")}); err != nil || d.Author != admin.ID || d.Owner != me.ID {
		t.Errorf("an administrator writes: %+v, %v", d, err)
	}
	if _, err := w.Set(ctx, other, SetRequest{Ref: plan(), Content: []byte("x")}); err != nil {
		t.Error(err)
	}
	var seen []string
	for tok, more := "", true; more; more = tok != "" {
		page, next, err := w.Agents(ctx, admin, "", true, 1, tok)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range page {
			seen = append(seen, fmt.Sprint(a.Owner, " ", a.Name, " ", a.Documents))
		}
		tok = next
	}
	if d := cmp.Diff([]string{"key_me helper 1", "key_other helper 1"}, seen); d != "" {
		t.Errorf("agents (-want +got):\n%s", d)
	}
}

func TestNamesAndContents(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	for _, r := range []Ref{
		{Agent: "", Name: "n"},
		{Agent: "a/b", Name: "n"},
		{Agent: "-a", Name: "n"},
		{Agent: "ä", Name: "n"},
		{Agent: strings.Repeat("a", maxAgent+1), Name: "n"},
		{Agent: "a", Name: ""},
		{Agent: "a", Name: "/n"},
		{Agent: "a", Name: "n/"},
		{Agent: "a", Name: "n//m"},
		{Agent: "a", Name: "../n"},
		{Agent: "a", Name: "n/."},
		{Agent: "a", Name: "n\x00"},
		{Agent: "a", Name: "n\xff"},
		{Agent: "a", Name: "a\\b"},
		{Agent: "a", Name: "\u202en"},
		{Agent: "a", Name: " n"},
		{Agent: "a", Name: strings.Repeat("n", maxSegment+1)},
		{Agent: "a", Name: strings.Repeat("n/", maxName/2) + "n"},
	} {
		_, err := w.Set(ctx, me, SetRequest{Ref: r, Content: []byte("x")})
		kind(t, fmt.Sprintf("%.40q", r), err, errs.InvalidArgument)
	}
	for _, r := range []Ref{{Agent: "user-7@example.org", Name: "Größe 1/ü.json"}, {Agent: "A.b_c", Name: "...a"}} {
		w.set(t, r, "x", nil)
	}
	_, err := w.Set(ctx, me, SetRequest{Ref: plan(), Content: make([]byte, MaxDocument+1)})
	kind(t, "too large", err, errs.TooLarge)
	if !strings.Contains(err.Error(), fmt.Sprint(MaxDocument)) {
		t.Errorf("it does not say the limit: %v", err)
	}
	if d, err := w.Set(ctx, me, SetRequest{Ref: plan(), Content: bytes.Repeat([]byte("1"), MaxDocument), ContentType: "text/plain"}); err != nil || d.Size != MaxDocument {
		t.Errorf("the largest: %+v, %v", d, err)
	}
	_, err = w.Set(ctx, me, SetRequest{Ref: plan(), Content: []byte(`{"a":`), ContentType: JSON})
	kind(t, "half of JSON", err, errs.InvalidArgument)
	_, err = w.Set(ctx, me, SetRequest{Ref: plan(), Content: []byte(`{`), ContentType: "application/vnd.x+json"})
	kind(t, "half of a kind of JSON", err, errs.InvalidArgument)
	_, err = w.Set(ctx, me, SetRequest{Ref: plan(), Content: []byte(`x`), ContentType: "text\nplain"})
	kind(t, "a type that is none", err, errs.InvalidArgument)
	if d, err := w.Set(ctx, me, SetRequest{Ref: plan(), Content: []byte("x"), ContentType: "Text/Plain; Charset=UTF-8"}); err != nil || d.ContentType != "text/plain; charset=UTF-8" {
		t.Errorf("%+v, %v", d, err)
	}
	if d := w.set(t, plan(), "{}", nil); d.ContentType != "text/plain; charset=UTF-8" {
		t.Errorf("the type did not stay: %+v", d)
	}
}

func TestLimitOfAPrincipal(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 3*(1000+store.StateOverhead)), t.Context()
	big := SetRequest{Ref: plan(), Content: make([]byte, 1000), ContentType: Bytes}
	for range 3 {
		if _, err := w.Set(ctx, me, big); err != nil {
			t.Fatal(err)
		}
	}
	_, err := w.Set(ctx, me, SetRequest{Ref: Ref{Agent: "else", Name: "n"}})
	kind(t, "one more", err, errs.ResourceExhausted)
	if _, err := w.Set(ctx, other, big); err != nil {
		t.Errorf("another's: %v", err)
	}
	if _, err := w.Delete(ctx, me, DeleteRequest{Ref: plan()}); err != nil {
		t.Errorf("a full store must take deletions: %v", err)
	}
	if _, err := w.Forget(ctx, me, DeleteRequest{Ref: plan()}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Set(ctx, me, big); err != nil {
		t.Errorf("after room was made: %v", err)
	}
}

func TestRetention(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	versions := func() (all []uint64) {
		t.Helper()
		list, err := w.History(ctx, me, plan(), 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range list {
			all = append(all, d.Version)
		}
		return all
	}
	for i := range 5 {
		w.set(t, plan(), fmt.Sprint(i), nil)
		w.clock.now = w.clock.now.Add(time.Hour)
	}
	if a, err := w.Keep(ctx, me, "", "helper", Retention{Versions: 3}); err != nil || a.Versions != 3 {
		t.Fatalf("%+v, %v", a, err)
	}
	w.set(t, plan(), "5", nil)
	if d := cmp.Diff([]uint64{6, 5, 4}, versions()); d != "" {
		t.Errorf("3 versions (-want +got):\n%s", d)
	}
	_, err := w.Get(ctx, me, plan(), 3)
	kind(t, "a version that went", err, errs.NotFound)
	if !strings.Contains(err.Error(), "no longer kept") {
		t.Errorf("it does not say so: %v", err)
	}
	// Version 4 was replaced two hours ago, version 5 an hour later, version 6 is the newest.
	if _, err := w.Keep(ctx, me, "", "helper", Retention{For: 90 * time.Minute}); err != nil {
		t.Fatal(err)
	}
	w.clock.now = w.clock.now.Add(time.Hour)
	if err := w.sweep(ctx); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]uint64{6, 5}, versions()); d != "" {
		t.Errorf("90 minutes (-want +got):\n%s", d)
	}
	if _, err := w.Delete(ctx, me, DeleteRequest{Ref: plan()}); err != nil {
		t.Fatal(err)
	}
	w.clock.now = w.clock.now.Add(deletedFor + time.Second)
	if err := w.sweep(ctx); err != nil {
		t.Fatal(err)
	}
	_, err = w.History(ctx, me, plan(), 0, 0)
	kind(t, "a document deleted long ago", err, errs.NotFound)
	a, err := w.db.GetStateAgent(ctx, me.ID, "helper")
	if err != nil || a.Bytes != 0 || a.Removed != a.Revision {
		t.Errorf("%+v, %v", a, err)
	}
	for _, r := range []Retention{{Versions: -2}, {For: -1}} {
		_, err := w.Keep(ctx, me, "", "helper", r)
		kind(t, fmt.Sprint(r), err, errs.InvalidArgument)
	}
}

func TestLinks(t *testing.T) {
	w, ctx := open(t, t.TempDir(), 0), t.Context()
	if err := w.db.Write(store.AddCommit(store.Commit{ID: "cmt_a", Owner: me.ID, Body: []byte("{}")}),
		store.AddCommit(store.Commit{ID: "cmt_b", Owner: me.ID, Body: []byte("{}")})); err != nil {
		t.Fatal(err)
	}
	link := func(l Links) (Document, error) {
		return w.Set(ctx, me, SetRequest{Ref: plan(), Links: l, Content: []byte("x")})
	}
	_, err := link(Links{Commit: "cmt_none"})
	kind(t, "a commit that is not there", err, errs.NotFound)
	_, err = link(Links{Sandbox: "none"})
	kind(t, "a sandbox that is not there", err, errs.NotFound)
	if err := w.db.Write(store.AddCommit(store.Commit{ID: "cmt_shared", Owner: "key_other", Body: []byte("{}")})); err != nil {
		t.Fatal(err)
	}
	_, err = link(Links{Commit: "cmt_shared"}) // it is seen, since its template is shared
	kind(t, "another's commit", err, errs.PermissionDenied)
	d, err := link(Links{Commit: "cmt_a", Sandbox: "web"})
	if err != nil || d.Commit != "cmt_a" || d.Sandbox != "webwebwebwebwebwebwe" {
		t.Fatalf("%+v, %v", d, err)
	}
	if _, err := link(Links{Commit: "cmt_b"}); err != nil {
		t.Fatal(err)
	}
	links, err := w.db.StateLinks(ctx)
	if d := cmp.Diff(map[string]string{"cmt_a": "", "cmt_b": "helper/plans/today"}, links); err != nil || d != "" {
		t.Errorf("links: %v (-want +got):\n%s", err, d)
	}
	for _, c := range []struct {
		id       string
		old, may bool
	}{{"cmt_b", true, false}, {"cmt_b", false, false}, {"cmt_a", false, false}, {"cmt_a", true, true}} {
		if err := w.db.Write(store.DropCommit(c.id, c.old)); (err == nil) != c.may {
			t.Errorf("drop %s, old %v: %v", c.id, c.old, err)
		}
	}
	// What goes between the look and the write is not linked to.
	gone := store.StateVersion{Owner: me.ID, Agent: "helper", Name: "n", Version: 1, Revision: 99, Digest: []byte{}, Commit: "cmt_a", Content: []byte{}}
	kind(t, "a commit that has gone", w.db.Write(store.AddStateVersion(gone)), errs.NotFound)

	events, err := w.log.Events(ctx, "webwebwebwebwebwebwe", 0, 0)
	if err != nil || len(events) != 1 || events[0].Type != journal.DocumentSet || !strings.Contains(string(events[0].Facts[journal.Server]), `"commit":"cmt_a"`) {
		t.Errorf("the sandbox's journal: %+v, %v", events, err)
	}
	if events, err = w.log.Events(ctx, journal.ServerStream, 0, 0); err != nil || len(events) != 1 || events[0].Actor != me.ID {
		t.Errorf("the server's journal: %+v, %v", events, err)
	}
}

// tape records what a watch sends; full is returned once it holds enough.
type tape struct {
	mu    sync.Mutex
	got   []string
	last  uint64
	ready chan struct{}
	want  int
	hold  chan struct{} // where set, each item waits for one from it
}

var errFull = errors.New("full")

// Ready implements WatchSink.
func (s *tape) Ready() error {
	if s.ready != nil {
		close(s.ready)
	}
	return nil
}

// Version implements WatchSink.
func (s *tape) Version(d Document) error {
	text := string(d.Content)
	if d.Deleted {
		text = "deleted"
	}
	s.last = d.Revision
	return s.add(fmt.Sprintf("%s@%d %s", d.Name, d.Version, text))
}

// Gap implements WatchSink.
func (s *tape) Gap(g Gap) error { return s.add(fmt.Sprintf("gap %d-%d", g.From, g.To)) }

func (s *tape) add(text string) error {
	if s.hold != nil {
		<-s.hold
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, text)
	if len(s.got) == s.want {
		return errFull
	}
	return nil
}

func (w *world) watch(t *testing.T, q WatchQuery, want ...string) uint64 {
	t.Helper()
	q.Agent, q.Content = "helper", true
	s := &tape{want: len(want)}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := w.Watch(ctx, me, q, s); !errors.Is(err, errFull) {
		t.Errorf("watch %+v: %v", q, err)
	}
	if d := cmp.Diff(want, s.got); d != "" {
		t.Errorf("watch %+v (-want +got):\n%s", q, d)
	}
	return s.last
}

func TestWatchFromAnywhere(t *testing.T) {
	dir := t.TempDir()
	w, ctx := open(t, dir, 0), t.Context()
	a, b := Ref{Agent: "helper", Name: "f/a"}, Ref{Agent: "helper", Name: "f/b"}
	w.set(t, a, "1", nil)
	w.set(t, b, "2", nil)
	w.set(t, Ref{Agent: "helper", Name: "g"}, "3", nil)
	w.set(t, a, "4", nil)
	if _, err := w.Delete(ctx, me, DeleteRequest{Ref: a}); err != nil {
		t.Fatal(err)
	}
	w.watch(t, WatchQuery{}, "f/a@1 1", "f/b@1 2", "g@1 3", "f/a@2 4", "f/a@3 deleted")
	w.watch(t, WatchQuery{Prefix: "f/", After: 1}, "f/b@1 2", "f/a@2 4", "f/a@3 deleted")
	w.watch(t, WatchQuery{Name: "f/a", AfterVersion: 1}, "f/a@2 4", "f/a@3 deleted")
	err := w.Watch(ctx, me, WatchQuery{Agent: "helper", After: 6}, &tape{})
	kind(t, "after what is to come", err, errs.InvalidArgument)
	err = w.Watch(ctx, me, WatchQuery{Agent: "helper", Name: "f/a", AfterVersion: 4}, &tape{})
	kind(t, "after a version to come", err, errs.InvalidArgument)
	err = w.Watch(ctx, me, WatchQuery{Agent: "helper", Name: "f/a", Prefix: "f"}, &tape{})
	kind(t, "a name and a prefix", err, errs.InvalidArgument)

	// The server goes and comes.
	if err := w.db.Close(); err != nil {
		t.Fatal(err)
	}
	w = open(t, dir, 0)
	if d := w.set(t, b, "5", at(1)); d.Version != 2 || d.Revision != 6 {
		t.Errorf("after a restart: %+v", d)
	}
	w.watch(t, WatchQuery{After: 4}, "f/a@3 deleted", "f/b@2 5")

	// What is no longer kept leaves a gap that is told, once.
	if _, err := w.Keep(ctx, me, "", "helper", Retention{Versions: 1}); err != nil {
		t.Fatal(err)
	}
	w.set(t, b, "6", nil)
	w.watch(t, WatchQuery{}, "gap 0-6", "f/a@1 1", "g@1 3", "f/a@2 4", "f/a@3 deleted", "f/b@3 6")
	w.watch(t, WatchQuery{Name: "f/b", AfterVersion: 1}, "gap 0-6", "f/b@3 6")
	w.watch(t, WatchQuery{After: 6}, "f/b@3 6")
}

// TestWatchMissesNothing has writers write while watchers watch, one of them slow and one that breaks off and
// goes on: each sees each version once, in order.
func TestWatchMissesNothing(t *testing.T) {
	w := open(t, t.TempDir(), 0)
	const writers, each = 4, 50
	slow := make(chan struct{}, writers*each)
	sinks := []*tape{{want: writers * each, ready: make(chan struct{})}, {want: writers * each, ready: make(chan struct{}), hold: slow}}
	var watching sync.WaitGroup
	for _, s := range sinks {
		watching.Go(func() {
			if err := w.Watch(t.Context(), me, WatchQuery{Agent: "helper"}, s); !errors.Is(err, errFull) {
				t.Errorf("watch: %v", err)
			}
		})
		testenv.Receive(t, "the watch is there", s.ready)
	}
	var pieces []string
	watching.Go(func() {
		for at := uint64(0); len(pieces) < writers*each; {
			s := &tape{want: 7}
			if len(pieces)+s.want > writers*each {
				s.want = writers*each - len(pieces)
			}
			if err := w.Watch(t.Context(), me, WatchQuery{Agent: "helper", After: at}, s); !errors.Is(err, errFull) {
				t.Errorf("watch in pieces: %v", err)
				return
			}
			pieces, at = append(pieces, s.got...), s.last
		}
	})
	var writing sync.WaitGroup
	for i := range writers {
		writing.Go(func() {
			for n := range each {
				_, err := w.Set(t.Context(), me, SetRequest{Ref: Ref{Agent: "helper", Name: fmt.Sprint("d", i)}, Content: []byte("x"), Expect: at(uint64(n))})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	writing.Wait()
	for range writers * each {
		slow <- struct{}{}
	}
	watching.Wait()
	next := make(map[string]int)
	for _, text := range sinks[0].got {
		var name string
		var version int
		if _, err := fmt.Sscanf(strings.Replace(text, "@", " ", 1), "%s %d", &name, &version); err != nil || version != next[name]+1 {
			t.Fatalf("%q after version %d, %v", text, next[name], err)
		}
		next[name]++
	}
	if d := cmp.Diff(sinks[0].got, sinks[1].got); d != "" {
		t.Errorf("the slow one saw another order:\n%s", d)
	}
	if d := cmp.Diff(sinks[0].got, pieces); d != "" {
		t.Errorf("the one in pieces saw another order:\n%s", d)
	}
}

func BenchmarkSet(b *testing.B) {
	w := open(b, b.TempDir(), 1<<40)
	content := []byte(`{"messages":[` + strings.Repeat(`{"role":"user","content":"hello"},`, 30) + `{}]}`)
	var n int
	for b.Loop() {
		n++
		w.set(b, Ref{Agent: "helper", Name: fmt.Sprint("d", n%100)}, string(content), nil)
	}
}

func BenchmarkSetParallel(b *testing.B) {
	w := open(b, b.TempDir(), 1<<40)
	var mu sync.Mutex
	var n int
	b.SetParallelism(16)
	b.RunParallel(func(pb *testing.PB) {
		mu.Lock()
		n++
		r := Ref{Agent: fmt.Sprint("a", n), Name: "d"}
		mu.Unlock()
		for pb.Next() {
			w.set(b, r, "{}", nil)
		}
	})
}

// BenchmarkWatch measures from before a write to its arrival.
func BenchmarkWatch(b *testing.B) {
	w := open(b, b.TempDir(), 1<<40)
	s := &tape{ready: make(chan struct{}), hold: make(chan struct{})}
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan error, 1)
	go func() { done <- w.Watch(ctx, me, WatchQuery{Agent: "helper"}, s) }()
	testenv.Receive(b, "the watch is there", s.ready)
	for b.Loop() {
		w.set(b, plan(), "{}", nil)
		s.hold <- struct{}{}
	}
	cancel()
	testenv.Receive(b, "the watch ends", done)
}
