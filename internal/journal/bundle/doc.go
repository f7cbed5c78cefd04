// Package bundle is the form in which a sandbox's record leaves the server, and the check of it that needs
// nothing else: no server, no network.
//
// What belongs here: the lines of a bundle, writing and reading them, and what can be concluded from them.
// What does not: where events come from; package journal exports them.
//
// # Format
//
// One JSON object a line, written in one way only, in this order:
//
//	{"bundle":{"version":1,"origin":O,"sandbox":S,"key":K}}   K: the log's public key (C2SP signed note)
//	{"checkpoint":NOTE}                                        the log that the proofs below are of
//	{"head":NOTE,"proof":[H…]}                                 any number: an older checkpoint, and the proof
//	                                                           that the log began with it (RFC 6962)
//	{"event":E,"leaf":I,"proof":[H…]}                          each event in the order of its counter, as its
//	                                                           leaf holds it, and the proof that it does
//	{"lost":{"seq":N,"hash":H},"leaf":I,"proof":[H…]}          in the place of one that the server has lost
//	{"body":{"seq":N,"name":"server.argv","salt":B,"data":B}}  behind the event that speaks of it; one that is
//	                                                           not there was erased, or left out
//	{"seal":NOTE}                                              what the server signed for: see Seal
//
// Hashes and bytes are base64. Who passes a bundle on may leave bodies out; whatever else is changed shows.
package bundle
