// Package meter tells what a sandbox used from its recorded events, and from nothing else: whoever has the events, from the
// server or out of a bundle, comes to the same figures, so that a bill and the record can't disagree.
//
// What belongs here: which events count, and what each adds to which figure. What does not: measuring, which happens where
// the events are recorded (package sandbox), and prices.
//
// # What counts when
//
// A period is from Since up to before Until. Time is cut at its borders. What was measured between two moments, and the bytes
// of a connection, belong to the moment at which they were recorded. So periods that follow on one another add up to the
// period that they make together, to the last unit.
//
// # Execution
//
// It is executing from the start of a process or of a run of code to its end, unless it is paused meanwhile; at any moment it
// does or does not, however many there are. What has no end yet counts up to the last event by which the server shows
// that it was there to see it; so does what nobody saw end.
package meter
