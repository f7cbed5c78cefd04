// Package replay compares what processes did with what they did when they were run again: it reads sandboxes' records, says
// which processes can be run again and from where, and judges what came of it. It runs nothing itself.
//
// What belongs here: records as processes with what went in and came out, the plan of a replay, comparison, and the
// normalisers, which say that two texts differ in a way that every two runs do. What does not: making sandboxes and running
// processes in them, which the command line does; proofs of a record, which package bundle checks.
//
// All evidence is in records: those of the sandboxes in which processes are run again are made by the server as any other.
// So a verdict can be found again, offline, from the bundles alone.
package replay
