package watch

import "google.golang.org/protobuf/encoding/protowire"

// field is one field of a message: a number, or bytes.
type field struct {
	number protowire.Number
	value  uint64
	bytes  []byte
}

// walk goes through a message. It ends where the message does, or where it was cut or is none: what comes before counts.
func walk(message []byte, each func(field)) {
	for len(message) > 0 {
		num, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return
		}
		message = message[n:]
		f := field{number: num}
		switch kind {
		case protowire.VarintType:
			f.value, n = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			f.bytes, n = protowire.ConsumeBytes(message)
		default:
			n = protowire.ConsumeFieldValue(num, kind, message)
		}
		if n < 0 {
			return
		}
		message = message[n:]
		each(f)
	}
}

// fields reads a message: what all have in common, of which the system call's number has the given field, and with rest
// what they have not.
func (r *record) fields(message []byte, number protowire.Number, rest func(field)) {
	walk(message, func(f field) {
		switch f.number {
		case 1:
			walk(f.bytes, r.contextField)
		case 2:
			r.exit = true
			walk(f.bytes, func(f field) {
				if f.number == 2 {
					r.errno = int64(f.value)
				}
			})
		case number:
			r.number = f.value
		default:
			rest(f)
		}
	})
}

// contextField reads a field of ContextData.
func (r *record) contextField(f field) {
	switch f.number {
	case 2:
		r.thread = int32(f.value)
	case 4:
		r.group = int32(f.value)
	case 9:
		r.command = bounded(f.bytes, maxCommand)
	}
}

// rawField reads an argument of Syscall.
func (r *record) rawField(f field) {
	if i := int(f.number) - 5; i >= 0 && i < len(r.args) {
		r.args[i] = f.value
	}
}

// typedField reads what Open, Connect and Execve have of their own.
func (r *record) typedField(kind uint16) func(field) {
	return func(f field) {
		switch {
		case kind == messageConnect && f.number == 6:
			r.address = []byte(bounded(f.bytes, maxAddress))
		case f.number == 6:
			r.path = bounded(f.bytes, maxString)
		case kind == messageExecve && f.number == 7 && len(r.argv) < maxArgv:
			r.argv = append(r.argv, bounded(f.bytes, maxArg))
		}
	}
}

func bounded(b []byte, most int) string { return string(b[:min(len(b), most)]) }
