package template

import (
	"strings"

	"casemate.dev/internal/errs"
)

// compileSteps turns a list of steps into a plan of one stage.
func compileSteps(r Request) (*plan, error) {
	if r.From == "" {
		return nil, errs.New(errs.InvalidArgument, "the build names nothing to begin with").
			WithHint("set from to a template, as base, to a commit or to an image")
	}
	s := &stage{base: r.From, at: StepBase}
	if r.Provision {
		s.ops = append(s.ops, op{step: StepBase, text: "make user " + r.User, do: provisionAction{r.User, r.Dir}})
	}
	count := 0
	for _, step := range r.Steps {
		n := number(&count)
		do, err := actionOf(step)
		if err != nil {
			return nil, atStep(err, n, "", stepText(step))
		}
		s.ops = append(s.ops, op{step: n, text: stepText(step), force: step.Force, do: do})
	}
	return &plan{stages: []*stage{s}}, nil
}

// stepText shows a step.
func stepText(s Step) string {
	args := s.Args
	for len(args) > 1 && args[len(args)-1] == "" {
		args = args[:len(args)-1]
	}
	text := s.Type + " " + strings.Join(args, " ")
	const most = 500
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}

// actionOf returns what a step does.
func actionOf(s Step) (action, error) {
	arg := func(i int) string {
		if i < len(s.Args) {
			return s.Args[i]
		}
		return ""
	}
	want := func(ok bool, what string) error {
		if ok {
			return nil
		}
		return errs.New(errs.InvalidArgument, "step %s has %d arguments: it takes %s", s.Type, len(s.Args), what)
	}
	switch s.Type {
	case "RUN":
		if err := want(len(s.Args) >= 1 && len(s.Args) <= 2 && s.Args[0] != "", "a command line, and a user or nothing"); err != nil {
			return nil, err
		}
		return &runAction{line: arg(0), user: arg(1), login: true}, nil
	case "COPY":
		if err := want(len(s.Args) >= 2 && len(s.Args) <= 4, "source, destination, user and mode"); err != nil {
			return nil, err
		}
		if s.FilesHash == "" {
			return nil, errs.New(errs.InvalidArgument, "step COPY names no files").WithHint("upload them, and set files_hash")
		}
		return &copyAction{sources: []string{arg(0)}, dest: arg(1), owner: arg(2), mode: arg(3), hash: s.FilesHash, ownByUser: true}, nil
	case "ENV":
		if err := want(len(s.Args) >= 2 && len(s.Args)%2 == 0, "names and values in turn"); err != nil {
			return nil, err
		}
		return metaAction(func(st *state) error {
			for i := 0; i < len(s.Args); i += 2 {
				st.env.set(s.Args[i], s.Args[i+1])
			}
			return nil
		}), nil
	case "WORKDIR":
		if err := want(len(s.Args) == 1, "a path"); err != nil {
			return nil, err
		}
		return workdirAction{dir: func(*state) (string, error) { return s.Args[0], nil }, owner: true}, nil
	case "USER":
		if err := want(len(s.Args) == 1 && s.Args[0] != "", "a name"); err != nil {
			return nil, err
		}
		return metaAction(func(st *state) error { st.image.User = s.Args[0]; return nil }), nil
	}
	return nil, errs.New(errs.InvalidArgument, "a step of type %q is unknown", s.Type).WithHint("use RUN, COPY, ENV, WORKDIR or USER")
}

// stepError says at which step a build failed.
type stepError struct {
	err            error
	step, at, text string
	code           int // a command's exit code; -1: none was seen
}

// Error implements error.
func (e *stepError) Error() string {
	if e.at != "" {
		return e.at + ": " + e.err.Error()
	}
	return "step " + e.step + ": " + e.err.Error()
}

// Unwrap returns what failed.
func (e *stepError) Unwrap() error { return e.err }

// atStep adds to an error where it happened. Its public text names the place.
func atStep(err error, step, at, text string) error {
	place := "step " + step
	if at != "" {
		place = at
	}
	public, hint := errs.PublicText(err)
	e := errs.Wrap(err, errs.KindOf(err), "%s: %s", place, public)
	if hint != "" {
		e = e.WithHint("%s", hint)
	}
	code := -1
	if c, ok := asExit(err); ok {
		code = c
	}
	return &stepError{err: e, step: step, at: at, text: text, code: code}
}
