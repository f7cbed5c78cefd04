// Package clients runs programs that people use, unmodified and without a proxy variable, in a sandbox of a real
// server: pip, npm, git, curl, Node.js, Python's HTTP libraries, Go, sockets, and the SDKs of model providers.
//
// What belongs here: whether a client gets through where the rules say so, is refused where they do not, and
// trusts what it is shown. What does not: attacks, which are in package keys.
package clients
