// Package network tests the way out of real sandboxes: a server with its gateway process, and a fake
// internet (package testenv/world) around them.
//
// What belongs here: what takes a server, a gateway process and sandboxes together. What does not: the
// gateway alone, whose tests stand beside it.
package network
