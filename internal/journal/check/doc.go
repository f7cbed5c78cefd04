// Package check holds a sandbox's record against rules: what may have changed, who may have been reached, what must
// have been run.
//
// What belongs here: reading rules, what a record must hold to answer each, and the verdicts. What does not: where
// events come from (the server, or a bundle that was verified), and how verdicts show.
//
// A rule passes or fails on evidence alone, which it names by the events' counters. Where the record can't answer, since
// what is asked for was not recorded, or something is missing that could answer otherwise, the verdict is Undecided and
// says why; it is never a pass.
package check
