package template

import (
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"

	"casemate.dev/internal/errs"
)

// platformArgs are the ARGs that every builder knows: a sandbox is of the server's own platform.
func platformArgs(target string) map[string]string {
	all := map[string]string{"TARGETSTAGE": or(target, "default")}
	for _, side := range []string{"TARGET", "BUILD"} {
		all[side+"PLATFORM"] = runtime.GOOS + "/" + runtime.GOARCH
		all[side+"OS"], all[side+"ARCH"], all[side+"VARIANT"] = runtime.GOOS, runtime.GOARCH, ""
	}
	return all
}

// meta reads the ARGs before the first FROM.
func (d *dockerfile) meta(args []instructions.ArgCommand) error {
	d.globals = platformArgs(d.Target)
	for _, c := range args {
		err := c.Expand(func(word string) (string, error) { return d.expand(word, d.globals) })
		if err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "%s: %v", d.at(c.Location()), err)
		}
		for _, a := range c.Args {
			if v, ok := d.arg(a.Key); ok {
				d.globals[a.Key] = v
			} else if a.Value != nil {
				d.globals[a.Key] = *a.Value
			}
		}
	}
	return nil
}

// arg returns the value that the request gives an ARG.
func (d *dockerfile) arg(name string) (string, bool) {
	v, ok := d.Args[name]
	if ok {
		d.used[name] = true
	}
	return v, ok
}

// args takes ARGs into scope, each with what those before it have made of the words in its value.
func (s *dockerStep) args(c *instructions.ArgCommand, st *state) error {
	for _, a := range c.Args {
		name, err := s.d.expand(a.Key, words(st))
		if err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "%v", err)
		}
		if v, ok := s.d.arg(name); ok {
			st.args[name] = v
		} else if a.Value != nil {
			if st.args[name], err = s.d.expand(*a.Value, words(st)); err != nil {
				return errs.Wrap(err, errs.InvalidArgument, "%v", err)
			}
		} else if v, ok := s.d.globals[name]; ok {
			st.args[name] = v
		}
	}
	return nil
}

// sourceDateEpoch is the ARG that says which time files bear at most.
const sourceDateEpoch = "SOURCE_DATE_EPOCH"

// proxies are the variables that name a proxy, of those that a build is given values for: its commands have them
// without an ARG that declares them, and what they give does not depend on them.
func (d *dockerfile) proxies() map[string]string {
	out := map[string]string{}
	for name, value := range d.Args {
		if isProxy(name) {
			out[strings.ToUpper(name)], out[strings.ToLower(name)] = value, value
		}
	}
	return out
}

func isProxy(name string) bool {
	return slices.Contains([]string{"HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY"}, strings.ToUpper(name))
}

// unused returns what is wrong with values that no ARG takes; nil: nothing.
func (d *dockerfile) unused() error {
	for _, name := range slices.Sorted(maps.Keys(d.Args)) {
		if d.used[name] || isProxy(name) || name == sourceDateEpoch || strings.HasPrefix(name, "BUILDKIT_") {
			continue
		}
		return errs.New(errs.InvalidArgument, "%s has no ARG %s, for which a value is given", d.Name, name).
			WithHint("declare it, or leave --build-arg %s out", name)
	}
	return nil
}

// epochOf returns the time that a build's ARG says, where the request itself says none.
func epochOf(r Request) (time.Time, error) {
	if !r.Epoch.IsZero() || r.Dockerfile == nil || r.Dockerfile.Args[sourceDateEpoch] == "" {
		return r.Epoch, nil
	}
	text := r.Dockerfile.Args[sourceDateEpoch]
	seconds, err := strconv.ParseInt(text, 10, 64)
	if err != nil || seconds < 0 {
		return r.Epoch, errs.New(errs.InvalidArgument, "%s is %q, which is no number of seconds", sourceDateEpoch, text)
	}
	return time.Unix(seconds, 0), nil
}
