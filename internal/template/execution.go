package template

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// execution is a build under way. It belongs to one goroutine.
type execution struct {
	b     *Builder
	p     sandbox.Principal
	req   Request
	todo  *plan
	run   *running
	log   *buildLog
	files *buildFiles

	// step is the one under way, for who wonders where it failed.
	step string
	// done are the states of stages that are done.
	done map[*stage]*state
	// bottoms are what stages stand on at last, and begun that of the result.
	bottoms map[*stage]*state
	begun   *state
	// forced says that a step was forced, so that those after it run, too.
	forced bool
}

func (x *execution) say(level Level, format string, args ...any) {
	x.log.add(level, x.step, "", fmt.Sprintf(format, args...))
}

// sayEnd makes the log's last line tell how the build ended.
func (x *execution) sayEnd(build Build, err error) {
	switch build.State {
	case Ready:
		x.say(Info, "template %s is ready: %s, in %s", build.Name, build.Commit, build.EndedAt.Sub(build.StartedAt).Round(time.Millisecond))
	case Canceled:
		x.say(Warning, "the build was canceled")
	default:
		text, hint := errs.PublicText(err)
		if hint != "" {
			text += " (" + hint + ")"
		}
		x.say(Error, "%s", text)
	}
}

// build runs the plan.
func (x *execution) build(ctx context.Context) error {
	x.done, x.bottoms = map[*stage]*state{}, map[*stage]*state{}
	if err := x.stages(ctx, x.todo.stages); err != nil {
		return err
	}
	last := x.todo.stages[len(x.todo.stages)-1]
	x.begun = x.bottoms[last]
	x.step = StepFinalize
	return x.finalize(ctx, x.done[last])
}

// stage runs the steps of a stage.
func (x *execution) stage(ctx context.Context, st *stage) (*state, error) {
	s, err := x.begin(ctx, st)
	if err != nil {
		return nil, atStep(err, StepBase, st.at, "FROM "+st.base)
	}
	if st.from == nil {
		x.bottoms[st] = s.clone()
	} else {
		x.bottoms[st] = x.bottoms[st.from]
	}
	ops, err := x.triggers(s, st)
	if err == nil && st == x.todo.stages[len(x.todo.stages)-1] && x.todo.unused != nil {
		err = x.todo.unused()
	}
	if err != nil {
		return nil, atStep(err, StepBase, st.at, "FROM "+st.base)
	}
	for _, o := range append(ops, st.ops...) {
		x.step = o.step
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		if err := x.one(ctx, s, o); err != nil {
			return nil, atStep(err, o.step, o.at, o.text)
		}
	}
	return s, nil
}

// begin finds what a stage begins with.
func (x *execution) begin(ctx context.Context, st *stage) (*state, error) {
	x.step = StepBase
	var s *state
	if st.from != nil {
		if err := x.stages(ctx, []*stage{st.from}); err != nil {
			return nil, err
		}
		s = x.done[st.from].clone()
		s.cmdSet = false
		for _, v := range s.env {
			delete(s.args, v.name) // what the stage before says of the image holds
		}
		x.step = StepBase
	} else {
		var err error
		if s, err = x.base(ctx, st.base, x.req.FromAuth); err != nil {
			return nil, err
		}
		if s, err = x.committed(ctx, s); err != nil {
			return nil, err
		}
		x.say(Info, "FROM %s", st.base)
	}
	return s, nil
}

