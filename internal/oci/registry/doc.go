// Package registry talks to image registries (OCI distribution-spec) on the server's own behalf.
//
// What belongs here: names of images, whom credentials may reach, what may be connected to, manifests, and blobs that
// arrive whole or not at all. What does not: what is in an image.
//
// # Whom credentials reach
//
// Credentials go to the registry that they were given for, over TLS that proves its name, and to the token service that
// it names where that is the same host or one below the same registrable domain: else a registry could have them
// sent anywhere. Where a registry sends a client on to fetch a blob, no credentials go along. What is neither the
// registry itself nor named as insecure must have an ordinary address: a registry can't make the server ask
// the machine's own services or a cloud's metadata. TLS is left out for hosts that are named as insecure, and
// for no others; a loopback address is no exception.
//
// # Blobs
//
// A blob is written to a file of its own, which goes on growing where a connection broke, or a server ended,
// and gets its name once its digest is right.
package registry
