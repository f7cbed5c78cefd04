package gateway

import (
	"fmt"
	"testing"
	"time"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/journal/content"
)

// answered is an event with so much content.
func answered(t *testing.T, sandbox string, size int) egress.Event {
	t.Helper()
	k := content.NewKeeper(true)
	_, _ = k.Write(make([]byte, size))
	return egress.Event{Sandbox: sandbox, Type: egress.EventRequest, Path: "/", Bodies: map[string]content.Kept{egress.BodyAnswer: k.Kept()}}
}

// Where no server takes the events, the content that waits with them is bounded, of one sandbox and of all. Every event
// stays, with its hashes, and says what is not kept; and there is room again once the server has taken them. Twin: events
// of as much content are more than the bound.
func TestContentThatWaitsIsBounded(t *testing.T) {
	g := &Gateway{events: newEvents()}
	e := answered(t, "box", content.Most)
	const each = keepContentOne/content.Most + 10
	const boxes = keepContent/keepContentOne + 2
	for i := range boxes {
		e.Sandbox = fmt.Sprint("box", i)
		for range each {
			g.emit(e)
		}
	}
	if e.Content()*each*boxes <= keepContent {
		t.Fatal("as much content as that is no attack")
	}
	if g.events.all > keepContent || g.events.content["box0"] > keepContentOne {
		t.Errorf("%d bytes wait, of one sandbox %d", g.events.all, g.events.content["box0"])
	}
	kept, lost := 0, 0
	var last uint64
	for kept+lost < each*boxes {
		list, n, err := g.Events(t.Context(), last)
		if err != nil {
			t.Fatal(err)
		}
		bytes := 0
		for _, e := range list {
			bytes += e.Content()
			if k := e.Bodies[egress.BodyAnswer]; k.Check() != nil || k.Size != content.Most || (e.Content() > 0) != (e.NotKept == "") {
				t.Fatalf("%+v", e)
			}
			if e.NotKept == "" {
				kept++
			} else {
				lost++
			}
		}
		if bytes > batchContent {
			t.Errorf("%d bytes are handed over at once", bytes)
		}
		last = n
	}
	if want := keepContent / content.Most; kept != want {
		t.Errorf("%d are kept of %d, and %d have room", kept, kept+lost, want)
	}
	g.emit(e)
	if list, _, err := g.Events(t.Context(), last); err != nil || len(list) != 1 || list[0].NotKept != "" {
		t.Errorf("with room again: %+v, %v", list, err)
	}
	if g.events.all != content.Most || len(g.events.content) != 1 {
		t.Errorf("%d bytes are counted, of %d sandboxes", g.events.all, len(g.events.content))
	}
}

// A sandbox that makes requests without end has so much content kept of them and no more; its events go on. One that is
// summed up has no content.
func TestContentOfOneSandboxIsBounded(t *testing.T) {
	g := &Gateway{events: newEvents()}
	s := &sandbox{id: "box", gw: g, quota: newQuota()}
	s.quota.room = 3 * content.Most
	e := answered(t, "box", content.Most)
	for range 5 {
		s.emit(e)
	}
	s.quota.left, s.quota.at = 0, time.Now().Add(time.Hour) // nothing more stands alone
	s.emit(e)
	s.quota.at = time.Now()
	s.flush()
	list, _, err := g.Events(t.Context(), 0)
	if err != nil || len(list) != 6 {
		t.Fatalf("%d events, %v", len(list), err)
	}
	for i, e := range list {
		if whole := e.Content() == content.Most; whole != (i < 3) {
			t.Errorf("event %d holds %d bytes", i, e.Content())
		}
	}
	if list[4].NotKept != whyTooMuch || list[5].Bodies != nil || list[5].Count != 1 {
		t.Errorf("%+v, %+v", list[4], list[5])
	}
}
