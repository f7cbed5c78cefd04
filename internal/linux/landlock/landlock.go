// Package landlock puts Landlock domains on the calling thread, by raw system calls.
//
// github.com/landlock-lsm/go-landlock restricts all threads of a process. The guest needs the
// opposite: the one thread that forks the payload in a domain, PID 1's other threads in none; so it
// does not fit.
//
// What belongs here: access bits, what each ABI knows, and the three system calls. What does not:
// which rules a profile has (isolation/walls). TCP ports are never restricted here: the network is
// the gateway's.
//
// See landlock(7) and Documentation/userspace-api/landlock.rst.
package landlock

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Access is a set of LANDLOCK_ACCESS_FS_* bits.
type Access uint64

// The accesses, with the ABI that brought them where it is not the first.
const (
	Execute    Access = unix.LANDLOCK_ACCESS_FS_EXECUTE
	WriteFile  Access = unix.LANDLOCK_ACCESS_FS_WRITE_FILE
	ReadFile   Access = unix.LANDLOCK_ACCESS_FS_READ_FILE
	ReadDir    Access = unix.LANDLOCK_ACCESS_FS_READ_DIR
	RemoveDir  Access = unix.LANDLOCK_ACCESS_FS_REMOVE_DIR
	RemoveFile Access = unix.LANDLOCK_ACCESS_FS_REMOVE_FILE
	MakeChar   Access = unix.LANDLOCK_ACCESS_FS_MAKE_CHAR
	MakeDir    Access = unix.LANDLOCK_ACCESS_FS_MAKE_DIR
	MakeReg    Access = unix.LANDLOCK_ACCESS_FS_MAKE_REG
	MakeSock   Access = unix.LANDLOCK_ACCESS_FS_MAKE_SOCK
	MakeFifo   Access = unix.LANDLOCK_ACCESS_FS_MAKE_FIFO
	MakeBlock  Access = unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK
	MakeSym    Access = unix.LANDLOCK_ACCESS_FS_MAKE_SYM
	Refer      Access = unix.LANDLOCK_ACCESS_FS_REFER     // ABI 2; in ABI 1 always refused
	Truncate   Access = unix.LANDLOCK_ACCESS_FS_TRUNCATE  // ABI 3
	IoctlDev   Access = unix.LANDLOCK_ACCESS_FS_IOCTL_DEV // ABI 5
)

// FileAccess is what a rule on something that is no directory may allow; the kernel refuses others.
const FileAccess = Execute | WriteFile | ReadFile | Truncate | IoctlDev

// Scope is a set of LANDLOCK_SCOPE_* bits: what processes of a domain can't reach outside of it.
type Scope uint64

// The scopes, both of ABI 6.
const (
	ScopeAbstractUnix Scope = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET
	ScopeSignal       Scope = unix.LANDLOCK_SCOPE_SIGNAL
)

// MaxABI is the newest version whose bits this package knows. Newer kernels are used as this one.
const MaxABI = 7

// Known returns the accesses and scopes that an ABI knows; none for 0.
func Known(abi int) (Access, Scope) {
	if abi < 1 {
		return 0, 0
	}
	a := Refer - 1
	if abi >= 2 {
		a |= Refer
	}
	if abi >= 3 {
		a |= Truncate
	}
	if abi >= 5 {
		a |= IoctlDev
	}
	if abi >= 6 {
		return a, ScopeAbstractUnix | ScopeSignal
	}
	return a, 0
}

// ABI returns the kernel's version, or 0 where it has no Landlock or was started without it.
func ABI() (int, error) {
	abi, err := createRuleset(nil, unix.LANDLOCK_CREATE_RULESET_VERSION)
	switch {
	case errors.Is(err, unix.ENOSYS), errors.Is(err, unix.EOPNOTSUPP):
		return 0, nil
	case err != nil:
		return 0, os.NewSyscallError("landlock_create_ruleset", err)
	}
	return abi, nil
}

// Rule allows Access beneath Path.
type Rule struct {
	Path     string
	Access   Access
	Optional bool // an absent Path is no error
}

// Ruleset is a domain to be.
type Ruleset struct {
	Handled Access // refused unless a rule allows it
	Scoped  Scope
	Rules   []Rule
}

// Restrict puts the calling thread into a new domain, for good: it and all that it forks. It returns
// the paths of optional rules that were absent.
//
// The thread needs no_new_privs or CAP_SYS_ADMIN in its user namespace. Two calls make two domains,
// nested where one thread makes both, strangers to each other where two threads do.
func Restrict(r Ruleset) (absent []string, err error) {
	fd, err := createRuleset(&rulesetAttr{accessFS: uint64(r.Handled), scoped: uint64(r.Scoped)}, 0)
	if err != nil {
		return nil, os.NewSyscallError("landlock_create_ruleset", err)
	}
	defer unix.Close(fd)
	for _, rule := range r.Rules {
		switch err := addRule(fd, rule); {
		case rule.Optional && errors.Is(err, unix.ENOENT):
			absent = append(absent, rule.Path)
		case err != nil:
			return nil, fmt.Errorf("allow %s: %w", rule.Path, err)
		}
	}
	if err := restrictSelf(fd); err != nil {
		return nil, os.NewSyscallError("landlock_restrict_self", err)
	}
	return absent, nil
}

func addRule(ruleset int, r Rule) error {
	parent, err := unix.Open(r.Path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("open", err)
	}
	defer unix.Close(parent)
	var st unix.Stat_t
	if err := unix.Fstat(parent, &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		r.Access &= FileAccess
	}
	return os.NewSyscallError("landlock_add_rule", addPathBeneath(ruleset, parent, uint64(r.Access)))
}

// quiet returns the flags that keep denials of sandboxed code out of the host's audit log, which a
// loop inside could otherwise flood (ABI 7). Older kernels log nothing and refuse the flags.
func quiet() uint32 {
	if abi, err := ABI(); err != nil || abi < 7 {
		return 0
	}
	return unix.LANDLOCK_RESTRICT_SELF_LOG_SAME_EXEC_OFF | unix.LANDLOCK_RESTRICT_SELF_LOG_SUBDOMAINS_OFF
}

func restrictSelf(ruleset int) error {
	_, _, errno := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(ruleset), uintptr(quiet()), 0)
	if errno != 0 {
		return errno
	}
	return nil
}
