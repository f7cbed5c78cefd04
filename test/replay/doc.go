// Package replay runs ordinary commands in a sandbox and again by "casemate replay", with the real program and real walls.
//
// What belongs here: how much of ordinary work is reproduced, and that what is not is told. What does not: comparison and
// normalisers, which are tested beside them.
package replay
