package selftest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Options say what to run.
type Options struct {
	Target Target
	// Isolation is the backend to attack; "" is the server's default.
	Isolation string
	// Profiles to attack; default both.
	Profiles []string
	// Internet is what section F talks to, and the Target's server must be in it. With it that section runs and nothing
	// else, without it everything else.
	Internet *Internet
	// Only limits the battery to cases whose id begins with one of these.
	Only []string
	// Patience bounds how slow a neighbour's process may become while a case rages, beside what the machine takes for
	// it before; default 3 s, which is far above what an idle machine gives, and far below what a person would call
	// broken. Tests, which share a machine with others, have more.
	Patience time.Duration
	// Each, where set, is told of every verdict as it comes.
	Each func(Verdict)
}

// Cases returns the whole battery, in its order. Those with a Flow need an Internet.
func Cases() []Case {
	return slices.Concat(identityCases(), fileCases(), callCases(), hardeningCases(), resourceCases(), networkCases())
}

// Run attacks sandboxes of every profile and reports what came of it. An error means that the
// battery could not be run; a case that came out wrong is in the Report.
func Run(ctx context.Context, o Options) (Report, error) {
	report := Report{Isolation: o.Isolation, Started: time.Now().UTC()}
	if o.Patience == 0 {
		o.Patience = 3 * time.Second
	}
	profiles := o.Profiles
	if len(profiles) == 0 {
		profiles = []string{"locked", "standard"}
	}
	for _, p := range profiles {
		r := runner{o: o, col: Column{o.Isolation, p}, report: &report}
		if err := r.run(ctx); err != nil {
			return report, fmt.Errorf("profile %s: %w", p, err)
		}
	}
	report.Took = time.Since(report.Started)
	return report, nil
}

// runner attacks the sandboxes of one profile.
type runner struct {
	o         Options
	col       Column
	report    *Report
	box       Sandbox
	neighbour Sandbox
}

func (r *runner) run(ctx context.Context) (err error) {
	if r.neighbour, err = r.create(ctx, battleLimits(), nil); err != nil {
		return err
	}
	defer r.delete(ctx, &r.neighbour)
	defer r.delete(ctx, &r.box)
	for _, c := range Cases() {
		if !Selected(c.ID, r.o.Only) || (c.Flow == nil) != (r.o.Internet == nil) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		v := r.attack(ctx, c)
		r.report.Verdicts = append(r.report.Verdicts, v)
		if r.o.Each != nil {
			r.o.Each(v)
		}
	}
	return nil
}

// Selected reports whether a case is among those whose ids begin with one of only, which may be empty for all.
func Selected(id string, only []string) bool {
	return len(only) == 0 || slices.ContainsFunc(only, func(p string) bool { return strings.HasPrefix(id, strings.ToUpper(p)) })
}

func (r *runner) create(ctx context.Context, l Limits, f *Flow) (Sandbox, error) {
	spec := Spec{Isolation: r.col.Isolation, Profile: r.col.Profile, Limits: l}
	if f != nil {
		spec.Network = f.rules()
	}
	s, err := r.o.Target.Create(ctx, spec)
	if err != nil {
		return nil, fmt.Errorf("make a sandbox to attack: %w", err)
	}
	return s, nil
}

// delete ends a sandbox though ctx may have ended: nobody else would.
func (r *runner) delete(ctx context.Context, s *Sandbox) {
	if *s == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	_ = (*s).Delete(ctx) // the sandbox ends by its lifetime at the latest
	*s = nil
}

// attack runs one case and gives the verdict.
func (r *runner) attack(ctx context.Context, c Case) (v Verdict) {
	v = Verdict{ID: c.ID, Profile: r.col.Profile, Class: c.Class, Title: c.Title, Outcome: Right}
	want := c.want(r.col)
	if want.Not != "" {
		v.Outcome, v.Detail = NotApplicable, want.Not
		return v
	}
	begun := time.Now()
	defer func() { v.Took = time.Since(begun) }()
	box, done, err := r.boxFor(ctx, c)
	if err != nil {
		v.Outcome, v.Detail = Broken, err.Error()
		return v
	}
	defer done()
	hostile := c.Hostile || want.Ends
	watch := watchNeighbour(ctx, r.neighbour, hostile, r.o.Patience)
	result, err := Attack(ctx, c, r.col, box, Scene{r.o.Target.Local(), r.o.Internet})
	slowest, neighbourErr := watch()
	v.Detail = excerpt(result.Output)
	switch {
	case err != nil:
		v.Outcome, v.Detail = Wrong, err.Error()
	case neighbourErr != nil:
		v.Outcome, v.Detail = Wrong, "a neighbour suffered: "+neighbourErr.Error()
	case hostile:
		v.Detail += fmt.Sprintf("; slowest process of a neighbour %v", slowest.Round(time.Millisecond))
		if result.End == sandboxEnded {
			break // there is nothing left to settle
		}
		if err := settled(ctx, box, r.o.Patience); err != nil {
			v.Outcome, v.Detail = Wrong, err.Error()
		}
	}
	if v.Outcome == Wrong && hostile || result.End == sandboxEnded {
		r.delete(ctx, &r.box) // the next case gets a fresh one
	}
	return v
}

