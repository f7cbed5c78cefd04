// Package state keeps what agents must not lose with a sandbox: named documents, JSON or bytes, each with all
// its versions, outside every sandbox.
//
// A document belongs to an agent, and an agent to the principal who wrote its first document. Versions of a
// document are numbered 1, 2, 3 …; to delete it makes a version too. Each write also gets the agent's next
// revision, over all of its documents, and that is what a watch goes on from. A write may name the version that it
// replaces, and a commit and a sandbox that it belongs to.
//
// What belongs here: names, versions, compare-and-set, patches, watching, how much history is kept. What does not:
// how a row is written (package store), commits themselves (package sandbox), and what a document means.
//
// # Guarantees
//
// A write that was answered is on disk. Versions have no holes except where Keep's settings took the oldest, and a
// watch sends every version that is kept, in the order of revisions, whatever the server did in between; where some
// are gone it says so first.
package state
