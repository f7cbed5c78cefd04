package selftest

// Deviation is what must come of a case on one backend, where that is not what the case itself says.
type Deviation struct {
	ID        string
	Isolation string
	Profile   string // "" for both
	Want      Want
	// Why says why this is right there.
	Why string
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

// Deviations are all columns in which a backend differs from what the cases say, which is what namespace gives.
func Deviations() []Deviation {
	return []Deviation{
		{"A03", sentry, "locked", Want{Match: `(?s)NoNewPrivs:\s+1.*Seccomp:\s+0`}, noFilter},
		{"A03", sentry, "standard", Want{Match: `(?s)NoNewPrivs:\s+0.*Seccomp:\s+0`}, noFilter},
		{
			"A12", sentry, "standard",
			Want{Match: `^done`, Reject: `LACKS (nodev at /($|[^d])|nodev at /dev/|nosuid .*/\S)`},
			"root may write in /dev, whose devices are the Sentry's own, and can make none",
		},
		{"B02", sentry, "standard", Want{Match: `^done`, Reject: `WRITABLE /`}, ownFiles},
		{"B04", sentry, "standard", Want{Match: `^done`, Reject: `WRITABLE /(sys|proc/[^s])|/(modprobe|hotplug|register|bset|uevent_helper)$`}, ownFiles},
		{
			"B11", sentry, "standard",
			Want{Match: `refused|SAME|^OUTSIDE \[\]$`},
			"root that climbs out of a chroot comes to stand in the Sentry's own first directory, which is empty",
		},
		{"B12", sentry, "", Want{Match: `^(MOUNTED|refused)`}, ownUsers},
		{"B22", sentry, "", Want{Match: `^done`, Reject: `READ /`}, "the kernel log is the Sentry's own, and made up"},
		{"C04", sentry, "", Want{Match: `refused|ENODEV`, Reject: `through`}, "the Sentry has nothing to count with"},
		{
			"C05", sentry, "",
			Want{Match: `process_vm_readv .*\npidfd_getfd (refused|answered EBADF).*\nkcmp refused.*\nptrace refused`},
			"the call with nothing to read reads nothing; one that reads is refused as a trace is; of a descriptor that is none nothing is taken",
		},
		{"C07", sentry, "", Want{Match: ` (through|refused) `}, ownUsers},
		{"C08", sentry, "", Want{Match: `^unshare refused`, Reject: `through`}, noFilter},
		{"C11", sentry, "", Want{Match: `refused`, Reject: `through`}, noFilter},
		{"C12", sentry, "", Want{Match: `refused`, Reject: `add_key through`}, "key rings are the Sentry's own, and hold nothing"},
		{"C14", sentry, "", Want{Match: `refused ENOSYS`}, noLandlock},
		{
			"C15", sentry, "",
			Want{Match: ` refused `, Reject: `(vsock|xdp|packet|raw|raw6|alg|netfilter|audit|xfrm|bluetooth|can|tipc|rds) through`},
			"a socket for events of devices is the Sentry's own, on which none arrives",
		},
		{"C16", sentry, "", Want{Match: ` (through|refused) `}, ownUsers},
		{"C17", sentry, "", Want{Match: `refused|ENOTSUP`, Reject: `through`}, "the Sentry has no handles of files"},
		{"D13", sentry, "standard", Want{Not: ownEnd}, ownEnd},
		{"D07", sentry, "", Want{Match: `^last words`, Env: map[string]string{"SIZE": "268435456"}}, "256 MB: output passes a kernel in user space, at a tenth of the speed"},
		{"X02", sentry, "standard", Want{Match: `^done`, Reject: `REACHED (mem|maps|environ|cwd|exe|descriptor)`}, ownFirst},
		{"X03", sentry, "standard", Want{Match: `prlimit64 (through|refused)`}, ownFirst},
		{"X04", sentry, "standard", Want{Not: ownEnd}, ownEnd},
		{"X05", sentry, "", Want{Match: ` / `, Reject: `(upper|lower|work)dir=[^, ]*/[^, ]*/|/var/lib|/dev/loop`}, "the mount of the guest's program is named after the product, and shows no path of the host"},
	}
}
