package guest

// What the tests of the whole guest, which stand outside the package, compare with.
const (
	MarkVariable = markVariable
	DefaultPath  = defaultPath
	DefaultTerm  = defaultTerm
	MaxWorkers   = maxWorkers
)
