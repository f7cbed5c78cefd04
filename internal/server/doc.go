// Package server builds a Casemate server from its parts, in one commented order, and runs it.
//
// What belongs here: order. Directories and locks, which part is opened before which, listeners,
// draining and the way down. What does not: anything a part decides for itself.
//
// # Directories
//
//	data dir   what must survive: database, layers, templates. Mode 0700, locked by one server.
//	run dir    what lives as long as the machine is up: sockets, records of running instances. Locked.
//	keys dir   secrets that must not lie beside the data: the first API key. Mode 0700.
//
// Several servers on one host each need their own three. Everything else that they leave on the host
// (control groups, id claims, loop devices) carries the server's id, which is stored in the data
// directory.
package server
