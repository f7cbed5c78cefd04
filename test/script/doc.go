// Package script tests the whole product by scripts (txtar files run by testscript): the program as
// a person starts it, a server behind it, and several actors, an attacker among them.
//
// Scripts in testdata/any run against a scripted backend and against the real one; those in
// testdata/real need real walls. A script that defends something begins with a header of
// VULNERABILITY, ATTACK and VERIFIES.
//
// # What a script has beside testscript's own commands
//
//	casemate …          as the owner of the server, over the Unix socket
//	user …, other …     casemate as two holders of keys, over TCP
//	attacker …          casemate with a key that nobody gave out
//	stranger …          casemate without a key, over TCP
//	exits CODE ACTOR …  the command must end with that exit code
//	http ACTOR METHOD PATH [BODY]   a plain request; stdout gets status, headers and body
//	eventually ACTOR …  the command must succeed within ten seconds
//	within DURATION ACTOR …   the command must succeed within that time
//	port NAME           sets NAME to a free TCP port
//	sh SCRIPT           runs a shell script on this host
//
// What belongs here: stories over several parts. What does not: what one package's tests can show.
package script
