package secret

// What sealing gave when the format was fixed.
const (
	knownSealed      = "01ffc3a1bbd9de0bd45990416aeeeb317bbf556312f7b26784ca5a535c17536397b1d2783d3d319ce48544adbf3a5fa4fcbb244c4b8c885ee80e51049d577bf89edfef233aa667ce7447f4ffa29760320ef67d52a922ed9879d43e498dc8655929810eb1ae1f306de4c0a69556"
	knownPlaceholder = "csm-placeholder-HMGhGRn78MVITnnYHIfc4JaZHsWWyTnXblF2"
)
