package sandbox

import (
	"fmt"
	"math"
	"path"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
)

// The bounds of what a caller may ask for.
const (
	maxLabelValue = 255
	maxTag        = 256
	maxText       = 512 << 10 // argv or env in all: a call to the guest holds 1 MiB
	maxPath       = 4096      // PATH_MAX, limits.h
	maxArgs       = 1 << 15
	maxDuration   = 10 * 365 * 24 * time.Hour
	minDuration   = time.Second
	maxMissing    = 32
	maxExtra      = 64 << 10
	maxKey        = 255
	maxExecution  = 30 * 24 * time.Hour
)

// MaxLabels is how many labels a sandbox may have.
const MaxLabels = 64

// CheckLabel says what is wrong with a label; nil: nothing.
func CheckLabel(key, value string) error {
	var c checker
	c.labels(map[string]string{key: value})
	return c.err
}

func invalid(format string, args ...any) *errs.Error {
	return errs.New(errs.InvalidArgument, format, args...)
}

// checker collects the first error, so that checks read as a list.
type checker struct{ err error }

func (c *checker) that(ok bool, hint, format string, args ...any) {
	if !ok && c.err == nil {
		e := invalid(format, args...)
		if hint != "" {
			e = e.WithHint("%s", hint)
		}
		c.err = e
	}
}

func (c *checker) spec(s *Spec) error {
	c.that(dnsLabel(s.Name), "use lower-case letters, digits and -, at most 63, as in web-1",
		"name %s is no DNS label", quote(s.Name))
	c.that(shaped(s.Template, 128, lowerOrNum, plus(lowerOrNum, "._/:-"), lowerOrNum), "", "template %s is no template's name", quote(s.Template))
	c.that(s.FileChanges == "" || s.FileChanges == FileChangesOff || s.FileChanges == FileChangesSummary || s.FileChanges == FileChangesFull,
		"use off, summary or full", "file changes %s are unknown", quote(string(s.FileChanges)))
	c.that(s.Profile == "" || s.Profile == isolation.Locked || s.Profile == isolation.Standard,
		"use locked or standard", "profile %s is unknown", quote(string(s.Profile)))
	c.labels(s.Labels)
	c.env(s.Env)
	c.user(s.User)
	c.dir("dir", s.Dir)
	c.limits(s.Limits)
	c.duration("lifetime", s.Lifetime)
	c.duration("idle", s.Idle)
	c.extra(s.Extra)
	c.recording(s.Record)
	c.that(len(s.AllowMissing) <= maxMissing, "", "allow_missing has %d names, limit %d", len(s.AllowMissing), maxMissing)
	for _, name := range s.AllowMissing {
		c.that(shaped(name, 64, lowerOrNum, plus(lowerOrNum, "_.-"), lowerOrNum), "casemate doctor shows the names", "allow_missing: %s is no layer's name", quote(name))
	}
	return c.err
}

func (c *checker) labels(labels map[string]string) {
	c.that(len(labels) <= MaxLabels, "", "%d labels, limit %d", len(labels), MaxLabels)
	for k, v := range labels {
		c.labelKey(k)
		c.that(len(v) <= maxLabelValue && printable(v), "", "label %s: its value must be printable text of at most %d bytes", k, maxLabelValue)
	}
}

func (c *checker) labelKey(k string) {
	c.that(shaped(k, 63, letterOrNum, plus(letterOrNum, "._/-"), letterOrNum),
		"use letters, digits, . _ / and -, at most 63, as in team or example.com/task", "label %s is no label's name", quote(k))
}

func (c *checker) extra(extra map[string]string) {
	size := 0
	for k, v := range extra {
		size += len(k) + len(v)
	}
	c.that(size <= maxExtra, "", "what is kept with the sandbox has %d bytes, limit %d", size, maxExtra)
}

func (c *checker) env(env map[string]string) {
	size := 0
	for k, v := range env {
		c.that(envName(k), "use letters, digits and _, not beginning with a digit",
			"env: %s is no variable's name", quote(k))
		c.that(!strings.Contains(v, "\x00"), "", "env: the value of %s holds a NUL byte", quote(k))
		size += len(k) + len(v) + 2
	}
	c.that(size <= maxText, "write large data to a file instead", "env has %d bytes, limit %d", size, maxText)
}

// user checks a user, perhaps with a group after a colon.
func (c *checker) user(u string) {
	if user, group, ok := strings.Cut(u, ":"); ok {
		c.that(user != "" && group != "" && !strings.Contains(group, ":"), "as in app:app or 1000:1000", "user %s names no user, or no group", quote(u))
		c.user(user)
		c.user(group)
		return
	}
	if n, err := strconv.Atoi(u); err == nil {
		c.that(n >= 0 && n < 1<<16, "", "user %s: a number must lie between 0 and 65535", quote(u))
		return
	}
	c.that(u == "" || userName(u), "use a name of the template's /etc/passwd, or a number",
		"user %s is no user's name", quote(u))
}

func (c *checker) dir(field, d string) {
	if d == "" {
		return
	}
	c.that(strings.HasPrefix(d, "/"), "write it from / on", "%s %s is not absolute", field, quote(d))
	c.that(len(d) < maxPath && !strings.Contains(d, "\x00"), "", "%s is longer than %d bytes or holds a NUL byte", field, maxPath-1)
}

func (c *checker) limits(l Limits) {
	within(c, "memory", l.MemoryBytes, 16<<20, 1<<46, "16 MiB to 64 TiB")
	within(c, "pids", int64(l.Pids), 8, 1<<20, "8 to 1048576")
	within(c, "open_files", int64(l.OpenFiles), 64, 1<<20, "64 to 1048576")
	within(c, "disk", l.DiskBytes, 16<<20, 1<<46, "16 MiB to 64 TiB")
	within(c, "inodes", l.Inodes, 1000, 1<<40, "1000 or more")
	// NaN compares false with everything.
	c.that(l.CPUs == 0 || l.CPUs >= 0.05 && l.CPUs <= 1024 && !math.IsNaN(l.CPUs), "use 0.05 to 1024, as in 1.5",
		"limits: cpus is %v", l.CPUs)
}

