// Package cli is the casemate command: one file per verb.
//
// A verb parses flags, calls package client and prints. What does not belong here: anything that
// a program using package client could not do too. Only serve and up reach package server, and the
// verbs that touch files of this host (cp, apply, up, down) do so as the person who runs them.
//
// # What a person sees
//
// Results go to stdout, all else to stderr: progress, hints, warnings. An error is one line,
// "casemate: cannot <verb> <object>: <reason>", then "hint: …" where there is something to do.
// With --json stdout holds JSON and nothing else. Text that came out of a sandbox is shown with its
// control characters escaped, unless it is the output of a process that was asked for.
package cli
