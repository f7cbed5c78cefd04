// Package tlscert holds the certificates of the server's own TLS listeners: those of an authority
// that the server keeps for itself, and those of files that somebody gave it.
//
// What belongs here: making, keeping and choosing certificates that show who the server is. What does
// not: the authority by which a gateway opens connections that sandboxes make. That is another, with
// another key: whoever trusts this server must not have to trust what it says in the name of others.
//
// # The authority
//
// Its key lies in the keys directory, never beside the data, and only its owner may read it. Its
// certificate is limited by name constraints (RFC 5280, section 4.2.1.10) to the names and addresses
// that the server was started with, now or earlier, so that a stolen key vouches for nothing else. A
// new name gives it a new certificate for the same key: whoever trusts the old one keeps the old names.
//
// What it signs, it signs in memory: a leaf lives for 90 days, is made anew when a third of that is
// left, and is on no disk.
package tlscert
