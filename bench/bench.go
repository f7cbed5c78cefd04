package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// Options say what to measure.
type Options struct {
	Client *client.Client
	// Only limits it to these rows; default all.
	Only []string
	// Isolation, Template and Profile of the sandboxes; "" is the server's default.
	Isolation, Template, Profile string
	// Quick measures each row with few rounds, to see that it works.
	Quick bool
	// Jupyter installs jupyter_client and ipykernel into the user's cache where they are not there yet, to
	// compare contexts with them.
	Jupyter bool
	// HTTPS, where set, runs HTTPS in a fake internet for row "gateway".
	HTTPS func(ctx context.Context) (Row, error)
	// Progress, where set, is told what is measured next.
	Progress func(row string)
}

// bench is one run.
type bench struct {
	o     Options
	c     *client.Client
	floor *floor
	bare  *bare // nil where there is no C compiler
	peers []peer
}

// row is one line of the table: what it is called, and what measures it.
type row struct {
	id, what string
	measure  func(ctx context.Context, b *bench) (Row, error)
}

func rows() []row {
	return []row{
		{"create-cold", "create to first output", createCold},
		{"burst-100", "100 creates at once, all answering", burst},
		{"process-true", "process true over HTTP", processTrue},
		{"process-1000", "1,000 processes in a row", process1000},
		{"journal", "what the journal adds to a process", journalRow},
		{"verify", "verification of a bundle of 500 processes", verifyRow},
		{"file-changes", "0.3 s of work with 10 changed files, recorded", fileChanges},
		{"throughput-8", "process true, 8 clients", throughput},
		{"context-warm", "1+1 in a warm Python context", contextWarm},
		{"context-fresh", "1+1 in a fresh Python", contextFresh},
		{"contexts-8", "1+1 in contexts, 8 clients", contexts8},
		{"fork-1g", "fork with 1 GB committed, to first output", forkLarge},
		{"fork-20k", "fork with 20,000 new files, to first output", forkMany},
		{"forks-100", "100 forks at once, all answering", forks100},
		{"commit-10", "commit of 10 changes to 100,000 files", commitFew},
		{"chain-1000", "create from the last of 1,000 commits", chain},
		{"gvisor", "create on gVisor to first output", gvisorRow},
		{"live-fork", "live fork with a process of 200 MB, to first output", liveFork},
		{"gateway", "a request through the gateway", gatewayRow},
		{"idle-memory", "memory of an idle sandbox", idleMemory},
		{"delete", "delete", deleteRow},
	}
}

// gcPercent lets the heap of some megabytes grow to some ten times as much.
const gcPercent = 1000

// RowIDs returns the ids of all rows, in their order.
func RowIDs() []string {
	var ids []string
	for _, r := range rows() {
		ids = append(ids, r.id)
	}
	return ids
}

// Run measures. What it makes it deletes, though ctx may end meanwhile.
func Run(ctx context.Context, o Options) (Report, error) {
	// What is measured is not how often this program collects its garbage, which is every hundred calls.
	defer debug.SetGCPercent(debug.SetGCPercent(gcPercent))
	report := Report{Started: time.Now().UTC()}
	for _, id := range o.Only {
		if !slices.Contains(RowIDs(), id) {
			return report, fmt.Errorf("no row is called %q", id)
		}
	}
	b := &bench{o: o, c: o.Client}
	dir, err := os.MkdirTemp("", "casemate-bench")
	if err != nil {
		return report, err
	}
	defer removeRunsc(dir, stateOf(runscName))
	if b.floor, err = newFloor(ctx); err != nil {
		return report, err
	}
	defer b.floor.close()
	if b.bare, err = newBare(ctx, b.floor); err != nil {
		return report, err
	}
	if b.bare != nil {
		defer b.bare.close()
	}
	if b.peers, err = peers(ctx, dir); err != nil {
		return report, err
	}
	report.Host = hostLine()
	if note := b.floor.note(); note != "" {
		report.Notes = append(report.Notes, note)
	}
	for _, r := range rows() {
		if len(o.Only) > 0 && !slices.Contains(o.Only, r.id) {
			continue
		}
		if o.Progress != nil {
			o.Progress(r.id)
		}
		measured, err := r.measure(ctx, b)
		if err != nil {
			return report, fmt.Errorf("row %s: %w", r.id, err)
		}
		measured.ID, measured.What = r.id, r.what
		report.Rows = append(report.Rows, measured)
	}
	return report, nil
}

