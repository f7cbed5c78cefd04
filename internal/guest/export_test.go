package guest

import "time"

// What the tests of the whole guest, which stand outside the package, compare with.
const (
	MaxEnded     = maxEnded
	MarkVariable = markVariable
	DefaultPath  = defaultPath
	DefaultTerm  = defaultTerm
	LateGrace    = time.Duration(lateGrace)
	MaxWorkers   = maxWorkers
)
