// Package launch turns a freshly started guest, which sits in new namespaces but still sees the
// server's mounts, into PID 1 of a sandbox: it builds the root file system, leaves the host's behind,
// and puts the walls on the thread that starts every process.
//
// What belongs here: what must happen inside the namespaces, before anything of the sandbox runs.
// What does not: deciding what to mount (isolation/namespace), making the walls (guest/spawn), and
// everything after the start (package guest).
//
// # Trust
//
// The server decides and is believed. The root file system is not: an image may hold a symbolic link
// where a mount goes. Each target is resolved in the new root without following any link, and the
// resolved descriptor is what is mounted on.
package launch
