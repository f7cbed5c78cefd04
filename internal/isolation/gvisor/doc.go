// Package gvisor keeps sandboxes apart with a kernel of their own: gVisor's runsc, whose system calls never
// reach the host's.
//
// What belongs here: how runsc is started, and told what to do. What does not: ids, namespaces, layers, control groups and network devices of the cell around it
// (the backend of cells that Config names), and what the guest does inside.
//
// # Two walls
//
//	host kernel
//	└─ cell: an own range of unprivileged ids, all namespaces, limits, the layers as its root   outer wall
//	   ├─ PID 1: the guest's program; keeps runsc, hands connections on
//	   ├─ gofer: opens the root's files for the Sentry
//	   └─ Sentry: gVisor's kernel, behind a seccomp filter of its own                           inner wall
//	      └─ the guest, and the sandbox's processes
//
// Everything of runsc runs inside the cell, the command line included: no process of it is root of the host
// at any time. What breaks out of the Sentry stands where a sandbox of isolation namespace stands.
//
// # The guest's connections
//
// runsc can't serve a socket that listens on the host, so PID 1 of the cell listens, and hands each
// connection's descriptor on to the guest inside, over a socket that it was started with.
//
// # Talking to runsc
//
// Only by its command line, once, inside the cell, and by its control socket (pause and resume), which lies in the
// cell's own file system. What it says there is believed no more than what the sandbox says.
package gvisor
