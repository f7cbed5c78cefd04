package inspect

import (
	"bytes"
	"encoding/json"
	"io"
	"strings"
	"sync"

	"casemate.dev/internal/secret"
)

// budget counts what one sandbox uses of one route. It is safe for concurrent use.
type budget struct {
	// mu guards the fields below.
	mu       sync.Mutex
	spent    secret.Spent
	reserved usage // what requests under way may use
}

// atLeast takes over what the server remembers of an earlier gateway.
func (b *budget) atLeast(s secret.Spent) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spent.Requests = max(b.spent.Requests, s.Requests)
	b.spent.TokensIn = max(b.spent.TokensIn, s.TokensIn)
	b.spent.TokensOut = max(b.spent.TokensOut, s.TokensOut)
}

// take counts a request and reserves what it may use; reason is why it may not be, "" where it may.
func (b *budget) take(most secret.Budget, want usage) (reason string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	in, out := b.spent.TokensIn+b.reserved.in, b.spent.TokensOut+b.reserved.out
	tokens, cost := in+out, most.Price(in, out)
	switch {
	case most.Requests > 0 && b.spent.Requests >= most.Requests:
		return "the sandbox has made all the requests to this provider that it may"
	case most.Tokens > 0 && tokens >= most.Tokens:
		return "the sandbox has used all the tokens of this provider that it may"
	case most.Tokens > 0 && tokens+want.in+want.out > most.Tokens:
		return "the request could use more tokens than the sandbox has left; ask for fewer"
	case most.Cost > 0 && cost >= most.Cost:
		return "the sandbox has spent all that it may at this provider"
	case most.Cost > 0 && most.Price(in+want.in, out+want.out) > most.Cost:
		return "the request could cost more than the sandbox has left; ask for fewer tokens"
	}
	b.spent.Requests++
	b.reserved.in += want.in
	b.reserved.out += want.out
	return ""
}

// settle replaces what was reserved by what was used.
func (b *budget) settle(reserved, u usage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.reserved.in -= reserved.in
	b.reserved.out -= reserved.out
	b.spent.TokensIn += u.in
	b.spent.TokensOut += u.out
}

// usage is what a request used, as the provider tells it.
type usage struct {
	in, out int64
	told    bool // the provider said so
}

// report is where the two families of APIs say what was used: in the answer, in the message that
// begins a stream, or in the event that ends it.
type report struct {
	Usage    *counts `json:"usage"`
	Message  *report `json:"message"`
	Response *report `json:"response"`
}

type counts struct {
	InputTokens      int64 `json:"input_tokens"`
	CacheCreation    int64 `json:"cache_creation_input_tokens"`
	CacheRead        int64 `json:"cache_read_input_tokens"`
	OutputTokens     int64 `json:"output_tokens"`
	PromptTokens     int64 `json:"prompt_tokens"`
	CompletionTokens int64 `json:"completion_tokens"`
}

// maxTold bounds what a provider may say of one request, so that a broken one can't overflow a budget.
const maxTold = 1 << 40

// add takes over what a report says. Counts grow within a stream, so the highest holds.
func (u *usage) add(r *report) {
	if r == nil {
		return
	}
	if c := r.Usage; c != nil {
		bounded := func(n int64) int64 { return min(max(n, 0), maxTold) }
		in := bounded(c.InputTokens) + bounded(c.CacheCreation) + bounded(c.CacheRead)
		u.in = max(u.in, in, bounded(c.PromptTokens))
		u.out = max(u.out, bounded(c.OutputTokens), bounded(c.CompletionTokens))
		u.told = true
	}
	u.add(r.Message)
	u.add(r.Response)
}

// The bounds of what is kept of an answer to read its usage.
const (
	maxAnswer = 16 << 20
	maxLine   = 1 << 20
)

