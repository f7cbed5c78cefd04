// Package guestwire is the protocol between the server and a guest, and both its halves: framing,
// messages, and a Client for the server's side.
//
// Nothing that a guest sends is trusted: every length is bounded before it is read into memory, and
// a message that breaks the rules ends the connection. The package links little, since the guest
// links it.
//
// # Connections
//
// The server dials, the guest answers; each connection carries one call. There is no multiplexing,
// so flow control is the socket's own, and closing a connection cancels its call.
//
// # Frames
//
//	byte 0     kind
//	byte 1–3   payload length, big endian, at most MaxPayload
//	byte 4–    payload
//
//	kind        from     payload
//	FrameCall   server   Call as JSON; files travel as SCM_RIGHTS with its first byte
//	FrameReply  guest    the method's answer as JSON
//	FrameFail   guest    Failure as JSON; the last frame of a call
//	FrameData   both     bytes
//	FrameOutput guest    stream (1 byte), offset (8 bytes, big endian), bytes
//	FrameGap    guest    from, to (8 bytes each, big endian): output that was dropped
//	FrameEvent  guest    one item of a list or a watch, as JSON
//	FrameEnd    both     the last frame of a stream: a JSON value or nothing
//
// # Versions
//
// Call.Version is Version. A guest refuses a call of another version with errs.Unsupported; server
// and guest are built together, so they differ only while instances outlive an upgrade. Within one
// version fields may be added, and unknown fields are ignored.
package guestwire
