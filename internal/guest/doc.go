// Package guest is the first process of a sandbox once it stands: it starts and ends processes, keeps
// their output, serves files, watches and ports, and reaps. The server asks over package guestwire.
//
// What belongs here: what must happen inside, in PID 1. What does not: building the sandbox
// (guest/launch), putting walls on processes (guest/spawn), and touching files, which a worker does
// under the asking user's walls (guest/files).
//
// # Trust
//
// PID 1 stands above everything that runs inside, and everything inside is hostile to it. It holds no
// secret and no descriptor of a host directory; it reads /etc/passwd, checks that a working directory
// is one, and otherwise resolves no path. The server is believed: only it can reach the socket.
//
// # Processes
//
// A process has the id that the caller gave it; starting an id that exists attaches to it, so a
// repeated call starts nothing twice. It leads a session of its own. Its end is what the kernel said,
// or lost: no exit code is made up.
//
// Output is complete once every writer has closed it. A child that keeps the pipe open does not hold
// the caller up: after the first process has ended, output also counts as complete once there was none
// for quietGrace, or after lateGrace in all. What such a child prints later still lands in the buffer.
//
// A timeout sends SIGTERM to the whole tree, and SIGKILL after the grace, or at once to what is left
// when the first process has ended; also to what called setsid, by the scope's control group.
// Without a scope the tree is found by parentage, session and a mark in the environment, which a
// process that means to can shake off: only for backends that can't have better.
//
// # What is kept
//
// Running processes are kept, and of ended ones the last guestwire.MaxKept with their end; their output as
// long as the pool has room, oldest end dropped first. So a server that was restarted finds all of it.
package guest
