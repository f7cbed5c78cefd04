// Package secret keeps values that must not enter a sandbox: encrypted at rest, versioned, bound to
// the hosts and headers that they are for, and shown to a sandbox only as a placeholder.
//
// A Vault holds them. A Value is one in memory; it can't print itself, whatever prints it. A Binding
// says for which sandboxes a secret is, for which hosts, and where in a request it stands. What a
// sandbox may use is a list of Credentials; package egress puts them on requests.
//
// What belongs here: sealing, versions, sources, placeholders, and deciding from values alone which
// sandbox gets which credential. What does not: requests and connections, which are package
// egress's; who a caller is, which package policy finds out.
//
// # At rest
//
// Each value is encrypted with a key of its own (AES-256-GCM), and that key with the master key,
// which does not lie in the data directory. Both carry the secret's id and version as associated data, so that
// a row that was moved to another place does not open.
package secret