// base finds a template, a commit or an image. auth is for that image's registry alone.
func (x *execution) base(ctx context.Context, ref string, auth Credentials) (*state, error) {
	if to := alias(x.b.cfg.Aliases, ref); to != "" {
		auth = Credentials{} // it is not the other registry's
		x.say(Info, "%s stands for %s here", to, ref)
		ref = to
	}
	if ref == "scratch" && x.b.cfg.Scratch != nil {
		if err := x.b.cfg.Scratch(ctx); err != nil {
			return nil, err
		}
	}
	all, err := x.b.m.Templates(ctx)
	if err != nil {
		return nil, err
	}
	for _, t := range all {
		if t.Name != ref && (t.Digest == "" || fullName(t.Name) != fullName(ref)) {
			continue
		}
		if !t.Ready {
			return nil, errs.New(errs.FailedPrecondition, "template %s is not built", ref).WithHint("casemate template build %s", ref)
		}
		return x.fromTemplate(t), nil
	}
	c, err := x.b.m.GetCommit(ctx, x.p, ref)
	if errs.Is(err, errs.NotFound) && !strings.HasPrefix(ref, id.Commit) {
		if x.b.cfg.Images == nil {
			return nil, errs.New(errs.NotFound, "there is no template, commit or tag %q, and this server pulls no images", ref).
				WithHint("casemate template ls and casemate log show what there is")
		}
		c, err = x.b.cfg.Images(ctx, x.p, ref, auth, func(line string) { x.say(Info, "%s", line) })
	}
	if err != nil {
		return nil, err
	}
	return x.fromCommit(ctx, ref, c)
}

// fromTemplate returns the state that a template is.
func (x *execution) fromTemplate(t sandbox.Template) *state {
	s := &state{template: t.Name, args: map[string]string{}, profile: favourite(t.Profiles)}
	for _, kv := range t.Settings.Env {
		name, value, _ := strings.Cut(kv, "=")
		s.env.set(name, value)
	}
	if t.Digest == "" {
		// It comes with the server: its user is for who uses a sandbox, and building upon it is root's.
		s.user, s.dir = t.Settings.User, t.Settings.Dir
		s.key = digest("template", t.Name, t.BuiltAt.UTC().Format(time.RFC3339Nano), string(s.profile))
		s.lock = LockBase{Name: t.Name}
	} else {
		s.lock = LockBase{Name: t.Source, Digest: t.Digest}
		s.image = cloneImage(t.Settings)
		s.image.Env, s.user, s.dir = nil, "root", "/"
		s.key = digest("image", t.Digest, string(s.profile))
	}
	s.image.User, s.image.Dir = or(x.req.User, s.image.User), or(x.req.Dir, s.image.Dir)
	return s
}

// fromCommit returns the state that a commit is.
func (x *execution) fromCommit(ctx context.Context, ref string, c sandbox.Commit) (*state, error) {
	env, err := x.b.m.CommitEnv(ctx, x.p, c.ID)
	if err != nil {
		return nil, err
	}
	s := &state{commit: c.ID, args: map[string]string{}, user: c.Spec.User, dir: c.Spec.Dir, profile: favourite(c.Profiles)}
	for _, k := range slices.Sorted(maps.Keys(env)) {
		s.env.set(k, env[k])
	}
	if c.Spec.Image != nil {
		s.image = cloneImage(*c.Spec.Image)
		s.image.Env = nil
	}
	s.image.User, s.image.Dir = or(x.req.User, s.image.User), or(x.req.Dir, s.image.Dir)
	s.key, s.lock = digest("commit", c.ID, string(s.profile)), LockBase{Name: ref, Digest: c.ID}
	return s, nil
}

// favourite is the profile that steps run in: one that can install packages, where there is one.
func favourite(profiles []string) sandbox.Profile {
	if slices.Contains(profiles, string(sandbox.Standard)) {
		return sandbox.Standard
	}
	return ""
}

