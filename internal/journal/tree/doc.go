// Package tree is an append-only Merkle log in files: what was appended can be proved to be in it, and
// that nothing was changed, removed or put in between, by whoever holds one of its signed checkpoints.
//
// What belongs here: leaves, hashes, tiles, checkpoints, proofs, and how they become durable. What does
// not: what a leaf stands for; package journal makes them of events.
//
// # Files
//
//	leaves          one record of 72 bytes for each leaf: its hash (32), the stream that it belongs to
//	                (28, zero padded), its counter there (8, big endian), CRC-32C of these (4)
//	tile/L/N        hashes as in C2SP's tlog-tiles (https://c2sp.org/tlog-tiles), 256 to a tile, the newest
//	                ones partial (tile/L/N.p/W)
//	checkpoint      the newest published checkpoint (https://c2sp.org/tlog-checkpoint), a signed note
//	                (https://c2sp.org/signed-note) with Ed25519
//
// The leaves are the truth; tiles are made of them again where they are missing or torn. The entries
// themselves (tile/entries) are not published: they belong to the sandboxes' owners.
//
// # Durability
//
// A checkpoint that Checkpoint returns covers leaves that survive the death of the process: they were
// written with write(2) before it was signed. They are flushed to disk within Config.SyncEvery, so a
// power loss takes at most what was appended in that time. Tiles and the checkpoint file follow within
// Config.PublishEvery.
package tree
