package selftest

// Deviation is what must come of a case on one backend, where that is not what the case itself says.
type Deviation struct {
	ID        string
	Isolation string
	Profile   string // "" for both
	Want      Want
	// Why says why this is right there.
	Why string
	// Inside names the test that looks from the host, as "path/of/file_test.go TestName" from the module's root. It is set
	// where the attack does something to the sandbox's own kernel, so that what comes of it inside looks as in a weak sandbox.
	Inside string
}

// sentry is the backend whose processes are those of a kernel of its own.
const sentry = "gvisor"

// What is so in every sandbox with a kernel of its own.
const (
	noFilter   = "the call is answered by the sandbox's own kernel, and none of it reaches the host's, so no filter stands before it"
	ownUsers   = "user namespaces are the Sentry's own: what root in one may do, it may do to the sandbox's own kernel"
	ownFiles   = "these are the sandbox's own kernel's: what is written there is seen nowhere else"
	ownFirst   = "the first process is an ordinary one of root in the sandbox's own kernel, and what it says is believed by nobody; what guards the host stands outside"
	ownEnd     = "root inside ends its own sandbox by a signal to its first process, which the Sentry protects from nobody: nobody else's suffers"
	noLandlock = "the Sentry has no Landlock: a sandbox within has to be made otherwise"
)

// The tests that look from the host.
const (
	seenOutside = "test/walls/inside_test.go TestWhatIsDoneInsideStaysInside"
	itsPosture  = "test/walls/posture_test.go TestPostureOfGvisor"
)

// Deviations are all columns in which a backend differs from what the cases say, which is what namespace gives.
func Deviations() []Deviation {
	return []Deviation{
		{ID: "A03", Isolation: sentry, Profile: "locked", Want: Want{Match: `(?s)NoNewPrivs:\s+1.*Seccomp:\s+0`}, Why: noFilter},
		{ID: "A03", Isolation: sentry, Profile: "standard", Want: Want{Match: `(?s)NoNewPrivs:\s+0.*Seccomp:\s+0`}, Why: noFilter, Inside: itsPosture},
		{
			ID: "A12", Isolation: sentry, Profile: "standard",
			Want: Want{Match: `^done`, Reject: `LACKS (nodev at /($|[^d])|nodev at /dev/|nosuid .*/\S)`},
			Why:  "root may write in /dev, whose devices are the Sentry's own, and can make none",
		},
		{ID: "B02", Isolation: sentry, Profile: "standard", Want: Want{Match: `^done`, Reject: `WRITABLE /`}, Why: ownFiles},
		{
			ID: "B04", Isolation: sentry, Profile: "standard",
			Want: Want{Match: `^done`, Reject: `WRITABLE /(sys|proc/[^s])|/(modprobe|hotplug|register|bset|uevent_helper)$`}, Why: ownFiles,
		},
		{
			ID: "B11", Isolation: sentry, Profile: "standard", Want: Want{Match: `refused|SAME|^OUTSIDE \[\]$`},
			Why: "root that climbs out of a chroot comes to stand in the Sentry's own first directory, which is empty",
		},
		{ID: "B12", Isolation: sentry, Want: Want{Match: `^(MOUNTED|refused)`}, Why: ownUsers, Inside: seenOutside},
		{ID: "B22", Isolation: sentry, Want: Want{Match: `^done`, Reject: `READ /`}, Why: "the kernel log is the Sentry's own, and made up"},
		{ID: "C04", Isolation: sentry, Want: Want{Match: `refused|ENODEV`, Reject: `through`}, Why: "the Sentry has nothing to count with"},
		{
			ID: "C05", Isolation: sentry,
			Want: Want{Match: `process_vm_readv .*\npidfd_getfd (refused|answered EBADF).*\nkcmp refused.*\nptrace refused`},
			Why:  "the call with nothing to read reads nothing; one that reads is refused as a trace is; of a descriptor that is none nothing is taken",
		},
		{ID: "C07", Isolation: sentry, Want: Want{Match: ` (through|refused) `}, Why: ownUsers, Inside: seenOutside},
		{ID: "C08", Isolation: sentry, Want: Want{Match: `^unshare refused`, Reject: `through`}, Why: noFilter},
		{ID: "C11", Isolation: sentry, Want: Want{Match: `refused`, Reject: `through`}, Why: noFilter},
		{ID: "C12", Isolation: sentry, Want: Want{Match: `refused`, Reject: `add_key through`}, Why: "key rings are the Sentry's own, and hold nothing"},
		{ID: "C14", Isolation: sentry, Want: Want{Match: `refused ENOSYS`}, Why: noLandlock},
		{
			ID: "C15", Isolation: sentry,
			Want: Want{Match: ` refused `, Reject: `(vsock|xdp|packet|raw|raw6|alg|netfilter|audit|xfrm|bluetooth|can|tipc|rds) through`},
			Why:  "a socket for events of devices is the Sentry's own, on which none arrives",
		},
		{ID: "C16", Isolation: sentry, Want: Want{Match: ` (through|refused) `}, Why: ownUsers, Inside: seenOutside},
		{ID: "C17", Isolation: sentry, Want: Want{Match: `refused|ENOTSUP`, Reject: `through`}, Why: "the Sentry has no handles of files"},
		{
			ID: "D07", Isolation: sentry, Want: Want{Match: `^last words`, Env: map[string]string{"SIZE": "268435456"}},
			Why: "256 MB: 2 GB came to their end as well, all counted, but took ten minutes on a busy machine (3.5 MB a second), since two pipes are the Sentry's",
		},
		{ID: "D13", Isolation: sentry, Profile: "standard", Want: Want{End: "exited or signaled or canceled", Ends: true}, Why: ownEnd},
		{
			ID: "X02", Isolation: sentry, Profile: "standard",
			Want: Want{Match: `^done`, Reject: `REACHED (mem|maps|environ|cwd|exe|descriptor)`}, Why: ownFirst,
		},
		{ID: "X03", Isolation: sentry, Profile: "standard", Want: Want{Match: `prlimit64 (through|refused)`}, Why: ownFirst, Inside: seenOutside},
		{ID: "X04", Isolation: sentry, Profile: "standard", Want: Want{Match: `^sent`, Ends: true}, Why: ownEnd},
		{
			ID: "X05", Isolation: sentry, Want: Want{Match: ` / `, Reject: hostPaths},
			Why: "the mount of the guest's program is named after the product, and shows no path of the host",
		},
	}
}
