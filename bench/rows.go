package bench

import (
	"context"
	"sync"
	"time"
)

// createCold times a create with the first output of a process, beside whole runs of the peers, in
// turns: what slows the machine down slows all of them.
func createCold(ctx context.Context, b *bench) (Row, error) {
	n := b.rounds(40)
	var ours []time.Duration
	theirs := make([][]time.Duration, len(b.peers))
	for i := range n {
		begun := time.Now()
		id, err := b.create(ctx)
		if err == nil {
			err = b.hello(ctx, id)
		}
		ours = append(ours, time.Since(begun))
		if id != "" {
			_ = b.delete(ctx, id) // it ends by its lifetime at the latest
		}
		if err != nil {
			return Row{}, err
		}
		for p, other := range b.peers {
			if i >= b.rounds(other.rounds) {
				continue
			}
			took, err := repeat(ctx, 1, func() error { return other.run(ctx) })
			if err != nil {
				return Row{}, err
			}
			theirs[p] = append(theirs[p], took...)
		}
	}
	r := Row{Unit: "ms", Stats: oneByOne(ours), Peers: map[string]Stats{}}
	for p, other := range b.peers {
		r.Peers[other.name] = oneByOne(theirs[p])
	}
	if bw, ok := r.Peers["bubblewrap"]; ok {
		r.budget("p50 ≤ 1.3 × bubblewrap", r.P50, 1.3*bw.P50, bw.P50)
	}
	return r, nil
}

// burst makes many sandboxes at once and has each answer.
func burst(ctx context.Context, b *bench) (Row, error) {
	n := b.rounds(100)
	ids := make([]string, n)
	each := make([]time.Duration, n)
	begun := time.Now()
	err := atOnce(n, func(i int) (err error) {
		if ids[i], err = b.create(ctx); err == nil {
			err = b.hello(ctx, ids[i])
		}
		each[i] = time.Since(begun)
		return err
	})
	took := time.Since(begun)
	_ = atOnce(n, func(i int) error { // what fails to go ends by its lifetime
		if ids[i] == "" {
			return nil
		}
		return b.delete(ctx, ids[i])
	})
	if err != nil {
		return Row{}, err
	}
	r := Row{Unit: "ms", Stats: summarize(each), Total: milliseconds(took), Peers: map[string]Stats{}}
	r.Rate = float64(n) / took.Seconds()
	for _, p := range b.peers {
		if p.name != "bubblewrap" {
			continue
		}
		begun := time.Now()
		if err := atOnce(n, func(int) error { return p.run(ctx) }); err != nil {
			return Row{}, err
		}
		other := time.Since(begun)
		r.Peers[p.name] = once(other)
		r.budget("all ≤ 1.3 × as many bubblewraps at once", r.Total, 1.3*milliseconds(other), milliseconds(other))
	}
	floor, err := b.floor.burst(ctx, n)
	if err != nil {
		return Row{}, err
	}
	r.Peers["fork+exec"] = once(floor)
	return r, nil
}

// processTrue times true over HTTP in turns with the floor, so that both meet the machine in the same mood: all
// turns of each count, the bad ones too.
func processTrue(ctx context.Context, b *bench) (Row, error) {
	const turns = 5
	var all []time.Duration
	var floor, inside, least Stats
	err := b.withSandbox(ctx, func(id string) error {
		runs, err := b.putFloor(ctx, id)
		if err != nil {
			return err
		}
		if _, err := repeat(ctx, 20, func() error { return b.runTrue(ctx, id) }); err != nil {
			return err
		}
		for range turns {
			took, err := repeat(ctx, b.rounds(1000)/turns, func() error { return b.runTrue(ctx, id) })
			if err != nil {
				return err
			}
			all = append(all, took...)
			s, err := b.floor.round(ctx, 1, b.rounds(500))
			if err != nil {
				return err
			}
			floor = floor.with(s)
			if runs {
				if s, err = b.insideRound(ctx, id, b.rounds(500)); err != nil {
					return err
				}
				inside = inside.with(s)
			}
			if b.bare == nil {
				continue
			}
			if s, err = b.bare.each(ctx, 1, b.rounds(500)); err != nil {
				return err
			}
			least = least.with(s)
		}
		return nil
	})
	if err != nil {
		return Row{}, err
	}
	r := Row{Unit: "ms", Stats: oneByOne(all), Peers: map[string]Stats{"fork+exec": floor}}
	if inside.N > 0 {
		r.Peers[insideName] = inside
	}
	if b.bare != nil {
		r.Peers[bareName] = least
	}
	r.budget("p50 ≤ 1.5 × fork+exec", r.P50, 1.5*floor.P50, floor.P50)
	r.budget("p99 ≤ 2.5 × fork+exec", r.P99, 2.5*floor.P99, floor.P99)
	return r, nil
}

