// Package rules decides what may leave a sandbox.
//
// It is pure: no clock, no resolver, no connection. One function, Set.Decide, judges everything that is
// known about a connection together and gives a reason. What belongs here: names and addresses in their
// one canonical form, the grammar of rules, the decision. What does not: reading a host's configuration
// (package registries) and acting on a verdict (package gateway).
//
// # Rules
//
//	[METHOD[,METHOD] ][SCHEME://]HOST[:PORTS][/PATH]
//
//	example.com                the web on that host: TLS on 443, HTTP on 80
//	*.example.com              every name below it, not itself
//	*                          every name and every public address, the web
//	example.com:8443           one port; 8000-8100 a range, * every port; whatever is spoken there
//	https://example.com/api/*  requests by path, each of which is looked at; GET,HEAD before it: by method
//	udp://192.0.2.1:123        UDP
//	10.1.0.0/16:5432           addresses; [fd00::/8]:443 IPv6
//
// Denied without a port, a host is denied whole: every port, every protocol, the lookup of its name.
// In a path, * stands for any text, and a rule without one covers exactly that path.
//
// Rules are judged in order. The first that matches decides; where none does, the answer is no.
//
// # What agrees with what
//
// A connection to a name is judged on the name, on the address that is really dialled, on the name in the
// TLS hello and on the Host header; all must agree. A rule of names allows a name whatever its addresses,
// except special ones (private, loopback, link-local, metadata, reserved, the host's own): these need a
// rule of addresses too, one that lies within the special range.
package rules
