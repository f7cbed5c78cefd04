// Package contexts keeps code contexts: interpreters that go on between runs, each a driver process
// that package guest starts like any other process.
//
// What belongs here: the queue of a context, the protocol with its driver, what a run said, and ends.
// What does not: starting processes and killing their trees (package guest hands that in as a Launcher),
// and languages, which come with the request: the guest knows none.
//
// # The driver's protocol
//
// A driver reads and writes lines of JSON on its descriptor 3, finds its source on descriptor 4, and
// prints on 1 and 2. One run is with it at a time.
//
//	guest → driver   {"op":"run","id":R,"code":"…","env":{…}}
//	driver → guest   {"ev":"ready","language":"python","version":"3.11.2"}
//	                 {"ev":"result","id":R,…}   {"ev":"error","id":R,"name":…,"value":…,"traceback":…}
//	                 {"ev":"interrupted","id":R}        {"ev":"end","id":R,"count":N}
//
// The code that runs in a driver can write to all of its descriptors. So nothing that a driver says is
// believed beyond its own runs: lines are bounded, what is malformed or about another run is dropped,
// and a result is passed on as it is, for the server to check.
//
// # Order
//
// A driver flushes its output before each line. The guest, on each line, first takes what is in both
// pipes, so that output and results keep the order in which they were made.
//
// # Interrupts
//
// An interrupt is SIGINT. It is sent under the context's lock and only while the run that is meant
// executes by the guest's count; the next run is handed over only after its end was read. So it can hit
// a driver between two runs, which then ignores it, but never a later run. A driver that says
// "answers_interrupts" when it is ready tells of each one that has come; one that it does not tell of is sent again.
package contexts
