package selftest

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"strings"
	"time"
)

// Class says what an attack would reach, after gVisor's security classes: the first six cross the
// boundary, the others stay inside it.
type Class string

// The classes.
const (
	Escape      Class = "escape"       // code or files of the host
	HostLeak    Class = "host leak"    // knowledge of the host
	Exfil       Class = "exfiltration" // data leaves
	Lateral     Class = "lateral"      // another sandbox
	HostDoS     Class = "host dos"     // the host's service
	PeerDoS     Class = "peer dos"     // another sandbox's service
	InternalEsc Class = "internal"     // more rights inside
	SelfDoS     Class = "self dos"     // the sandbox's own service
	Integrity   Class = "integrity"    // what others rely on
	Compat      Class = "compatible"   // no attack: what must work
)

// Want is what must come of a case in one profile.
type Want struct {
	// Match and Reject are regular expressions over the whole output: the first must be found, the
	// second must not. They see lines, so ^ and $ are those of a line.
	Match, Reject string
	// End is the end reason that the command must have, or several joined by " or "; "" is exited,
	// and SIGSYS is the end that the system call filter gives.
	End string
	// Ends says that the attacker may end the sandbox by it: then a server must say so, and its neighbours must not notice.
	Ends bool
	// Not says why the case does not apply to the profile; nothing is run then.
	Not string
	// Env is for the script, beside the case's own.
	Env map[string]string
}

// Twin names a deliberately weak sandbox.
type Twin string

// The twins. What each lacks is what its cases are about.
const (
	// Bare is a root of its own in most namespaces, with every capability and no filter.
	Bare Twin = "bare"
	// Shared is a process in the host's namespaces but for mounts and users' files.
	Shared Twin = "shared"
	// Chroot is a process whose root was changed and nothing else.
	Chroot Twin = "chroot"
	// Unlimited has no limit on memory, processes, files or disk.
	Unlimited Twin = "unlimited"
	// OpenNetwork has the host's own network and name servers, and the key itself where others have a placeholder.
	OpenNetwork Twin = "open network"
)

// Case is one attack.
type Case struct {
	ID    string
	Class Class
	// Title says in a few words what is tried.
	Title string
	// Script is for /bin/sh, behind the helpers of prelude. Python, instead, is for python3.
	Script string
	Python string
	// AsUser runs the case as the default user also where the profile has root inside.
	AsUser bool
	// TTY gives the script a terminal.
	TTY     bool
	Timeout time.Duration // default 5 minutes: it only ends what hangs
	Env     map[string]string

	// Flow, where set, makes it a case of section F: it gets a sandbox of its own with a network, whose other end is an
	// Internet, and is left out where there is none.
	Flow *Flow

	// Limits, where set, gives the case a sandbox of its own with these limits.
	Limits *Limits
	// Hostile says that the case may take the sandbox's own service: a neighbour is watched
	// meanwhile, and the sandbox must be usable afterwards.
	Hostile bool

	// Locked and Standard are what must come of it in the two profiles, but for what Deviations says of a backend.
	Locked, Standard Want
	// Check judges what regular expressions can't; it may run more in the sandbox.
	Check func(ctx context.Context, a *attack) error

	// Twin is the weak sandbox in which the case must come out wrong, TwinSetup what is prepared in
	// it first, TwinEnv what keeps it small there, TwinLimits the limits that it is judged by there where
	// others would not show what it lacks, TwinSpoils that it is of no more use afterwards, and Untwinned why
	// there is none.
	Twin       Twin
	TwinSetup  string
	TwinEnv    map[string]string
	TwinLimits *Limits
	TwinSpoils bool
	// TwinAgain says that a busy machine may make it come out right in the twin, where it is then tried again.
	TwinAgain bool
	Untwinned string
}

// Column is what expectations depend on.
type Column struct {
	Isolation string // "" is namespace
	Profile   string
}

// attack is a case under way.
type attack struct {
	c Case
	Column
	user   string
	box    Sandbox
	local  bool
	result Result
}

// want returns what must come of the case in a column.
func (c Case) want(col Column) Want {
	if d, ok := c.deviation(col); ok {
		return d.Want
	}
	if col.Profile == "standard" {
		return c.Standard
	}
	return c.Locked
}

// Reason says why what must come of the case in a column is not what the case is about, or what another backend gives; ""
// where there is nothing to say.
func (c Case) Reason(col Column) string {
	if d, ok := c.deviation(col); ok {
		return d.Why
	}
	return c.want(col).Not
}

// NotApplicable reports whether the case is not tried in a column.
func (c Case) NotApplicable(col Column) bool { return c.want(col).Not != "" }

// Inside returns the test that shows from the host that what the attack does in a column is done to the sandbox's own kernel
// alone, as Deviation.Inside names it; "" where what the attack must not do is seen inside.
func (c Case) Inside(col Column) string {
	d, _ := c.deviation(col)
	return d.Inside
}

// Bounds returns the limits of the sandbox that the case is tried in.
func (c Case) Bounds() Limits {
	if c.Limits != nil {
		return *c.Limits
	}
	return battleLimits()
}

// deviation returns what differs in a column.
func (c Case) deviation(col Column) (Deviation, bool) {
	for _, d := range Deviations() {
		if d.ID == c.ID && d.Isolation == col.Isolation && (d.Profile == "" || d.Profile == col.Profile) {
			return d, true
		}
	}
	return Deviation{}, false
}

// command returns what runs the case.
func (c Case) command(user string, more map[string]string) Command {
	timeout := c.Timeout
	if timeout == 0 {
		timeout = 5 * time.Minute
	}
	argv := []string{"/bin/sh", "-c", prelude + c.Script}
	if c.Python != "" {
		argv = []string{python, "-c", pythonPrelude + c.Python}
	}
	if c.AsUser {
		user = ""
	}
	env := maps.Clone(c.Env)
	if env == nil {
		env = map[string]string{}
	}
	maps.Copy(env, more)
	return Command{Argv: argv, Env: env, User: user, TTY: c.TTY, Timeout: timeout}
}

// judge compares a result with what is wanted.
func (w Want) judge(r Result) error {
	end := w.End
	if end == "" {
		end = "exited"
	}
	if !r.ended(end) {
		return fmt.Errorf("ended as %s (code %d, signal %d), want %s: %s", r.End, r.Code, r.Signal, end, excerpt(r.Output))
	}
	if w.Match != "" && !lines(w.Match).MatchString(r.Output) {
		return fmt.Errorf("printed %s, want %s", excerpt(r.Output), w.Match)
	}
	if w.Reject != "" {
		if found := lines(w.Reject).FindString(r.Output); found != "" {
			return fmt.Errorf("printed %s", excerpt(found))
		}
	}
	return nil
}

func (r Result) ended(ends string) bool {
	for _, end := range strings.Split(ends, " or ") {
		if r.End == end || end == "SIGSYS" && (r.Signal == sigsys || r.End == "exited" && r.Code == 128+sigsys) {
			return true
		}
	}
	return false
}

// sigsys is the signal of a killing filter, the same number on amd64 and arm64 (signal(7)).
const sigsys = 31

func lines(pattern string) *regexp.Regexp { return regexp.MustCompile("(?m)" + pattern) }

// excerpt returns the beginning of an output on one line.
func excerpt(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > 160 {
		s = strings.ToValidUTF8(s[:160], "") + "…"
	}
	return fmt.Sprintf("%q", s)
}

// both gives one Want to both profiles.
func both(c Case, w Want) Case {
	c.Locked, c.Standard = w, w
	return c
}
