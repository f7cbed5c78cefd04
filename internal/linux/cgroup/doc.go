// Package cgroup holds the control groups of sandboxes: it creates, limits, measures, freezes,
// kills and removes them, on v1, hybrid and v2 hierarchies alike.
//
// What belongs here: the kernel's control group files. What does not: which limits a sandbox gets
// (package sandbox), and how a process comes into a group (package guest/spawn writes the files that
// this package opens).
//
// # Layout
//
// Everything lies below one directory per server, casemate-<serverid>, at the root of each hierarchy
// where that is writable, else below the server's own group. On v1, in each controller:
//
//	memory, pids   <sandbox>/{guest,payload}   siblings, so that a payload that eats its limit leaves the guest its reserve
//	cpu            <sandbox>/payload           the guest sits in <sandbox>, whose quota is the payload's plus a reserve
//	cpuacct        <sandbox>                   only for reading
//	freezer        <sandbox>/payload/<scope>   the guest sits in <sandbox>; one scope per process
//	devices        (the server's directory)    its allow list holds for every sandbox, so none has a group of its own
//
// On v2 there is one tree, <sandbox>/{guest,payload/<scope>}.
//
// # Getting in
//
// A process that is born in its group costs nothing; moving a running one takes a lock of all of
// fork and exec, and up to 10 ms in the tail. So InGuest starts the guest inside its groups, and on
// v1 a spawner thread of the guest writes "0" into PayloadFiles once and into a scope's "tasks"
// before each fork: a thread that moves itself takes no global lock (kernel commit 9a3284fad42f).
// A child belongs to the groups of the thread that forked it. Memory is charged to the group of the
// process's leader, so spawner threads charge the guest, and their children the payload.
package cgroup
