// Package rootfs holds the files of sandboxes: where layers lie, how much a writable layer may
// grow, and what changed in it.
//
// It plans a root file system as a value (Plan); a backend of isolation mounts it. A template is built in
// (recipe), or a name for an imported image or a commit, with the Settings that its maker gave it: PutTemplate
// makes one, and its ENV, WORKDIR and USER hold in every sandbox that starts from it. What belongs here:
// the store on disk, its limits and templates, and the comparison of layers. What does not: mounting
// anything for a sandbox (isolation's backends), and running anything in one. No code here resolves a
// path in a tree that a sandbox can change, except through package linux/fd.
//
// # On disk
//
//	<data-dir>/rootfs/            0700
//	  lock                        held while a server uses the store
//	  mechanism                   how layers are limited: project-quota, btrfs-quota or tmpfs
//	  layers.img                  btrfs-quota: the preallocated image
//	  layers/                     the writable layers; btrfs-quota: the image's mount, seen by the server only
//	    live/<sandbox>/           upper/, work/, and ws0/ … for workspaces
//	    spare/ trash/ snapshots/  made ahead, to be deleted, and those of comparisons
//	  templates/                  host-<key>/, base-<time>/, each with root/ and meta.json; empty/
//	    layer-<id>/ image-<id>/   imported images: root/ and layer.json of each layer, image.json that lists them
//	    names/<name>.json         templates made of images and commits (Stored)
//	  uses/<sandbox>              which template a sandbox has below it
package rootfs

// Plan says what a sandbox's root file system is made of. All paths are host paths, absolute and
// clean. A Plan is plain data: it may be stored as JSON and used again after a restart.
type Plan struct {
	// Lowers are the read-only layers of the root, the topmost first.
	Lowers []string `json:"lowers"`
	// Committed are the ids of the committed layers among Lowers, the topmost first; what lies below them
	// is the template's.
	Committed []string `json:"committed,omitempty"`
	// Upper and Work are the writable layer and overlayfs's work directory, on one file system.
	Upper string `json:"upper"`
	Work  string `json:"work"`
	// Binds are placed into the root in order, after the overlay is mounted.
	Binds []Bind `json:"binds,omitempty"`
	// Workspaces are further overlays placed into the root, after Binds.
	Workspaces []Workspace `json:"workspaces,omitempty"`
	// Disk is the limit that holds for Upper and for every workspace's upper directory together.
	Disk DiskLimit `json:"disk"`
	// Env is the environment that the template gives every process, lowest in precedence.
	Env map[string]string `json:"env,omitempty"`
	// User and Dir are the template's default user (a name in its /etc/passwd) and working directory.
	User string `json:"user"`
	Dir  string `json:"dir"`
	// Contexts are the languages of the code contexts that a sandbox has warm from its start.
	Contexts []string `json:"contexts,omitempty"`
}

// Bind is one host directory or file that shows, read-only, inside the root.
type Bind struct {
	Source string `json:"source"`
	Target string `json:"target"`
	// Mapped says that files keep their inside-ids through an idmapped mount. Template host binds
	// /usr unmapped: its files then show as owned by nobody.
	Mapped bool `json:"mapped,omitempty"`
}

// Workspace is a host directory that shows inside as copy-on-write: the sandbox sees Source,
// writes go to Upper, and Source never changes.
type Workspace struct {
	Source string `json:"source"`
	Target string `json:"target"`
	// Lowers are committed layers of the workspace above Source, the topmost first. They hold inside-ids,
	// as Upper does.
	Lowers []string `json:"lowers,omitempty"`
	Upper  string   `json:"upper"`
	Work   string   `json:"work"`
	// OwnerUID and OwnerGID are the host ids of Source; an idmap shows exactly these as the
	// sandbox's default user.
	OwnerUID int `json:"owner_uid"`
	OwnerGID int `json:"owner_gid"`
}

// DiskLimit says how the size of a writable layer is held.
type DiskLimit struct {
	// Mechanism is "project-quota", "btrfs-quota" or "tmpfs".
	Mechanism string `json:"mechanism"`
	Bytes     int64  `json:"bytes"`
	// Backed, where it is set and less than Bytes, is what was free for this layer at its start: the
	// limits of all layers together exceed the store, and the layer grows beyond Backed only while
	// there is room.
	Backed int64 `json:"backed,omitempty"`
	// Inodes is the limit on files; 0 means that the bytes limit them (btrfs).
	Inodes int64 `json:"inodes,omitempty"`
}