// rounds returns n, or few where it should be quick.
func (b *bench) rounds(n int) int {
	if b.o.Quick {
		return max(2, n/10)
	}
	return n
}

// create makes a sandbox; it ends by itself, should this program be killed.
func (b *bench) create(ctx context.Context) (string, error) { return b.createOn(ctx, b.o.Isolation) }

func (b *bench) createOn(ctx context.Context, isolation string) (string, error) {
	sb, err := b.c.Sandboxes.Create(ctx, &client.CreateRequest{
		Isolation: isolation, Template: b.o.Template, Profile: b.o.Profile,
		Labels: map[string]string{"casemate": "bench"}, Lifetime: durationpb.New(30 * time.Minute),
	})
	return sb.GetId(), err
}

func (b *bench) delete(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	_, err := b.c.Sandboxes.Delete(ctx, id)
	return err
}

// withSandbox runs f with a sandbox that is deleted afterwards.
func (b *bench) withSandbox(ctx context.Context, f func(id string) error) error {
	id, err := b.create(ctx)
	if err != nil {
		return err
	}
	return errors.Join(f(id), b.delete(ctx, id), b.forget(ctx, id))
}

// forget removes what was committed of a sandbox, also on the way to forks: a gigabyte must not stay behind.
func (b *bench) forget(ctx context.Context, sandbox string) error {
	commits, _, err := b.c.Commits.List(ctx, &client.ListCommitsRequest{Sandbox: sandbox, Automatic: true, PageSize: 1000})
	for _, c := range commits {
		_, derr := b.c.Commits.Delete(ctx, c.GetId())
		err = errors.Join(err, derr)
	}
	return err
}

func (b *bench) hello(ctx context.Context, id string) error {
	res, err := b.c.Processes.Execute(ctx, id, &client.ProcessSpec{Argv: []string{"/bin/echo", "hello"}}, nil)
	if err != nil {
		return err
	}
	if out := string(res.GetStdout()); out != "hello\n" {
		return fmt.Errorf("the process printed %q and ended as %s", out, res.GetProcess().GetEnd())
	}
	return nil
}

func (b *bench) runTrue(ctx context.Context, id string) error {
	res, err := b.c.Processes.Execute(ctx, id, &client.ProcessSpec{Argv: []string{"/bin/true"}}, nil)
	if err != nil {
		return err
	}
	if p := res.GetProcess(); p.GetEnd() != "exited" || p.GetCode() != 0 {
		return fmt.Errorf("true ended as %s, code %d", p.GetEnd(), p.GetCode())
	}
	return nil
}

// repeat times f n times, one after the other.
func repeat(ctx context.Context, n int, f func() error) ([]time.Duration, error) {
	all := make([]time.Duration, 0, n)
	for range n {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		begun := time.Now()
		if err := f(); err != nil {
			return nil, err
		}
		all = append(all, time.Since(begun))
	}
	return all, nil
}

// inParallel times f count times in each of some workers.
func inParallel(workers, count int, f func() error) ([]time.Duration, error) {
	results := make([][]time.Duration, workers)
	err := atOnce(workers, func(i int) (err error) {
		results[i], err = repeat(context.Background(), count, f)
		return err
	})
	return slices.Concat(results...), err
}

// atOnce runs f n times at once and returns every error.
func atOnce(n int, f func(i int) error) error {
	all := make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { all[i] = f(i) })
	}
	group.Wait()
	return errors.Join(all...)
}
