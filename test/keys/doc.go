// Package keys attacks, from inside sandboxes of a real server, the promise that no key ever enters one: it
// looks for values in all that a sandbox can see, and tries to have them sent where they do not belong.
//
// The internet is a fake one (package world). What belongs here: attacks and stories over the whole product, each
// with a twin that shows that it could succeed. What does not: what package inspect's tests show of one part.
package keys