// digest is of parts, none of which can pass for another.
func digest(parts ...string) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:%s,", len(p), p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// one runs a step.
func (x *execution) one(ctx context.Context, s *state, o op) error {
	began := x.b.clock.Now()
	x.forced = x.forced || o.force || x.req.NoCache
	x.log.add(Info, o.step, "", o.text)
	w, err := o.do.prepare(ctx, x, s)
	if err != nil {
		return err
	}
	result := StepResult{Step: o.step, Text: o.text, At: o.at}
	if w != nil {
		if result, err = x.perform(ctx, s, w, result); err != nil {
			return err
		}
	}
	result.Took = x.b.clock.Now().Sub(began)
	switch {
	case result.Cached:
		x.say(Info, "kept from an earlier build: %s", result.Commit)
	case w != nil:
		x.say(Debug, "done in %s: %s", result.Took.Round(time.Millisecond), result.Commit)
	}
	return x.b.save(x.run.change(func(bd *Build) {
		bd.Done++
		bd.Steps = append(bd.Steps, result)
	}))
}

// keptStep is what is kept of a step besides its commit.
type keptStep struct {
	Digest string    `json:"digest"`
	Brings []Package `json:"brings,omitempty"`
}

// perform does a step's work, or takes what was kept of it, and brings the state there.
func (x *execution) perform(ctx context.Context, s *state, w *work, result StepResult) (StepResult, error) {
	keys, err := x.keysOf(s, w, result.Text)
	if err != nil {
		return result, err
	}
	if !x.forced {
		if ok, err := x.kept(ctx, s, keys, &result); err != nil || ok {
			return result, err
		}
	}
	made, key, err := x.inPinnedBox(ctx, s, w, keys)
	if err != nil {
		return result, err
	}
	result.Commit = made.ID
	var body keptStep
	if s.commit != "" {
		if body, err = x.changed(ctx, s.commit, made.ID, made.archives); err != nil {
			return result, err
		}
	}
	result.Digest, result.Brings = body.Digest, body.Brings
	text, err := json.Marshal(body)
	if err != nil {
		return result, err
	}
	if err := x.b.db.Write(store.PutBuildStep(store.BuildStep{Key: key, Target: made.ID, Used: x.b.now().UnixNano(), Body: text})); err != nil {
		return result, err
	}
	if key != keys.wanted() {
		if err := unavailable(keys.locked.Brings, body.Brings); err != nil {
			return result, err
		}
	}
	s.key, s.commit = key, made.ID
	x.run.change(func(bd *Build) { bd.Bytes += made.Bytes })
	return result, nil
}

// stepKeys are what a step's result is kept under: free where nothing was pinned for it, pinned where something was.
type stepKeys struct {
	free, pinned string
	pins         pins
	locked       *LockStep // what the lock file says; nil: nothing
}

// wanted is the key of the result that the build asks for.
func (k stepKeys) wanted() string { return or(k.pinned, k.free) }

func (x *execution) keysOf(s *state, w *work, text string) (stepKeys, error) {
	network := ""
	if w.network && x.req.Network != nil {
		rules, err := json.Marshal(x.req.Network.Rules)
		if err != nil {
			return stepKeys{}, err
		}
		network = string(rules)
	}
	k := stepKeys{free: digest(append([]string{s.key, x.p.ID, x.req.Isolation, network, x.epoch().String()}, w.parts...)...)}
	if k.locked = x.lockedStep(text); k.locked != nil && w.pinned {
		if k.pins = pinsOf(*k.locked); !k.pins.none() {
			k.pinned = digest(k.free, "pinned", k.pins.pip, k.pins.apt)
		}
	}
	return k, nil
}

// kept takes what was kept of a step: where versions are pinned only a result that was made with them, or that is
// what the lock file says.
func (x *execution) kept(ctx context.Context, s *state, keys stepKeys, result *StepResult) (bool, error) {
	for _, key := range []string{keys.free, keys.pinned} {
		if key == "" {
			continue
		}
		kept, ok, err := x.b.db.GetBuildStep(ctx, key)
		if err != nil {
			return false, err
		}
		if !ok {
			continue
		}
		var body keptStep
		if err := json.Unmarshal(kept.Body, &body); err != nil {
			return false, fmt.Errorf("decode a kept step: %w", err)
		}
		if key != keys.wanted() && body.Digest != keys.locked.Digest {
			continue
		}
		s.key, s.commit = key, kept.Target
		result.Cached, result.Commit, result.Digest, result.Brings = true, kept.Target, body.Digest, body.Brings
		return true, x.b.db.Write(store.BuildStepUsed(key, x.b.now().UnixNano()))
	}
	return false, nil
}