// boxFor returns the sandbox that a case runs in, and what to do with it afterwards.
func (r *runner) boxFor(ctx context.Context, c Case) (Sandbox, func(), error) {
	if c.Limits != nil || c.Flow != nil {
		box, err := r.create(ctx, c.Bounds(), c.Flow)
		return box, func() { r.delete(ctx, &box) }, err
	}
	if r.box == nil {
		box, err := r.create(ctx, battleLimits(), nil)
		if err != nil {
			return nil, nil, err
		}
		r.box = box
	}
	return r.box, func() {}, nil
}

// Scene is what an attack is judged by beside its output.
type Scene struct {
	// Local says that the sandbox is on this machine.
	Local bool
	// Internet is what its network leads to, for cases with a Flow.
	Internet *Internet
}

// Attack runs one case in a sandbox and judges it. The error says what came out wrong; the twins'
// tests want one.
func Attack(ctx context.Context, c Case, col Column, box Sandbox, scene Scene) (Result, error) {
	a := &attack{c: c, Column: col, box: box, local: scene.Local}
	if col.Profile == "standard" {
		a.user = "root" // the strongest attacker that the profile has
	}
	var arrived, asked int
	if c.Flow != nil {
		arrived, asked = scene.Internet.mark()
	}
	want := c.want(col)
	result, err := box.Run(ctx, c.command(a.user, want.Env))
	if want.Ends {
		if how, endErr := howEnded(ctx, box); how != "" || endErr != nil {
			return Result{End: sandboxEnded, Output: "the sandbox ended: " + how}, endErr
		}
	}
	if err != nil {
		return result, fmt.Errorf("no result: %w", err)
	}
	a.result = result
	if c.Flow != nil {
		if err := c.Flow.judge(scene.Internet.since(arrived, asked)); err != nil {
			return result, fmt.Errorf("%w; printed %s", err, excerpt(result.Output))
		}
	}
	if err := want.judge(result); err != nil {
		return result, err
	}
	if c.Check != nil {
		return result, c.Check(ctx, a)
	}
	return result, nil
}

// sandboxEnded is the end of a command that ended its sandbox.
const sandboxEnded = "sandbox_stopped"

// endPatience bounds how long a server may take to see that a sandbox has ended.
const endPatience = 2 * time.Minute

// howEnded returns how a sandbox ended, or "" where it answers as before. One that does neither is an error.
func howEnded(ctx context.Context, box Sandbox) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, endPatience)
	defer cancel()
	for {
		r, err := box.Run(ctx, Command{Argv: []string{"/bin/echo", "alive"}, Timeout: endPatience})
		if err == nil && r.Output == "alive\n" {
			return "", nil
		}
		how, endErr := box.Ended(ctx)
		if how != "" {
			return how, nil
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("the sandbox neither answers nor is said to have ended: %w", errors.Join(err, endErr))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// watchNeighbour keeps starting processes in another sandbox until the returned function is called,
// which gives the slowest.
func watchNeighbour(ctx context.Context, n Sandbox, on bool, patience time.Duration) func() (time.Duration, error) {
	if !on {
		return func() (time.Duration, error) { return 0, nil }
	}
	stop := make(chan struct{})
	type sum struct {
		slowest time.Duration
		err     error
	}
	result := make(chan sum, 1)
	echo := func() (Result, time.Duration, error) {
		begun := time.Now()
		r, err := n.Run(ctx, Command{Argv: []string{"/bin/echo", "well"}, Timeout: 20 * patience})
		return r, time.Since(begun), err
	}
	limit := patience
	for range 3 {
		_, calm, _ := echo()
		limit = max(limit, patience+20*calm)
	}
	go func() {
		var s sum
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			r, took, err := echo()
			s.slowest = max(s.slowest, took)
			switch {
			case err != nil:
				s.err = err
			case r.Output != "well\n":
				s.err = fmt.Errorf("its process ended as %s and printed %s", r.End, excerpt(r.Output))
			case took > limit:
				s.err = fmt.Errorf("its process took %v, more than %v", took.Round(time.Millisecond), limit.Round(time.Millisecond))
			}
			select {
			case <-stop:
				result <- s
				return
			case <-tick.C:
			}
		}
	}()
	return func() (time.Duration, error) {
		close(stop)
		s := <-result
		return s.slowest, s.err
	}
}

// settled wants that the sandbox itself is usable again after a hostile case. What was killed may need
// a moment to go.
func settled(ctx context.Context, box Sandbox, patience time.Duration) error {
	deadline := time.Now().Add(10 * patience)
	for {
		r, err := box.Run(ctx, Command{Argv: []string{"/bin/sh", "-c", "echo usable"}, Timeout: patience})
		if err == nil && r.Output == "usable\n" {
			return nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return errors.Join(fmt.Errorf("the sandbox is not usable afterwards: %s %s", r.End, excerpt(r.Output)), err)
		}
	}
}
