// Package output keeps what processes print: for each a bounded buffer of the first and the last
// bytes, readable from any offset by any number of readers, during and after the run.
//
// What belongs here: bytes, offsets, memory. What does not: pipes, frames, processes.
//
// # Memory
//
// A Pool bounds all buffers of a guest together. When it is full, the output of processes that ended
// goes first, oldest end first; then the oldest bytes of whatever buffer is largest. So neither 2 GB
// of output nor 500 talkative processes make the guest grow.
//
// # Offsets
//
// One offset counts the bytes of all streams of a process in the order they were read. What was
// dropped leaves a gap, which every reader is told about: bytes are missing only where a gap says so.
//
// # Waiting
//
// A writer waits for nobody, with one exception: a reader that asked to lose nothing (Hold) makes it
// wait rather than drop what that reader has not taken yet. A reader that takes nothing for
// guestwire.StallLimit loses that right, so that a dead client can't stop a process for ever.
package output
