package landlock

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// rulesetAttr is struct landlock_ruleset_attr as of ABI 6.
type rulesetAttr struct {
	accessFS, accessNet, scoped uint64
}

// size returns how much of the struct a kernel must know: an older one refuses (E2BIG) bytes that it
// does not know unless they are zero, and takes a shorter struct from newer programs.
func (a *rulesetAttr) size() uintptr {
	if a == nil {
		return 0
	}
	if a.scoped != 0 {
		return unsafe.Sizeof(*a)
	}
	return unsafe.Sizeof(a.accessFS)
}

func createRuleset(a *rulesetAttr, flags uintptr) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(a)), a.size(), flags)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// addPathBeneath passes struct landlock_path_beneath_attr, which is packed: 12 bytes.
func addPathBeneath(ruleset, parent int, access uint64) error {
	var attr [12]byte
	binary.NativeEndian.PutUint64(attr[0:], access)
	binary.NativeEndian.PutUint32(attr[8:], uint32(parent))
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(ruleset),
		unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&attr[0])), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
