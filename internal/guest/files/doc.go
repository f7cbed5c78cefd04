// Package files is the worker that touches a sandbox's files: the guest's own program, started anew
// as the asking user and under that user's walls, with one socket and nothing else open.
//
// What belongs here: what a file request does. What does not: who may ask (package guest), and
// anything done with the privileges of PID 1.
//
// # Paths
//
// A path is resolved by the kernel as the user's own programs would resolve it, with one exception:
// no magic link is followed (package resolve). "~" is the user's home; a relative path starts at the
// request's directory. In FileInfo the path is as it was asked for, made absolute and tidy. A worker of
// root gives what it makes to the job's owner, for whom it acts.
//
// Only regular files are read and written, and what a path names is looked at before it is opened:
// a FIFO or a device never blocks the worker and notices nothing.
//
// # Writing
//
// A file is replaced by a temporary one in the same directory, renamed when all bytes are there: it
// is seen whole or not at all, and a broken upload leaves nothing. The new file keeps the mode of
// the old one, and its owner where the user may give files to others; it is a new inode, so hard
// links keep the old contents. A file that the user may not write is not replaced, though renaming
// would do it. There is no fsync: a sandbox does not outlive its host.
package files