// within checks a limit; 0 stands for the default.
func within(c *checker, field string, v, low, high int64, remedy string) {
	c.that(v == 0 || v >= low && v <= high, "use "+remedy, "limits: %s is %d", field, v)
}

func (c *checker) duration(field string, d time.Duration) {
	c.that(d <= 0 || d >= minDuration && d <= maxDuration, "use 1s to 87600h, ten years; 0 or less stands for none",
		"%s is %s", field, d)
}

func (c *checker) process(s *ProcessSpec) error {
	c.that(s.ID == "" || processID(s.ID), "use letters, digits, - and _, at most 64",
		"process id %s is malformed", quote(s.ID))
	c.that(len(s.Tag) <= maxTag && printable(s.Tag), "", "tag is longer than %d bytes or not printable", maxTag)
	c.that(len(s.Argv) > 0 && s.Argv[0] != "", "name a program, as in [\"python3\", \"-c\", \"print(1)\"]", "argv names no program")
	c.that(len(s.Argv) <= maxArgs, "", "argv has %d arguments, limit %d", len(s.Argv), maxArgs)
	size := 0
	for i, a := range s.Argv {
		size += len(a) + 1
		c.that(!strings.Contains(a, "\x00"), "", "argv[%d] holds a NUL byte", i)
	}
	c.that(size <= maxText, "write large data to a file, or to standard input", "argv has %d bytes, limit %d", size, maxText)
	c.env(s.Env)
	c.user(s.User)
	c.that(len(s.Dir) < maxPath && !strings.Contains(s.Dir, "\x00"), "", "dir is longer than %d bytes or holds a NUL byte", maxPath-1)
	c.that(s.Timeout >= 0 && s.Timeout <= maxExecution, "use 0 for no limit", "timeout is %s", s.Timeout)
	c.that(s.Timeout == 0 || s.Timeout >= time.Millisecond, "use 1ms or more", "timeout is %s", s.Timeout)
	c.that(s.Grace >= 0 && s.Grace <= time.Hour, "", "grace is %s", s.Grace)
	c.that(s.Buffer >= 0, "", "buffer is %d", s.Buffer)
	c.that(s.TTY || s.Rows == 0 && s.Cols == 0, "set tty", "rows and cols are for terminals")
	return c.err
}

func checkKey(key string) error {
	if len(key) > maxKey || !printable(key) {
		return invalid("the idempotency key must be printable text of at most %d bytes", maxKey).WithHint("a UUID does")
	}
	return nil
}

// class is a set of characters that a name may hold.
type class func(c byte) bool

func lower(c byte) bool       { return c >= 'a' && c <= 'z' }
func digit(c byte) bool       { return c >= '0' && c <= '9' }
func lowerOrNum(c byte) bool  { return lower(c) || digit(c) }
func letter(c byte) bool      { return lower(c|0x20) && c >= 'A' }
func letterOrNum(c byte) bool { return letter(c) || digit(c) }

func plus(base class, more string) class {
	return func(c byte) bool { return base(c) || strings.IndexByte(more, c) >= 0 }
}

// shaped reports whether s has 1 to most characters: the first, the last, and those between, each
// of its class.
func shaped(s string, most int, first, between, last class) bool {
	if s == "" || len(s) > most || !first(s[0]) || len(s) > 1 && !last(s[len(s)-1]) {
		return false
	}
	for i := 1; i < len(s)-1; i++ {
		if !between(s[i]) {
			return false
		}
	}
	return true
}

// dnsLabel follows RFC 1123, in lower case.
func dnsLabel(s string) bool { return shaped(s, 63, lowerOrNum, plus(lowerOrNum, "-"), lowerOrNum) }

func envName(s string) bool {
	rest := plus(letterOrNum, "_")
	return shaped(s, 1<<10, plus(letter, "_"), rest, rest)
}

func processID(s string) bool {
	all := plus(letterOrNum, "-_")
	return shaped(s, 64, all, all, all)
}

// userName follows useradd(8), which allows a dollar sign at the end.
func userName(s string) bool {
	return shaped(s, 32, plus(lower, "_"), plus(lowerOrNum, "_-"), plus(lowerOrNum, "_-$"))
}

func printable(s string) bool {
	if !utf8.ValidString(s) {
		return false
	}
	return !strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f })
}

// quote shows what a caller sent, cut to a length that a message can carry.
func quote(s string) string {
	if len(s) > 64 {
		s = s[:64] + "…"
	}
	return fmt.Sprintf("%q", s)
}

// inside reports whether p is dir or lies below it. Both are clean.
func inside(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}

// cleanTarget returns where a workspace shows inside, or an error that says why it can't.
func cleanTarget(t string) (string, error) {
	if t == "" {
		return "/workspace", nil
	}
	if !strings.HasPrefix(t, "/") || len(t) >= maxPath || strings.Contains(t, "\x00") {
		return "", invalid("workspace target %s is not an absolute path", quote(t)).WithHint("use a path such as /workspace")
	}
	t = path.Clean(t)
	for _, taken := range []string{"/proc", "/sys", "/dev", "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc"} {
		if inside(t, taken) {
			return "", invalid("workspace target %s would hide a part of the system", quote(t)).WithHint("use a path such as /workspace")
		}
	}
	if t == "/" {
		return "", invalid("workspace target / would hide the whole root").WithHint("use a path such as /workspace")
	}
	return t, nil
}
