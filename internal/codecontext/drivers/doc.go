// Package drivers holds the programs that run inside a sandbox and keep a language's interpreter alive
// between runs: the drivers of code contexts.
//
// What belongs here: the drivers' texts, how each is started, and tests that run them as the guest does.
// What does not: who starts them, when, and what becomes of what they say (package codecontext and the
// guest).
//
// # Seam
//
// A context is one driver process. Descriptor 0 is /dev/null; 1 and 2 are pipes that the guest reads; 3 is
// one end of a stream socket pair, the control socket; 4 is a file with the driver's text, which it reads by
// pread. The driver moves 3 out of the way of code, close-on-exec, and closes 4.
//
// Messages are JSON objects, one a line, at most MessageLimit bytes, both ways; what a driver sends is
// ASCII. The guest sends
//
//	{"op":"run","id":R,"code":C,"silent":false,"env":{}}  run C; env holds for this run only
//	{"op":"run","id":R,"file":true,…}  run what is in the file, for drivers that have one on descriptor 5
//
// and SIGINT to the driver's process interrupts: each one once, and none between runs. A driver that answers
// interrupts, as it says when it is ready ("answers_interrupts":true), sends {"ev":"interrupted","id":R} for each; one
// that is not answered may be sent again. The end of the
// control socket ends the driver. It sends
//
//	{"ev":"ready","language":"python","version":"3.11.2","ipython":true,"pid":7}
//	{"ev":"result","id":R,"main":true,"data":{"text/plain":"2"},"metadata":{}}
//	{"ev":"error","id":R,"name":"NameError","value":"name 'x' is not defined","traceback":"…"}
//	{"ev":"end","id":R,"count":1}
//
// A run's end comes last, also after an error, and there is one error a run at most. Keys of data are MIME types,
// "chart" (the data of a chart, in the form that E2B's clients know) and "dataframe" (a table's values by
// column). A driver writes everything that it holds to 1 and 2 before each of these messages, so that
// whoever drains both pipes when a message comes sees output and results in order.
//
// Nothing that a driver says can be trusted: it shares a process, or at least a user, with the code that
// it serves, and that code can write to the same socket. The guest bounds every line and takes no message
// for more than the word of the context that it came from.
//
// # Fresh runs
//
// A Python driver becomes a zygote by {"op":"zygote","imports":["numpy"]}, which it answers by
// {"ev":"zygote","failed":{},"pid":P}. It runs no code from then on. {"op":"fork","slots":[N,M]}, sent with
// three descriptors for each slot (a control socket, a stdout, a stderr), forks children, each of which says
// {"ev":"ready"} on its own control socket and waits for one run; the zygote says
// {"ev":"forked","slot":N,"pids":[P,Q]}, with fewer pids and "error" where it could not fork all. So the guest
// can put the children into scopes of their own before they get any code. With "place":true a fourth descriptor
// comes along, to which the child writes "0" before it is ready: that puts it there, and the guest looks
// whether it did. After the run a child leaves by itself.
// {"op":"reap","slot":N} waits for its end and is answered by {"ev":"reaped","slot":N,"pid":P,"code":0} or
// "signal"; until then the pid can't be anybody else's. "forget":[N], in an order of any kind, does that for
// several and is not answered. A child has its own random numbers, but the
// zygote's seed of hash(): no fork can change that one.
//
// # Other kernels
//
// A Jupyter kernel needs nothing new in the guest: a bridge is one more driver, a program that speaks the messages above
// on descriptor 3 and Jupyter's protocol to the kernel that it starts. Find would name it.
package drivers
