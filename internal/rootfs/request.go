package rootfs

import "time"

// Request asks for the root file system of one sandbox.
type Request struct {
	ID       string // the sandbox's
	Template string
	// Layer is a committed layer to start from, in the place of a template, or "".
	Layer string
	// Profile is an isolation.Profile, or "" for the first that the template allows.
	Profile    string
	DiskBytes  int64
	Inodes     int64
	Workspaces []WorkspaceRequest
}

// WorkspaceRequest asks for a host directory inside, as copy-on-write.
type WorkspaceRequest struct {
	Source string // absolute host path
	Target string // absolute path inside
}

// Change is one file that differs from what a sandbox started from.
type Change struct {
	Op   string `json:"op"`   // "added", "modified" or "removed"
	Path string `json:"path"` // absolute inside, or relative to the workspace
	Type string `json:"type"` // "file", "dir", "symlink" or "other"
	Size int64  `json:"size"`
	Mode uint32 `json:"mode"`
}

// Template is what a sandbox starts from.
type Template struct {
	Name        string
	Description string
	// Profiles are those that it allows, the default first.
	Profiles  []string
	Ready     bool
	SizeBytes int64
	BuiltAt   time.Time
	// Settings are what its maker says of the processes in it.
	Settings Settings
	// Source and Digest are what an imported one was made of; "": it was built here.
	Source, Digest string
}