func process1000(ctx context.Context, b *bench) (Row, error) {
	var all []time.Duration
	err := b.withSandbox(ctx, func(id string) (err error) {
		all, err = repeat(ctx, b.rounds(1000), func() error { return b.hello(ctx, id) })
		return err
	})
	if err != nil {
		return Row{}, err
	}
	r := Row{Unit: "ms", Stats: oneByOne(all)}
	r.budget("mean ≤ 5 ms", r.Mean, 5, 0)
	r.budget("p99 ≤ 20 ms", r.P99, 20, 0)
	return r, nil
}

// throughput has eight clients start processes for a while, each in a sandbox of its own.
func throughput(ctx context.Context, b *bench) (Row, error) {
	const clients = 8
	length := 4 * time.Second
	if b.o.Quick {
		length = 500 * time.Millisecond
	}
	ids := make([]string, clients)
	defer func() {
		for _, id := range ids {
			if id != "" {
				_ = b.delete(ctx, id) // it ends by its lifetime at the latest
			}
		}
	}()
	if err := atOnce(clients, func(i int) (err error) {
		if ids[i], err = b.create(ctx); err == nil {
			err = b.runTrue(ctx, ids[i])
		}
		return err
	}); err != nil {
		return Row{}, err
	}
	var mu sync.Mutex
	var all []time.Duration
	begun := time.Now()
	err := atOnce(clients, func(i int) error {
		for time.Since(begun) < length {
			took, err := repeat(ctx, 1, func() error { return b.runTrue(ctx, ids[i]) })
			if err != nil {
				return err
			}
			mu.Lock()
			all = append(all, took...)
			mu.Unlock()
		}
		return nil
	})
	took := time.Since(begun)
	if err != nil {
		return Row{}, err
	}
	r := Row{Unit: "ms", Stats: summarize(all), Peers: map[string]Stats{}}
	r.Rate = float64(len(all)) / took.Seconds()
	return r, b.floorRates(ctx, &r)
}

// floorRates takes the floor at 1, 2 and 8 workers; the budget counts from the best of them.
func (b *bench) floorRates(ctx context.Context, r *Row) error {
	var best float64
	for workers, name := range map[int]string{1: "fork+exec ×1", 2: "fork+exec ×2", 8: "fork+exec ×8"} {
		s, err := b.floor.each(ctx, workers, b.rounds(800/workers))
		if err != nil {
			return err
		}
		r.Peers[name] = s
		best = max(best, s.Rate)
	}
	r.atLeast("rate ≥ 0.8 × fork+exec", r.Rate, 0.8*best, best)
	if b.bare == nil {
		return nil
	}
	s, err := b.bare.each(ctx, maxBare, b.rounds(400))
	r.Peers[bareName] = s
	return err
}

// bareName is "bare HTTP" among the peers.
const bareName = "bare HTTP"

func deleteRow(ctx context.Context, b *bench) (Row, error) {
	var all []time.Duration
	for range b.rounds(40) {
		id, err := b.create(ctx)
		if err != nil {
			return Row{}, err
		}
		if err := b.hello(ctx, id); err != nil {
			return Row{}, err
		}
		took, err := repeat(ctx, 1, func() error { return b.delete(ctx, id) })
		if err != nil {
			return Row{}, err
		}
		all = append(all, took...)
	}
	r := Row{Unit: "ms", Stats: summarize(all)}
	r.budget("p99 ≤ 50 ms", r.P99, 50, 0)
	return r, nil
}
