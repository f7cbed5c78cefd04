package sandbox

import (
	"context"

	"casemate.dev/internal/errs"
)

// CodeOutcome is what ExecuteCode returns.
type CodeOutcome struct {
	Run     CodeRun
	Stdout  []byte
	Stderr  []byte
	Results []CodeResult
	Error   *CodeError
	// Numbers are those of Results, and ErrorNumber that of Error.
	Numbers     []int64
	ErrorNumber int64
	Gaps        []Gap // items that the guest no longer held
	LeftOut     int64 // bytes of text that were left out of the middle
}

// maxResults bounds the results that ExecuteCode returns whole, in bytes.
const maxResults = 32 << 20

// ExecuteCode runs code, waits for its end and returns what it said; of text the middle is left out
// where it is longer than the spec's Buffer. Code that names no timeout gets Defaults.Execution, and
// the error says so if that ends it. Other than that it is RunCode.
func (m *Manager) ExecuteCode(ctx context.Context, p Principal, ref string, s CodeSpec, key string) (CodeOutcome, error) {
	if s.Timeout == 0 {
		s.Timeout = m.cfg.Defaults.Execution
	}
	if s.Buffer < 0 || s.Buffer > maxCollect {
		return CodeOutcome{}, invalid("buffer is %d", s.Buffer).WithHint("use at most %d", maxCollect)
	}
	c := &codeCollector{text: newCollector(or(s.Buffer, defaultCollect))}
	run, err := m.RunCode(ctx, p, ref, s, key, c)
	if err != nil {
		return CodeOutcome{}, err
	}
	if c.size > maxResults {
		return CodeOutcome{}, errs.New(errs.ResourceExhausted, "the code showed more than %d MiB of results", maxResults>>20).
			WithHint("stream them, or write them to files; the run is %s in context %s", run.ID, run.ContextID)
	}
	text := c.text.result()
	c.out.Run, c.out.Stdout, c.out.Stderr = run, text.Stdout, text.Stderr
	for _, g := range text.Gaps {
		c.out.LeftOut += g.To - g.From
	}
	return c.out, nil
}

// codeCollector keeps what a run says in bounded memory.
type codeCollector struct {
	text   *collector
	offset int64 // of text so far
	size   int64 // of results so far
	out    CodeOutcome
}

// Started implements CodeSink.
func (c *codeCollector) Started(CodeRun) error { return nil }

// Item implements CodeSink.
func (c *codeCollector) Item(i CodeItem) error {
	switch i.Kind {
	case ItemStdout, ItemStderr:
		stream := Stdout
		if i.Kind == ItemStderr {
			stream = Stderr
		}
		at := c.offset
		c.offset += int64(len(i.Text))
		return c.text.Output(stream, at, i.Text)
	case ItemResult:
		for mime, data := range i.Result.Data {
			c.size += int64(len(mime) + len(data))
		}
		if c.size <= maxResults {
			c.out.Results = append(c.out.Results, *i.Result)
			c.out.Numbers = append(c.out.Numbers, i.Number)
		}
	case ItemError:
		c.out.Error, c.out.ErrorNumber = i.Error, i.Number
	}
	return nil
}

// Gap implements CodeSink.
func (c *codeCollector) Gap(g Gap) error {
	c.out.Gaps = append(c.out.Gaps, g)
	return nil
}
