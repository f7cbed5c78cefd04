// Package guestwire is the protocol between the server and a guest, and both its halves: framing,
// messages, and a Client for the server's side.
//
// What belongs here: what crosses that one socket. What does not: what a guest does about a call
// (package guest), and how the socket comes to be (isolation backends).
//
// Nothing that a guest sends is trusted: every length is bounded before it is read into memory, and
// a message that breaks the rules ends the connection with a ProtocolError. The package links
// little, since the guest links it.
//
// # Connections
//
// The server dials, the guest answers; a connection carries one call at a time. There is no
// multiplexing, so flow control is the socket's own, and closing a connection cancels its call. Calls
// that start a process are the exception: the process goes on, and only the answer is lost; the same
// id attaches again.
//
// Most calls have a connection of their own. One that says so (Call.Keep) leaves its connection open
// for another such call once its last frame was read; whatever else happens, an error or a caller who
// leaves, ends the connection.
//
// # Frames
//
//	byte 0     kind
//	byte 1–3   payload length, big endian, at most the kind's bound
//	byte 4–    payload
//
//	kind           from     bound       payload
//	FrameCall   1  server   MaxPayload  length (2 bytes, big endian) of the Call as JSON, that, then its body as
//	                                    JSON; files travel as SCM_RIGHTS with the first byte
//	FrameReply  2  guest    MaxPayload  the method's answer as JSON
//	FrameFail   3  guest    MaxFailure  Failure as JSON; the last frame of a call
//	FrameData   4  both     MaxPayload  bytes
//	FrameOutput 5  guest    MaxPayload  stream (1 byte), offset (8 bytes, big endian), bytes
//	FrameGap    6  guest    16          from, to (8 bytes each, big endian): output that was dropped
//	FrameEvent  7  guest    MaxControl  one item of a list or a watch, as JSON
//	FrameEnd    8  both     MaxControl  the last frame of a stream: a JSON value or nothing
//	FrameItem   9  guest    MaxPayload  kind (1 byte), 1 if it goes on in the next frame else 0 (1 byte),
//	                                    number (8 bytes, big endian), bytes: what a run of code said
//
// # Text
//
// JSON strings are UTF-8, but names and arguments in a sandbox are bytes. Where a field holds a
// path, an argument or an environment value, each byte that is not part of valid UTF-8 travels as
// U+0000 followed by its two hexadecimal digits: NUL can't occur in any of these, so the escape is
// free of conflicts, and ordinary text is unchanged. Escape and Unescape convert.
//
// # Versions
//
// Call.Version is Version. A guest refuses a call of another version with errs.Unsupported; server
// and guest are built together, so they differ only while instances outlive an upgrade. Within one
// version fields may be added, and unknown fields are ignored.
package guestwire
