// Package walls tests what keeps sandboxes in, on the real backend and the real store: the attack
// battery from inside, the posture of their processes from outside, and attacks that need a hand on
// the host.
//
// What belongs here: tests of all walls together. What does not: tests of one of them, which stand
// beside it.
package walls
