// Package policy says who asks, and what they may do: principals, API keys and pure decisions.
//
// What belongs here: turning a secret into a sandbox.Principal, and deciding from values alone
// whether a principal may use a kind of access. What does not: looking up sandboxes, which package
// sandbox does with the principal it is given.
package policy
