package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// createFrom makes a sandbox from a commit.
func (b *bench) createFrom(ctx context.Context, commit string) (string, error) {
	sb, err := b.c.Sandboxes.Create(ctx, &client.CreateRequest{
		Isolation: b.o.Isolation, Template: commit, Labels: map[string]string{"casemate": "bench"},
		Lifetime: durationpb.New(30 * time.Minute),
	})
	return sb.GetId(), err
}

// fork makes one fork of a sandbox.
func (b *bench) fork(ctx context.Context, id string) (string, error) {
	forks, err := b.c.Commits.Fork(ctx, &client.ForkRequest{Sandbox: id})
	if err != nil {
		return "", err
	}
	if text := forks.GetForks()[0].GetError(); text != "" {
		return "", errors.New(text)
	}
	return forks.GetForks()[0].GetSandbox().GetId(), nil
}

// shell runs a script in a sandbox and returns how long it took.
func (b *bench) shell(ctx context.Context, id, script string) (time.Duration, error) {
	begun := time.Now()
	res, err := b.c.Processes.Execute(ctx, id, &client.ProcessSpec{
		Argv: []string{"sh", "-ec", script}, Timeout: durationpb.New(5 * time.Minute),
	}, nil)
	if err == nil && res.GetProcess().GetCode() != 0 {
		err = fmt.Errorf("%s: %s", script, res.GetStderr())
	}
	return time.Since(begun), err
}

// answering times make with the first output of what it makes, which is deleted again.
func (b *bench) answering(ctx context.Context, make func() (string, error)) (time.Duration, error) {
	begun := time.Now()
	id, err := make()
	if err == nil {
		err = b.hello(ctx, id)
	}
	took := time.Since(begun)
	if id != "" {
		_ = b.delete(ctx, id) // it ends by its lifetime at the latest
	}
	return took, err
}

// besideCreate times make in turns with plain creates, and holds it to a create and some more.
func (b *bench) besideCreate(ctx context.Context, n int, more float64, before func() error, make func() (string, error)) (Row, error) {
	var ours, plain []time.Duration
	for range n {
		if err := before(); err != nil {
			return Row{}, err
		}
		took, err := b.answering(ctx, make)
		if err != nil {
			return Row{}, err
		}
		ours = append(ours, took)
		if took, err = b.answering(ctx, func() (string, error) { return b.create(ctx) }); err != nil {
			return Row{}, err
		}
		plain = append(plain, took)
	}
	r := Row{Unit: "ms", Stats: summarize(ours), Peers: map[string]Stats{"create": summarize(plain)}}
	r.budget(fmt.Sprintf("p50 ≤ create + %g ms", more), r.P50, r.Peers["create"].P50+more, r.Peers["create"].P50)
	return r, nil
}

func nothing() error { return nil }

// forkLarge forks a sandbox with 1 GB of committed files.
func forkLarge(ctx context.Context, b *bench) (row Row, err error) {
	err = b.withSandbox(ctx, func(id string) error {
		if _, err := b.shell(ctx, id, fmt.Sprintf("head -c %dM /dev/urandom >large", b.rounds(1000))); err != nil {
			return err
		}
		if _, err := b.c.Commits.Create(ctx, &client.CommitRequest{Sandbox: id}); err != nil {
			return err
		}
		row, err = b.besideCreate(ctx, b.rounds(30), 10, nothing, func() (string, error) { return b.fork(ctx, id) })
		return err
	})
	return row, err
}

// forkMany forks a sandbox with 20,000 files that were written and flushed since its last commit.
func forkMany(ctx context.Context, b *bench) (row Row, err error) {
	err = b.withSandbox(ctx, func(id string) error {
		n, round := b.rounds(20_000), 0
		var flush time.Duration
		before := func() error {
			round++
			_, err := b.shell(ctx, id, fmt.Sprintf("rm -rf f; mkdir f; seq %d | (cd f; split -l 1 -a 5 -)", n))
			if err != nil {
				return err
			}
			took, err := b.shell(ctx, id, "sync")
			flush += took
			return err
		}
		row, err = b.besideCreate(ctx, b.rounds(20)/2, 50, before, func() (string, error) { return b.fork(ctx, id) })
		row.Note = fmt.Sprintf("the flush before each took %.0f ms", milliseconds(flush)/float64(max(round, 1)))
		return err
	})
	return row, err
}

