package caps

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// lastCap is the file that tells the highest capability that the kernel knows (proc(5)).
const lastCap = "/proc/sys/kernel/cap_last_cap"

// All returns every capability that this kernel knows, as syscall.SysProcAttr.AmbientCaps takes them.
func All() ([]uintptr, error) {
	text, err := os.ReadFile(lastCap)
	if err != nil {
		return nil, err
	}
	last, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 6)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", lastCap, err)
	}
	all := make([]uintptr, last+1)
	for c := range all {
		all[c] = uintptr(c)
	}
	return all, nil
}