// meter reads usage from an answer as it passes, and drops from a stream what the client did not ask for.
type meter struct {
	src    io.ReadCloser
	events bool // a stream of server-sent events
	// dropUsage leaves out the event that only tells usage: it was asked for by us.
	dropUsage bool

	usage usage
	bytes int64 // that passed
	text  []byte
	over  bool // the answer is too long to be read
	lease *lease
	out   []byte
	err   error
	room  []byte
}

// Read implements io.Reader. Nothing waits but a line of an event stream for its end.
func (m *meter) Read(p []byte) (int, error) {
	for len(m.out) == 0 {
		if m.err != nil {
			return 0, m.err
		}
		if m.room == nil {
			m.room = make([]byte, 32<<10)
		}
		n, err := m.src.Read(m.room)
		m.err = err
		m.bytes += int64(n)
		if m.events {
			m.takeEvents(m.room[:n])
		} else {
			m.takeText(m.room[:n])
		}
	}
	n := copy(p, m.out)
	m.out = m.out[n:]
	return n, nil
}

// Close implements io.Closer.
func (m *meter) Close() error { return m.src.Close() }

func (m *meter) takeText(b []byte) {
	m.out = append(m.out[:0], b...)
	if m.over = m.over || len(m.text)+len(b) > maxAnswer || !m.lease.add(len(b)); !m.over {
		m.text = append(m.text, b...)
	}
	if m.err != nil && !m.over {
		var r report
		if json.Unmarshal(m.text, &r) == nil {
			m.usage.add(&r)
		}
	}
}

// takeEvents passes whole events on where one may have to be left out, else bytes as they come.
func (m *meter) takeEvents(b []byte) {
	m.text = append(m.text, b...)
	if !m.dropUsage {
		m.out = append(m.out[:0], b...)
	}
	for {
		end, size := eventEnd(m.text)
		if end < 0 {
			break
		}
		event := m.text[:end+size]
		if drop := m.event(event[:end]); m.dropUsage && !drop {
			m.out = append(m.out, event...)
		}
		m.text = m.text[end+size:]
	}
	if len(m.text) > maxLine || m.err != nil {
		// An event that does not end: pass it on unread rather than keep it.
		m.event(m.text)
		if m.dropUsage {
			m.out = append(m.out, m.text...)
		}
		m.text = nil
	}
}

// eventEnd returns where the first event ends, and the size of the empty line behind it; -1: nowhere.
func eventEnd(b []byte) (end, size int) {
	lf, crlf := bytes.Index(b, []byte("\n\n")), bytes.Index(b, []byte("\r\n\r\n"))
	if lf >= 0 && (crlf < 0 || lf < crlf) {
		return lf, 2
	}
	return crlf, 4
}

// event reads one event and reports whether it only tells usage.
func (m *meter) event(b []byte) (usageOnly bool) {
	var data strings.Builder
	for line := range bytes.Lines(b) {
		if d, ok := bytes.CutPrefix(bytes.TrimRight(line, "\r\n"), []byte("data:")); ok {
			data.Write(bytes.TrimPrefix(d, []byte(" ")))
			data.WriteByte('\n')
		}
	}
	var r struct {
		report
		Choices *[]json.RawMessage `json:"choices"`
	}
	if data.Len() == 0 || json.Unmarshal([]byte(data.String()), &r) != nil {
		return false
	}
	m.usage.add(&r.report)
	return r.Usage != nil && r.Choices != nil && len(*r.Choices) == 0
}

// used returns what the request used. Where the provider did not tell, because the client left or the
// answer was cut, it is estimated at four bytes a token, so that leaving early is not free.
func (m *meter) used(sent int64) usage {
	u := m.usage
	if u.told && m.err != nil && (u.out > 0 || m.bytes == 0) {
		return u
	}
	return usage{in: max(u.in, sent/bytesPerToken), out: max(u.out, m.bytes/bytesPerToken)}
}

// bytesPerToken is what English text has, roughly; other text has fewer.
const bytesPerToken = 4