// inPinnedBox does a step's work with the versions that are pinned for it, and where it fails with them once more
// without, to see what there is now. It returns which of the keys the result has.
func (x *execution) inPinnedBox(ctx context.Context, s *state, w *work, keys stepKeys) (madeStep, string, error) {
	made, err := x.inBox(ctx, s, w, keys.pins)
	if code, ended := asExit(err); keys.pins.none() || !ended || code <= 0 {
		return made, keys.wanted(), err
	}
	text, _ := errs.PublicText(err)
	x.say(Warning, "with the versions of the lock file: %s; once more without them, to see what there is now", text)
	free, ferr := x.inBox(ctx, s, w, pins{})
	if ferr != nil {
		return made, "", err
	}
	return free, keys.free, nil
}

// unavailable returns what differs from the versions of a lock file in a step that could not be done with them; nil:
// nothing.
func unavailable(want, got []Package) error {
	var what []string
	for _, c := range comparePackages(want, got) {
		what = append(what, c.String())
	}
	if len(what) == 0 {
		return nil
	}
	return errs.New(errs.FailedPrecondition, "the versions of the lock file can't be had: %s", listed(what)).
		WithHint("build without --locked to take what there is, and write the lock file anew")
}

// epoch is the time that files bear at most.
func (x *execution) epoch() time.Time {
	if x.req.Epoch.IsZero() {
		return time.Date(1980, 1, 1, 0, 0, 0, 0, time.UTC)
	}
	return x.req.Epoch.UTC()
}

// madeStep is what came of a step's work.
type madeStep struct {
	sandbox.Commit
	archives map[[2]string]string // as box.archives
}

// inBox does a step's work in a sandbox of its own, and commits that.
func (x *execution) inBox(ctx context.Context, s *state, w *work, p pins) (madeStep, error) {
	network := x.req.Network
	if !w.network {
		network = nil
	}
	b, err := x.openBox(ctx, s, x.stepSpec(s, network))
	if err != nil {
		return madeStep{}, err
	}
	defer b.close()
	b.pins = p
	if err := w.run(ctx, b); err != nil {
		return madeStep{}, err
	}
	c, err := x.b.m.MakeCommit(ctx, x.p, b.id, sandbox.CommitOptions{
		Message: "step " + x.step + " of " + x.req.Name, Automatic: true, Settle: x.epoch(),
		Shape: func(spec *sandbox.Spec) { x.shape(spec, s) },
	})
	return madeStep{c, b.archives}, err
}

// stepSpec is the sandbox of a step.
func (x *execution) stepSpec(s *state, network *sandbox.Network) sandbox.Spec {
	return sandbox.Spec{
		Template: or(s.commit, s.template), Isolation: x.req.Isolation, Profile: s.profile, Limits: x.req.BuildLimits,
		Labels: map[string]string{buildLabel: x.req.ID, "casemate.dev/template": x.req.Name},
		// Should the server die and never come back to it, it still ends.
		Lifetime: x.req.Timeout + 10*time.Minute, Network: network, Service: &sandbox.Service{},
	}
}

// shape is what sandboxes that start from the state have.
func (x *execution) shape(spec *sandbox.Spec, s *state) {
	spec.User, spec.Dir = or(s.image.User, s.user), or(s.image.Dir, s.dir)
	image := cloneImage(s.image)
	image.Env = s.env.list() // an image that goes out has it
	spec.Image, spec.Service = &image, nil
	spec.Limits, spec.Labels, spec.Network, spec.Lifetime, spec.Extra = x.req.Limits, nil, nil, 0, nil
	spec.Name = ""
}
