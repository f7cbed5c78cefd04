package rootfs

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/testenv"
)

func TestShare(t *testing.T) {
	for name, c := range map[string]struct {
		capacity int64
		claims   []claim
		want     []int64
	}{
		"nobody":         {100, nil, []int64{}},
		"enough for all": {100, []claim{{0, 40}, {10, 50}}, []int64{40, 50}},
		"equal room":     {100, []claim{{0, 100}, {20, 100}}, []int64{40, 60}},
		"small ones first": {
			100,
			[]claim{{0, 1000}, {0, 10}, {0, 1000}},
			[]int64{45, 10, 45},
		},
		"more used than there is": {50, []claim{{40, 100}, {30, 100}}, []int64{40, 30}},
		"used above the limit":    {100, []claim{{30, 20}, {0, 100}}, []int64{30, 70}},
	} {
		if got := share(c.capacity, c.claims); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}

func TestShareKeepsItsPromises(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		capacity := r.Int64N(1000)
		claims := make([]claim, r.IntN(20))
		var used int64
		for i := range claims {
			claims[i] = claim{used: r.Int64N(60), want: r.Int64N(200)}
			used += claims[i].used
		}
		var sum int64
		for i, l := range share(capacity, claims) {
			sum += l
			if l < claims[i].used || l > max(claims[i].used, claims[i].want) {
				t.Fatalf("limit %d for %+v", l, claims[i])
			}
		}
		if sum > max(capacity, used) {
			t.Fatalf("%d given of %d, %d in use", sum, capacity, used)
		}
	}
}

// Sandboxes are promised four times what the image has. The limits that hold never exceed it, and a
// busy one still gets far more than an equal part while the others are idle.
func TestPromisesBeyondTheImage(t *testing.T) {
	testenv.NoLeaks(t)
	s := open(t, Config{Mechanism: byBtrfs})
	d := s.disk.(*btrfsDisk)
	check := func() {
		t.Helper()
		d.mu.Lock()
		defer d.mu.Unlock()
		var given int64
		for _, g := range d.layers {
			given += g.given
		}
		if given > d.capacity {
			t.Errorf("%d MB given of %d", given>>20, d.capacity>>20)
		}
	}
	const n = 12
	var plans []Plan
	for range n {
		_, p := plan(t, s, Request{DiskBytes: 256 << 20})
		if p.Disk.Bytes != 256<<20 || p.Disk.Backed > p.Disk.Bytes {
			t.Errorf("%+v", p.Disk)
		}
		plans = append(plans, p)
		check()
	}
	// 200 MB in pieces, as fast as the store evens out.
	for i := range 25 {
		testenv.Eventually(t, limit, "room for 8 MB more", func() bool {
			err := write(t, plans[0].Upper+"/"+itoa(i), 8<<20)
			if err != nil && !full(err) {
				t.Fatal(err)
			}
			return err == nil
		})
		check()
	}
	for i, p := range plans[1:] { // and the idle ones still can write
		if err := write(t, p.Upper+"/f", 1<<20); err != nil {
			t.Errorf("idle sandbox %d: %v", i, err)
		}
	}
	check()
}

// When nothing is left, a create is refused with its kind, and works again once a sandbox is deleted.
func TestStoreFull(t *testing.T) {
	testenv.NoLeaks(t)
	s := open(t, Config{Mechanism: byBtrfs, ImageBytes: minImage})
	var boxes []string
	for range 50 {
		box := id.Sandbox()
		p, err := s.Plan(t.Context(), Request{ID: box, Template: "host", DiskBytes: 256 << 20})
		if err != nil {
			if !errs.Is(err, errs.ResourceExhausted) {
				t.Fatal(err)
			}
			break
		}
		boxes = append(boxes, box)
		for i := 0; write(t, p.Upper+"/"+itoa(i), 8<<20) == nil; i++ {
		}
	}
	if len(boxes) == 50 {
		t.Fatal("never full")
	}
	for _, b := range boxes {
		if err := s.Release(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, limit, "room again", func() bool {
		box := id.Sandbox()
		p, err := s.Plan(t.Context(), Request{ID: box, Template: "host", DiskBytes: 64 << 20})
		if err != nil {
			return false
		}
		return os.WriteFile(p.Upper+"/f", make([]byte, 4<<20), 0o644) == nil
	})
}
