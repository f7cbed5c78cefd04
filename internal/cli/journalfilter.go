package cli

import (
	"net"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"casemate.dev/client"
)

// eventFilter says which events are told.
type eventFilter struct {
	types, processes, actors, paths, hosts []string
	since                                  string

	from time.Time // what since stands for
}

func (f *eventFilter) register(fl *pflag.FlagSet) {
	fl.StringSliceVar(&f.types, "type", nil, "only events of this `TYPE`, as process or process.ended (repeatable)")
	fl.StringSliceVar(&f.processes, "process", nil, "only events of the process of this `ID` (repeatable)")
	fl.StringSliceVar(&f.actors, "actor", nil, "only what this `PRINCIPAL` asked for (repeatable)")
	fl.StringSliceVar(&f.paths, "path", nil, "only events about this `PATH` or below it; * stands for any text without / (repeatable)")
	fl.StringSliceVar(&f.hosts, "host", nil, "only events about this `HOST` or those below it (repeatable)")
	fl.StringVar(&f.since, "since", "", "only events since this `TIME`: 10m ago, 15:04, or 2006-01-02T15:04:05Z")
}

// check completes the filter.
func (f *eventFilter) check(now time.Time) error {
	for i, h := range f.hosts {
		f.hosts[i] = strings.ToLower(strings.Trim(h, "."))
	}
	for i, p := range f.paths {
		if !strings.HasPrefix(p, "/") {
			return usageError("--path %s is not absolute", clean(p))
		}
		if _, err := path.Match(p, "/"); err != nil {
			return usageError("--path %s is no pattern", clean(p))
		}
		f.paths[i] = path.Clean(p)
	}
	var err error
	f.from, err = parseMoment("--since", f.since, now)
	return err
}

// parseMoment reads the value of a flag that names a time; "" is none.
func parseMoment(flag, text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	if t, err := time.Parse(time.RFC3339, text); err == nil {
		return t, nil
	}
	for _, layout := range []string{"15:04", time.TimeOnly, time.DateOnly, time.DateTime} {
		t, err := time.ParseInLocation(layout, text, now.Location())
		if err != nil {
			continue
		}
		if t.Year() == 0 { // of today
			t = time.Date(now.Year(), now.Month(), now.Day(), t.Hour(), t.Minute(), t.Second(), 0, now.Location())
		}
		return t, nil
	}
	return time.Time{}, usageError("%s %s is no time: write 10m, 15:04, 2006-01-02 or 2006-01-02T15:04:05Z", flag, clean(text))
}

// fits reports whether an event is one of those that are asked for.
func (f *eventFilter) fits(e *client.Event) bool {
	any := func(list []string, ok func(string) bool) bool { return len(list) == 0 || slices.ContainsFunc(list, ok) }
	kind := e.GetType()
	return !when(e.GetTime()).Before(f.from) &&
		any(f.types, func(t string) bool { return kind == t || strings.HasPrefix(kind, strings.TrimSuffix(t, ".*")+".") }) &&
		any(f.processes, func(p string) bool { return p != "" && strings.HasPrefix(e.GetProcess(), p) }) &&
		any(f.actors, func(a string) bool { return a == e.GetActor() }) &&
		any(f.paths, func(p string) bool {
			return slices.ContainsFunc(pathsOf(e), func(is string) bool { return below(p, is) })
		}) &&
		any(f.hosts, func(h string) bool { is := hostOf(e); return is == h || strings.HasSuffix(is, "."+h) })
}

// pathsOf are the paths that an event is about.
func pathsOf(e *client.Event) []string {
	var out []string
	kind, _, _ := strings.Cut(e.GetType(), ".")
	if kind == "network" || kind == "secret" || kind == "model" {
		return nil // there a path is a URL's
	}
	for _, o := range observers() {
		for _, key := range []string{"path", "to", "dir"} {
			if s := e.GetFacts()[o].GetFields()[key].GetStringValue(); s != "" {
				out = append(out, s)
			}
		}
	}
	for _, list := range []string{"files", "more_in"} { // of files.changed
		for _, f := range fact(e, list).GetListValue().GetValues() {
			for _, key := range []string{"path", "from", "dir"} {
				if s := f.GetStructValue().GetFields()[key].GetStringValue(); s != "" {
					out = append(out, rawPath(s))
				}
			}
		}
	}
	return out
}

// below reports whether a path is the one asked for or lies below it.
func below(asked, is string) bool {
	for is = path.Clean(is); ; is = path.Dir(is) {
		if ok, err := path.Match(asked, is); ok && err == nil || asked == is {
			return true
		}
		if is == "/" || is == "." {
			return false
		}
	}
}

// hostOf is the host that an event is about; "": none.
func hostOf(e *client.Event) string {
	target := said(e, "target")
	if host, _, err := net.SplitHostPort(target); err == nil {
		target = host
	}
	return strings.ToLower(strings.TrimSuffix(target, "."))
}
