// Package bench measures Casemate through its API, beside what else starts a program on the same
// machine in the same minute: plain fork and exec, bubblewrap, runc, and docker and runsc where they
// are there.
//
// What belongs here: rows of docs/architecture.md's budgets that a server's user would notice. What
// does not: benchmarks of one package, which stand beside it.
//
// # The floor
//
// Nothing can start a process faster than the kernel does. The floor is vfork and exec of /bin/true
// from a small C program (floor/floor.c, compiled when the bench runs), in 1, 2 and 8 processes, the best
// of three rounds; beside single calls of process-true, whose turns alternate with the floor's, all rounds of both
// count, since a tail is made by the bad moments of the machine as well. Where there is no C compiler a Go program's fork and exec stands in, and the
// report says so: it is slower, and so a softer measure.
//
// Between that floor and a process over HTTP lie two hand-overs to another process and back, and what net/http
// takes on both sides. How much that is at the least, "bare HTTP" shows (bare.go): a server of net/http that
// passes one byte on to the floor's program, and a client that does nothing but write the request and read
// the answer. No sandbox, nothing checked, nothing recorded: what a server in Go can't get below.
//
// And the kernel takes longer for a process behind walls than for one outside. How much, "fork+exec inside" shows
// (inside.go): the floor's program in a sandbox, which starts its processes there without Casemate.
package bench
