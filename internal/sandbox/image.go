package sandbox

import "casemate.dev/internal/rootfs"

// Settings are what a template or an image says of the processes in it. In a Spec, Env is nil: the environment
// is the Spec's own, and lies with a commit's files. User and Dir are what the image itself says, and "" where it
// says nothing; a Spec's own are never empty once it runs.
type Settings = rootfs.Settings
