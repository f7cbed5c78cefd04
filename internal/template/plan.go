package template

import (
	"context"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// plan is what a request comes to: the stages that its result needs, the result's last.
type plan struct {
	stages []*stage
	// unused returns what is wrong with values that no ARG takes, once all are known; nil: nothing can be.
	unused func() error
}

// stage is a line of steps upon a base.
type stage struct {
	name string // "" has none
	// base is what it begins with: a reference, or where from is set that stage.
	base string
	from *stage
	at   string // "Dockerfile:1"
	ops  []op
	// docker is the Dockerfile that it is of; nil: none. before is how many stages that has before it.
	docker *dockerfile
	before int
}

// op is one step of a stage.
type op struct {
	step  string // its number among all of the plan, from 1
	at    string
	text  string
	force bool
	do    action
}

// action is what a step does.
type action interface {
	// prepare does what changes no file, which is to change s, and returns what is to be done in a sandbox; nil:
	// nothing.
	prepare(ctx context.Context, x *execution, s *state) (*work, error)
}

// work is what a step does to files.
type work struct {
	// parts is all that decides what it gives, beside the state before it.
	parts []string
	// network says that it is done with the build's network.
	network bool
	// pinned says that the versions of a lock file hold for it.
	pinned bool
	run    func(ctx context.Context, b *box) error
}

// count returns how many steps a plan has.
func (p *plan) count() int {
	n := 0
	for _, s := range p.stages {
		n += len(s.ops)
	}
	return n
}

// from returns what the result begins with.
func (p *plan) from() string {
	s := p.stages[len(p.stages)-1]
	for s.from != nil {
		s = s.from
	}
	return s.base
}

// state is what the steps so far have come to.
type state struct {
	// template is the template to start from while commit is "".
	template string
	commit   string
	// key says how it came to be: the digest of all steps before, and of what they began with.
	key string
	// profile is the sandboxes'.
	profile sandbox.Profile
	// env is the image's environment, in the order in which it was set, and args what is in scope of ARGs: those of
	// them that no ENV of their name has followed.
	env   vars
	args  map[string]string
	image sandbox.Settings
	// cmdSet says that the stage has a CMD of its own.
	cmdSet bool
	// lock is what a lock file says of what it began with.
	lock LockBase
	// user and dir are what a base has where neither it nor a step says them.
	user, dir string
}

// runUser returns whom steps run as; "" is the only user that there is, in profile locked.
func (s *state) runUser() string {
	if s.image.User == "" && s.profile == sandbox.Standard {
		return "root"
	}
	return s.image.User
}

// runDir returns where steps run.
func (s *state) runDir() string { return or(s.image.Dir, "/") }

// resolve makes a path of a step absolute.
func (s *state) resolve(p string) string {
	if !path.IsAbs(p) {
		p = s.runDir() + "/" + p
	}
	return path.Clean(p)
}

func (s *state) shell() []string {
	if len(s.image.Shell) > 0 {
		return s.image.Shell
	}
	return []string{"/bin/sh", "-c"}
}

// clone returns a state that another stage may change.
func (s *state) clone() *state {
	c := *s
	c.env = slices.Clone(s.env)
	c.args = maps.Clone(s.args)
	c.image = cloneImage(s.image)
	return &c
}

func cloneImage(i sandbox.Settings) sandbox.Settings {
	i.Entrypoint, i.Cmd, i.Shell = slices.Clone(i.Entrypoint), slices.Clone(i.Cmd), slices.Clone(i.Shell)
	i.Exposed, i.Volumes, i.OnBuild = slices.Clone(i.Exposed), slices.Clone(i.Volumes), slices.Clone(i.OnBuild)
	labels := make(map[string]string, len(i.Labels))
	for k, v := range i.Labels {
		labels[k] = v
	}
	i.Labels = labels
	return i
}

// vars are variables in the order in which they were first set.
type vars []variable

type variable struct{ name, value string }

func (v *vars) set(name, value string) {
	for i := range *v {
		if (*v)[i].name == name {
			(*v)[i].value = value
			return
		}
	}
	*v = append(*v, variable{name, value})
}

func (v vars) list() []string {
	out := make([]string, 0, len(v))
	for _, x := range v {
		out = append(out, x.name+"="+x.value)
	}
	return out
}

func (v vars) toMap() map[string]string {
	out := make(map[string]string, len(v))
	for _, x := range v {
		out[x.name] = x.value
	}
	return out
}

func or[T comparable](v, other T) T {
	var zero T
	if v == zero {
		return other
	}
	return v
}

// metaAction changes the state alone.
type metaAction func(s *state) error

func (f metaAction) prepare(_ context.Context, _ *execution, s *state) (*work, error) {
	return nil, f(s)
}

// workdirAction makes a directory and goes there.
type workdirAction struct {
	dir func(s *state) (string, error)
	// owner gives a new directory to the user that steps run as, and not to root.
	owner bool
}

func (a workdirAction) prepare(_ context.Context, _ *execution, s *state) (*work, error) {
	dir, err := a.dir(s)
	if err != nil {
		return nil, err
	}
	if dir == "" {
		return nil, errs.New(errs.InvalidArgument, "WORKDIR needs a path")
	}
	dir = s.resolve(dir)
	s.image.Dir = dir
	owner := ""
	if a.owner {
		owner = s.runUser()
	}
	return &work{
		parts: []string{"workdir", dir, owner},
		run:   func(ctx context.Context, b *box) error { return b.makeDir(ctx, dir, owner) },
	}, nil
}

// check refuses what no build can be.
func (r *Request) check() error {
	switch {
	case r.Name == "":
		return errs.New(errs.InvalidArgument, "the template has no name").WithHint("name it: casemate template build -t NAME DIR")
	case !templateName(r.Name):
		return errs.New(errs.InvalidArgument, "%q is no template's name", r.Name).
			WithHint("use lower-case letters, digits and . _ / -, at most 100, as in web or team/web")
	case len(r.Tags) > 50:
		return errs.New(errs.InvalidArgument, "%d tags, limit 50", len(r.Tags))
	case r.Dockerfile != nil && (len(r.Steps) > 0 || r.From != ""):
		return errs.New(errs.InvalidArgument, "a build has a Dockerfile, or a base and steps, not both")
	case r.FromAuth != Credentials{} && r.From == "":
		return errs.New(errs.InvalidArgument, "credentials are given, and no image that they are for")
	case len(r.Steps) > 1000:
		return errs.New(errs.InvalidArgument, "%d steps, limit 1000", len(r.Steps))
	case r.Timeout < 0 || r.StepTimeout < 0 || r.ReadyWithin < 0:
		return errs.New(errs.InvalidArgument, "a timeout is negative").WithHint("leave it out for the default")
	}
	for _, t := range r.Tags {
		if !templateName(t) {
			return errs.New(errs.InvalidArgument, "%q is no tag", t).WithHint("use lower-case letters, digits and . _ -, as in v2")
		}
	}
	for _, line := range []string{r.Start, r.Ready} {
		if strings.Contains(line, "\x00") || len(line) > 64<<10 {
			return errs.New(errs.InvalidArgument, "the start or ready command is longer than 64 KiB or holds a NUL byte")
		}
	}
	return nil
}

// templateName reports whether s may name a template: as a commit's tag, without what separates a tag.
func templateName(s string) bool {
	if s == "" || len(s) > 100 {
		return false
	}
	for i := range len(s) {
		c := s[i]
		inner := c == '.' || c == '_' || c == '/' || c == '-'
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && (!inner || i == 0 || i == len(s)-1) {
			return false
		}
	}
	return true
}

// compile turns a request into a plan, without looking at anything but the request.
func compile(r Request) (*plan, error) {
	if r.Dockerfile != nil {
		return compileDockerfile(r)
	}
	return compileSteps(r)
}

func number(steps *int) string {
	*steps++
	return strconv.Itoa(*steps)
}
