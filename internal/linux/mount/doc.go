// Package mount wraps the mount system calls: detached copies of mounts, their attributes and id
// maps, new file systems, and a private mount namespace for a process.
//
// What belongs here: one system call, or a few that only make sense together, with errors that name
// what was mounted where. What does not: which mounts a sandbox has; that is package guest/launch and
// the backends.
//
// Everything works on descriptors where the kernel lets it (open_tree(2), move_mount(2), fsopen(2)),
// since a path may be changed between its check and its use; see CVE-2025-31133 and CVE-2026-41579.
package mount
