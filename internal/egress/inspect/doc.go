// Package inspect looks into TLS and HTTP for the gateway: it judges each request, puts credentials on
// where a binding says so, takes them out of responses, and answers for model routes.
//
// # The way of a request
//
//	client ──► TLS with a certificate of ours ──► one parser ──► Host = name connected to?
//	       ──► rules ──► placeholder → value, in the bound place only ──► written anew, to the
//	           server whose certificate was verified ──► response, value taken out ──► client
//
// Requests are read by one strict parser and written anew from what it understood, so that the server
// can't see another request than the one that was judged. Bodies stream; nothing waits for their end.
//
// It runs in the gateway's process: it has no files and no rights, and only the secrets of the sandboxes
// there. Everything comes from the server through Shared and Part.
//
// # What is taken out of responses
//
// The values that are bound to the host, as they are and as JSON, URLs and Base64 write them, become
// asterisks, as many as bytes, so that lengths and ranges stay right. That holds for headers, trailers
// and bodies without an encoding or with gzip, and within a message of a WebSocket. A host that wants to tell a
// secret can write it in a way that nobody recognises: it is a guard against hosts that echo, not against
// hosts that collude.
//
// What belongs here: TLS and HTTP. What does not: what may be reached, which package rules decides, and
// which sandbox may use what, which package secret decides.
package inspect
