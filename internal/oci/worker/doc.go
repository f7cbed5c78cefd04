// Package worker unpacks an image's layer in a process of its own that can do nothing else.
//
// Archives come from anywhere, and so do the bytes that decompressors read. The process (this very program, with
// the argument Verb) lives in namespaces of its own, user namespace included: its root is an id range of the host
// that nothing else uses. It is given the layer to read and one directory, a detached mount whose ids are mapped
// into that range, as its root directory; it has no network, no other file, no process to see. Then it gives up
// every right but those over the owners of that directory's files, and all system calls but those that unpacking
// needs. What it reports is checked by whoever asked.
//
// What belongs here: starting that process, its walls, and the messages between. What does not: what an archive
// means (package layer).
package worker
