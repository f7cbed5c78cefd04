package template

import (
	"context"
	"errors"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"

	"casemate.dev/internal/errs"
)

// maxTriggers bounds the ONBUILD instructions of what a stage begins with.
const maxTriggers = 100

// triggers takes the ONBUILD instructions of what a stage begins with, and returns them as its first steps. They go on
// to no stage after it.
func (x *execution) triggers(s *state, st *stage) ([]op, error) {
	list := s.image.OnBuild
	if len(list) == 0 {
		return nil, nil
	}
	if st.docker == nil {
		x.say(Warning, "ONBUILD of %s is not run: it is for Dockerfiles", st.base)
		return nil, nil
	}
	if len(list) > maxTriggers {
		return nil, errs.New(errs.InvalidArgument, "%s has %d ONBUILD instructions, limit %d", st.base, len(list), maxTriggers)
	}
	s.image.OnBuild = nil
	var all []op
	for _, text := range list {
		c, err := parseTrigger(text)
		if err != nil {
			return nil, err
		}
		o, err := st.docker.command(st, c, st.at)
		if err != nil {
			return nil, err
		}
		o.step, o.text = StepBase, "ONBUILD "+o.text
		all = append(all, o)
	}
	x.run.change(func(bd *Build) { bd.Of += len(all) })
	return all, nil
}

// parseTrigger reads what an ONBUILD instruction is followed by.
func parseTrigger(text string) (instructions.Command, error) {
	bad := func(err error) error { return errs.Wrap(err, errs.InvalidArgument, "ONBUILD %.100s: %v", text, err) }
	if len(text) > maxDockerfile {
		return nil, bad(errors.New("it is too long"))
	}
	parsed, err := parser.Parse(strings.NewReader(text))
	if err != nil {
		return nil, bad(err)
	}
	if len(parsed.AST.Children) != 1 {
		return nil, bad(errors.New("it must be one instruction"))
	}
	c, err := instructions.ParseCommand(parsed.AST.Children[0])
	if err != nil {
		return nil, bad(err)
	}
	switch c.(type) {
	case *instructions.OnbuildCommand, *instructions.MaintainerCommand:
		return nil, bad(errors.New("it can't be a trigger"))
	}
	return c, nil
}

// stages builds those of a list that are not built: triggers may copy from stages that nothing else needs.
func (x *execution) stages(ctx context.Context, list []*stage) error {
	for _, st := range list {
		if x.done[st] != nil {
			continue
		}
		step := x.step
		s, err := x.stage(ctx, st)
		if err != nil {
			return err
		}
		x.done[st], x.step = s, step
	}
	return nil
}

// frontend refuses a Dockerfile that is written for another program than Docker's.
func (d *dockerfile) frontend() error {
	name, _, where, ok := parser.DetectSyntax([]byte(d.Text))
	if !ok || frontends().MatchString(name) {
		return nil
	}
	return errs.New(errs.Unsupported, "%s: # syntax=%s: no program is fetched to read Dockerfiles", d.at(where), name).
		WithHint("leave the line out: this builder knows what docker/dockerfile:1 does")
}

var frontends = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(docker\.io/)?docker/dockerfile(-upstream)?([:@].*)?$`)
})

// isSignal reports whether a word is a signal's number or name.
func isSignal(word string) bool {
	if n, err := strconv.Atoi(word); err == nil {
		return n > 0 && n <= 64
	}
	return signals().MatchString(strings.ToUpper(word))
}

var signals = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(SIG)?(ABRT|ALRM|BUS|CHLD|CLD|CONT|FPE|HUP|ILL|INT|IO|IOT|KILL|PIPE|POLL|PROF|PWR|QUIT|SEGV|STKFLT|` +
		`STOP|SYS|TERM|TRAP|TSTP|TTIN|TTOU|URG|USR1|USR2|VTALRM|WINCH|XCPU|XFSZ|RTMIN(\+\d+)?|RTMAX(-\d+)?)$`)
})
