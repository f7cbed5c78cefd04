// Package store keeps the server's state in one SQLite file: sandboxes, processes, events,
// idempotency keys, API keys and settings, one file of this package for each.
//
// What belongs here: rows as plain data, the statements that read and write them, and how they
// become durable. What does not: what a row means; its body is JSON that the owning package reads.
//
// # Writing
//
// All writes go through one connection. Callers queue theirs; whoever comes first becomes the leader
// and commits everything that has queued up meanwhile in one transaction, in the order of the
// queue. So a lone caller pays one short transaction and no goroutine switch, and many callers share
// one.
//
// A change that must survive a kill but needs no answer from the database is cheaper still: see
// Change.Spool.
//
// # Durability
//
// What Write has acknowledged survives the death of the process: it lies in the kernel's page cache.
// A power loss takes at most what happened within FlushEvery and SyncEvery together: SQLite runs with
// synchronous=NORMAL, which does not flush at a commit, and a goroutine of ours flushes the
// write-ahead log instead (a WAL frame is valid by its checksums alone, so that flushing the -wal
// file from outside makes every commit in it durable; https://www.sqlite.org/walformat.html). A
// write that is marked Synced is flushed before it is acknowledged.
package store
