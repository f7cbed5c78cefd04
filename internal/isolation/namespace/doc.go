// Package namespace keeps sandboxes apart with Linux namespaces, an own range of unprivileged host
// ids for each, idmapped overlay file systems, control groups, seccomp and Landlock.
//
// What belongs here: building one instance from a Spec, observing from outside what was really put
// in place, and taking it down or up again. What does not: system calls without a decision in them
// (package linux and below), what happens inside the namespaces (guest/launch), which calls and paths
// a profile allows (isolation/walls).
//
// # Start
//
//	claim an id range ─ make control groups ─ start the guest in all namespaces   ahead of time: a spare
//	───────────────────────────────────────────────────────────────────────────
//	set limits ─ write the record ─ clone and idmap the layers ─ launch ─ observe   at Start
//
// A spare is a guest that waits for its launch: it has no identity, no files, no template, and was
// given to nobody. It ends by itself when the server does, since its control socket closes then.
// From the moment before the launch the instance's record lies in the run directory, so that
// whatever survives a killed server can be found: adopted, or swept.
//
// # Identity of instances
//
// A process is known by boot id, pid, start time and the inode of its pid namespace together, and is
// signalled through a pidfd that was opened before these were compared. A pid alone names nobody.
package namespace
