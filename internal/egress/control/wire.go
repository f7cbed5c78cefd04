// Package control is how the server and the gateway process talk, and the server's side of it: starting the
// process, keeping it, telling it who may do what, and taking its events.
//
// # Wire
//
// The gateway listens on a Unix socket in the server's run directory and takes calls from the server's user
// alone. A connection carries one call after the other: a request, and its reply. Each message is its length
// (4 bytes, big endian) and JSON; a device's descriptor travels with the first byte of the request that
// brings it. The socket's path and the listening descriptor outlive the server, which dials in again.
//
// What belongs here: messages, and the server's side. What does not: what the gateway does about a call
// (package gateway).
package control

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/egress"
	"casemate.dev/internal/egress/proxy"
	"casemate.dev/internal/errs"
)

// Protocol is the version of what follows. A server ends a gateway that speaks another one.
const Protocol = 5

// maxMessage bounds a message.
const maxMessage = 16 << 20

// Op names a call.
type Op string

// The calls.
const (
	OpHello     Op = "hello"     // Shared, Proxy → Protocol, Sandboxes
	OpAttach    Op = "attach"    // Sandbox, Policy, a descriptor
	OpConfigure Op = "configure" // Sandbox, Policy
	OpDetach    Op = "detach"    // Sandbox
	OpRefused   Op = "refused"   // Sandbox, Since → Refusals
	OpUsage     Op = "usage"     // Sandbox → Usage
	OpEvents    Op = "events"    // After → Events, Last; waits until there are some
	OpStats     Op = "stats"     // → Stats
	OpAnswers   Op = "answers"   // Sandbox, Answers, More
	OpWaiting   Op = "waiting"   // Sandbox, of which nothing is summed up any longer → Last: the last event that waits for the server; 0: none does
	OpExit      Op = "exit"      // ends the process
)

// Request is one call.
type Request struct {
	Op      Op             `json:"op"`
	Sandbox string         `json:"sandbox,omitempty"`
	Policy  *egress.Policy `json:"policy,omitempty"`
	Shared  egress.Private `json:"shared,omitempty"`
	Proxy   *proxy.Proxy   `json:"proxy,omitempty"`
	Since   time.Time      `json:"since,omitzero"`
	After   uint64         `json:"after,omitempty"`
	// Answers of a record, in place of those before, or with More behind them.
	Answers []egress.RecordedAnswer `json:"answers,omitempty"`
	More    bool                    `json:"more,omitempty"`
}

// Reply is its answer.
type Reply struct {
	// Code and Error are set where the call failed: an error kind and its public text.
	Code  string `json:"code,omitempty"`
	Error string `json:"error,omitempty"`

	Protocol  int              `json:"protocol,omitempty"`
	Sandboxes []string         `json:"sandboxes,omitempty"`
	Refusals  []egress.Refusal `json:"refusals,omitempty"`
	Events    []egress.Event   `json:"events,omitempty"`
	Last      uint64           `json:"last,omitempty"`
	Usage     *egress.Usage    `json:"usage,omitempty"`
	Stats     *egress.Stats    `json:"stats,omitempty"`
}

// Err returns the error that a reply carries.
func (r *Reply) Err() error {
	if r.Code == "" {
		return nil
	}
	kind, _ := errs.FromCode(r.Code)
	return errs.New(kind, "%s", r.Error)
}

// Fail makes the reply of a call that failed.
func Fail(err error) *Reply {
	text, _ := errs.PublicText(err)
	return &Reply{Code: errs.KindOf(err).String(), Error: text}
}

// Write sends a message, with a file where f is not nil.
func Write(c *net.UnixConn, v any, f *os.File) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode message: %w", err)
	}
	if len(b) > maxMessage {
		return errs.New(errs.InvalidArgument, "the message has %d bytes, and %d are possible", len(b), maxMessage)
	}
	out := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(b)), uint32(len(b)))
	out = append(out, b...)
	if f == nil {
		_, err = c.Write(out)
		return err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	n := 0
	// Not by f.Fd, which would let the device wait, for the gateway too: that is one property of both ends.
	cerr := raw.Control(func(fd uintptr) { n, _, err = c.WriteMsgUnix(out, unix.UnixRights(int(fd)), nil) })
	if err = errors.Join(err, cerr); err == nil && n < len(out) {
		_, err = c.Write(out[n:])
	}
	return err
}

// Read receives a message, and the file that came with it or nil.
func Read(c *net.UnixConn, v any) (*os.File, error) {
	var head [4]byte
	oob := make([]byte, unix.CmsgSpace(4*4))
	n, oobn, _, _, err := c.ReadMsgUnix(head[:], oob)
	if err == nil && n == 0 {
		err = io.EOF
	}
	if err != nil {
		return nil, err
	}
	f, err := fileOf(oob[:oobn])
	if err != nil {
		return nil, err
	}
	if _, err = io.ReadFull(c, head[n:]); err == nil {
		err = readBody(c, binary.BigEndian.Uint32(head[:]), v)
	}
	if err != nil && f != nil {
		_ = f.Close()
		f = nil
	}
	return f, err
}

func readBody(c *net.UnixConn, n uint32, v any) error {
	if n > maxMessage {
		return fmt.Errorf("a message of %d bytes", n)
	}
	b := make([]byte, n)
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("decode message: %w", err)
	}
	return nil
}

// fileOf takes the one descriptor out of a control message; more are closed.
func fileOf(oob []byte) (*os.File, error) {
	if len(oob) == 0 {
		return nil, nil
	}
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, os.NewSyscallError("recvmsg", err)
	}
	var fds []int
	for i := range list {
		more, err := unix.ParseUnixRights(&list[i])
		if err == nil {
			fds = append(fds, more...)
		}
	}
	for _, fd := range fds {
		unix.CloseOnExec(fd)
	}
	if len(fds) != 1 {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return nil, errors.New("a message brings more than one file")
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fds[0]), "device"), nil
}
