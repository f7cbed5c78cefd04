// Package selftest is the attack battery: what code in a sandbox tries in order to get out, to see
// what is not its own, or to take what belongs to others, and what must come of it.
//
// What belongs here: attacks that are safe to try in a real sandbox on a machine that people use,
// each with what is expected per profile, as data. What does not: checks that need a hand on the
// host; those are tests beside the code that they check.
//
// # Cases
//
// A Case is a script for the sandbox and a Want per profile. Scripts look, and never write where a
// hole would let them change the host: files of /proc and /sys are probed with "test -w", calls get
// arguments that fail after the permission check. So a case that comes out wrong has harmed nothing.
//
// # Twins
//
// A case that can't fail proves nothing. Each names a twin: a deliberately weak sandbox in which the
// same script must come out wrong. The package's tests build these and check it.
package selftest
