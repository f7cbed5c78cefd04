// Package template builds what sandboxes start from, by steps or from a Dockerfile, without a container
// engine: each step that changes files runs in a sandbox of its own, which is committed and thrown away.
//
// What belongs here: what a build is, reading Dockerfiles, running and caching steps, what a build is made of
// (lock files), and what two builds differ in. What does not: running anything outside a sandbox, which only
// package sandbox does; layers, which are package rootfs's; wire protocols.
//
// # A build
//
// A Request says where to begin and what to do. Builder.Start records it and returns; the build runs in the
// background, whoever asked for it may leave. Builder.Get tells its state, Builder.Logs its log by offsets,
// Builder.Follow both as they come, Builder.Cancel ends it.
//
//	queued ──► building ──► ready
//	              ├───────► failed     Reason says why, and at which step
//	              └───────► canceled
//
// What comes of a build is a commit (package sandbox) whose spec carries environment, user, directory, limits,
// service and image configuration. It is tagged with the template's name, so that whoever creates a sandbox
// names it like any template.
//
// # Steps and their cache
//
// A step that changes files is known by a key: a digest of the key before it and of all that decides what the
// step gives: its command, environment and user, the rules of its network, the contents of the files that it
// copies. Its commit is kept under that key (table build_steps), for its owner alone. A build that meets a
// known key takes the commit and runs nothing. So a build that was cut short, by an error, a cancel or
// the death of the server, goes on where it ended when it is asked for again.
//
// # Lock files
//
// A Lock says what a build came to. A later build that is given it (Request.Locked) makes its RUN steps take the
// versions of pip's and dpkg's packages that they brought then, and fails where the result is another all the same.
// What was made with pins is kept under a key of its own.
//
// # Trust
//
// Dockerfiles, contexts and what programs print are input from outside. Contexts are never unpacked on the
// host: they are kept as archives with an index, and only the guest, inside the step's sandbox, writes their
// files. What is read of a build's result (packages, digests) is read as bytes; no code of it runs on the host.
package template