// forks100 makes 100 forks of one sandbox in one call, and has each answer.
func forks100(ctx context.Context, b *bench) (row Row, err error) {
	n := b.rounds(100)
	err = b.withSandbox(ctx, func(id string) error {
		begun := time.Now()
		forks, err := b.c.Commits.Fork(ctx, &client.ForkRequest{Sandbox: id, Count: int32(n)}) //nolint:gosec // at most 100
		if err != nil {
			return err
		}
		each := make([]time.Duration, n)
		err = atOnce(n, func(i int) error {
			f := forks.GetForks()[i]
			if f.GetSandbox() == nil {
				return errors.New(f.GetError())
			}
			err := b.hello(ctx, f.GetSandbox().GetId())
			each[i] = time.Since(begun)
			return err
		})
		took := time.Since(begun)
		_ = atOnce(n, func(i int) error { // what fails to go ends by its lifetime
			return b.delete(ctx, forks.GetForks()[i].GetSandbox().GetId())
		})
		row = Row{Unit: "ms", Stats: summarize(each), Total: milliseconds(took)}
		row.Rate = float64(n) / took.Seconds()
		return err
	})
	return row, err
}

// commitFew commits after 10 of 100,000 committed files were changed.
func commitFew(ctx context.Context, b *bench) (row Row, err error) {
	err = b.withSandbox(ctx, func(id string) error {
		script := fmt.Sprintf("for d in $(seq 100); do mkdir -p f/$d; (cd f/$d; seq %d | split -l 1 -a 4 -); done", b.rounds(1000))
		if _, err := b.shell(ctx, id, script); err != nil {
			return err
		}
		if _, err := b.c.Commits.Create(ctx, &client.CommitRequest{Sandbox: id}); err != nil {
			return err
		}
		var all, frozen []time.Duration
		for range b.rounds(30) {
			if _, err := b.shell(ctx, id, "for d in $(seq 10); do echo changed >>f/$d/xaaaa; done"); err != nil {
				return err
			}
			begun := time.Now()
			c, err := b.c.Commits.Create(ctx, &client.CommitRequest{Sandbox: id})
			if err != nil {
				return err
			}
			all, frozen = append(all, time.Since(begun)), append(frozen, c.GetFrozen().AsDuration())
		}
		row = Row{Unit: "ms", Stats: summarize(all), Peers: map[string]Stats{"standing still": summarize(frozen)}}
		row.budget("p50 ≤ 50 ms", row.P50, 50, 0)
		row.budget("standing still p50 ≤ 20 ms", row.Peers["standing still"].P50, 20, 0)
		return nil
	})
	return row, err
}

// chain starts sandboxes from the last of a thousand commits, each made in a sandbox that was started from
// the one before, in turns with the first.
func chain(ctx context.Context, b *bench) (Row, error) {
	n := b.rounds(1000)
	first, last := "", ""
	var made []string
	defer func() {
		for _, c := range made {
			_, _ = b.c.Commits.Delete(context.WithoutCancel(ctx), c) // what stays is found by gc
		}
	}()
	for i := range n {
		id, err := b.next(ctx, last)
		if err != nil {
			return Row{}, err
		}
		_, err = b.shell(ctx, id, fmt.Sprintf("echo %d >f%d; echo %d >>all", i, i%50, i))
		if err == nil {
			var c *client.Commit
			c, err = b.c.Commits.Create(ctx, &client.CommitRequest{Sandbox: id, Message: fmt.Sprint("link ", i)})
			last = c.GetId()
		}
		if derr := b.delete(ctx, id); err == nil {
			err = derr
		}
		if err != nil {
			return Row{}, err
		}
		if made = append(made, last); first == "" {
			first = last
		}
	}
	var ours, begin []time.Duration
	both := []struct {
		commit string
		times  *[]time.Duration
	}{{last, &ours}, {first, &begin}}
	for range b.rounds(200) { // a difference of a twentieth is looked for
		slices.Reverse(both) // each is as often the one that comes after the other's removal
		for _, from := range both {
			took, err := b.answering(ctx, func() (string, error) { return b.createFrom(ctx, from.commit) })
			if err != nil {
				return Row{}, err
			}
			*from.times = append(*from.times, took)
		}
	}
	r := Row{Unit: "ms", Stats: summarize(ours), Peers: map[string]Stats{"from the first": summarize(begin)}}
	r.budget("p50 ≤ 1.1 × from the first commit", r.P50, 1.1*r.Peers["from the first"].P50, r.Peers["from the first"].P50)
	r.Note = fmt.Sprintf("after a chain of %d commits", n)
	return r, nil
}

// next makes a sandbox from a commit, or from the template where that is "".
func (b *bench) next(ctx context.Context, commit string) (string, error) {
	if commit == "" {
		return b.create(ctx)
	}
	return b.createFrom(ctx, commit)
}
