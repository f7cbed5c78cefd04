package trajectory

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"time"
)

// The parts of OTLP's JSON form that spans take (https://opentelemetry.io/docs/specs/otlp/#otlphttp). Ids are in hex, and
// integers of 64 bits texts.
type (
	otlpTraces struct {
		ResourceSpans []otlpResourceSpans `json:"resourceSpans"`
	}
	otlpResourceSpans struct {
		Resource   otlpResource     `json:"resource"`
		ScopeSpans []otlpScopeSpans `json:"scopeSpans"`
	}
	otlpResource struct {
		Attributes []otlpAttribute `json:"attributes"`
	}
	otlpScopeSpans struct {
		Scope otlpScope  `json:"scope"`
		Spans []otlpSpan `json:"spans"`
	}
	otlpScope struct {
		Name string `json:"name"`
	}
	otlpSpan struct {
		TraceID      string          `json:"traceId"`
		SpanID       string          `json:"spanId"`
		ParentSpanID string          `json:"parentSpanId,omitempty"`
		Name         string          `json:"name"`
		Kind         int             `json:"kind"`
		Start        string          `json:"startTimeUnixNano"`
		End          string          `json:"endTimeUnixNano"`
		Attributes   []otlpAttribute `json:"attributes"`
		Status       otlpStatus      `json:"status"`
	}
	otlpStatus struct {
		Code    int    `json:"code,omitempty"`
		Message string `json:"message,omitempty"`
	}
	otlpAttribute struct {
		Key   string    `json:"key"`
		Value otlpValue `json:"value"`
	}
	otlpValue struct {
		String *string `json:"stringValue,omitempty"`
		Int    *string `json:"intValue,omitempty"`
		Bool   *bool   `json:"boolValue,omitempty"`
	}
)

// The values of OTLP's enumerations that are used.
const (
	kindInternal = 1
	statusError  = 2
)

// spansPerRequest bounds what one request carries.
const spansPerRequest = 200

func textOf(key, value string) otlpAttribute {
	return otlpAttribute{key, otlpValue{String: &value}}
}

func intOf(key string, value int64) otlpAttribute {
	s := strconv.FormatInt(value, 10)
	return otlpAttribute{key, otlpValue{Int: &s}}
}

// Spans returns the story as OTLP requests in JSON: one trace for the sandbox, with a span for its life and one of GenAI's
// execute_tool for each call that has ended. The same record gives the same ids. With content, what calls were given and
// said is among the attributes: it may be secret.
func (s *Story) Spans(content bool) ([][]byte, error) {
	trace := id(16, s.Origin, s.Sandbox)
	root := id(8, s.Origin, s.Sandbox, "life")
	spans := []otlpSpan{{
		TraceID: trace, SpanID: root, Name: "sandbox " + s.Sandbox, Kind: kindInternal, Start: nanos(s.Begun), End: nanos(s.Ended),
		Attributes: []otlpAttribute{
			textOf("gen_ai.conversation.id", s.Sandbox), textOf("casemate.template", text(s.Created["template"])),
			textOf("casemate.isolation", text(s.Created["isolation"])), intOf("casemate.journal.events", int64(s.Events)), intOf("casemate.journal.gaps", int64(s.Gaps)),
		},
	}}
	for _, c := range s.Calls {
		if c.Ended.IsZero() {
			continue
		}
		span := c.span(s.Sandbox, content)
		span.TraceID, span.SpanID, span.ParentSpanID = trace, id(8, s.Origin, s.Sandbox, c.Tool, c.ID), root
		spans = append(spans, span)
	}
	var out [][]byte
	for len(spans) > 0 {
		n := min(len(spans), spansPerRequest)
		b, err := json.Marshal(otlpTraces{ResourceSpans: []otlpResourceSpans{{
			Resource:   otlpResource{Attributes: []otlpAttribute{textOf("service.name", "casemate"), textOf("service.instance.id", s.Origin), textOf("casemate.sandbox.id", s.Sandbox)}},
			ScopeSpans: []otlpScopeSpans{{Scope: otlpScope{Name: "casemate.dev/journal"}, Spans: spans[:n]}},
		}}})
		if err != nil {
			return nil, fmt.Errorf("encode spans: %w", err)
		}
		out, spans = append(out, b), spans[n:]
	}
	return out, nil
}

// span is a call without its ids.
func (c *Call) span(sandbox string, content bool) otlpSpan {
	tool := functionName(c.Tool)
	span := otlpSpan{
		Name: "execute_tool " + tool, Kind: kindInternal, Start: nanos(c.Begun), End: nanos(c.Ended),
		Attributes: []otlpAttribute{
			textOf("gen_ai.operation.name", "execute_tool"), textOf("gen_ai.tool.name", tool), textOf("gen_ai.tool.call.id", c.ID),
			textOf("gen_ai.conversation.id", sandbox), textOf("casemate.actor", c.Actor), textOf("casemate.end", c.outcome()),
			intOf("casemate.journal.event", int64(c.End.Event)), intOf("casemate.journal.log_index", c.End.Index), //nolint:gosec // counters
			intOf("casemate.net.connections", int64(c.Connections)), intOf("casemate.net.refused", int64(c.Refused)),
		},
	}
	if wrong := c.wrong(); wrong != "" {
		span.Attributes = append(span.Attributes, textOf("error.type", wrong))
		span.Status = otlpStatus{Code: statusError, Message: wrong}
	}
	if code, ok := c.fact("code").(float64); ok {
		span.Attributes = append(span.Attributes, intOf("process.exit.code", int64(code)))
	}
	for _, op := range []string{"created", "modified", "deleted", "renamed"} {
		if n, ok := c.Files[op].(float64); ok {
			span.Attributes = append(span.Attributes, intOf("casemate.files."+op, int64(n)))
		}
	}
	if content {
		arguments, err := json.Marshal(c.Arguments)
		if err == nil {
			span.Attributes = append(span.Attributes, textOf("gen_ai.tool.call.arguments", string(arguments)))
		}
		span.Attributes = append(span.Attributes, textOf("gen_ai.tool.call.result", c.said()))
	}
	return span
}

// id is an id of so many bytes, in hex, of what it is of.
func id(size int, of ...string) string {
	h := sha256.New()
	for _, s := range of {
		fmt.Fprintf(h, "%d:%s", len(s), s)
	}
	return hex.EncodeToString(h.Sum(nil)[:size])
}

func nanos(t time.Time) string { return strconv.FormatInt(t.UnixNano(), 10) }
