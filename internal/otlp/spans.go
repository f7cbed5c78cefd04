// Package otlp is as much of OpenTelemetry's protocol as sending spans takes: its JSON form, over HTTP.
//
// What belongs here: the messages, and handing them to a collector. What does not: what spans say; the record's are made in
// package trajectory, the server's own in package trace.
package otlp

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"
)

// The parts of OTLP's JSON form that spans take (https://opentelemetry.io/docs/specs/otlp/#otlphttp). Ids are in hex, and
// integers of 64 bits texts.
type (
	// Traces is one request.
	Traces struct {
		ResourceSpans []ResourceSpans `json:"resourceSpans"`
	}
	// ResourceSpans are the spans of one source.
	ResourceSpans struct {
		Resource   Resource     `json:"resource"`
		ScopeSpans []ScopeSpans `json:"scopeSpans"`
	}
	// Resource tells what a source is.
	Resource struct {
		Attributes []Attribute `json:"attributes"`
	}
	// ScopeSpans are the spans of one part of a source.
	ScopeSpans struct {
		Scope Scope  `json:"scope"`
		Spans []Span `json:"spans"`
	}
	// Scope names such a part.
	Scope struct {
		Name string `json:"name"`
	}
	// Span is something that took a time.
	Span struct {
		TraceID      string      `json:"traceId"`
		SpanID       string      `json:"spanId"`
		ParentSpanID string      `json:"parentSpanId,omitempty"`
		Name         string      `json:"name"`
		Kind         int         `json:"kind"`
		Start        string      `json:"startTimeUnixNano"`
		End          string      `json:"endTimeUnixNano"`
		Attributes   []Attribute `json:"attributes"`
		Status       Status      `json:"status"`
	}
	// Status says how a span ended.
	Status struct {
		Code    int    `json:"code,omitempty"`
		Message string `json:"message,omitempty"`
	}
	// Attribute is a fact about a span or a source.
	Attribute struct {
		Key   string `json:"key"`
		Value Value  `json:"value"`
	}
	// Value is an attribute's; one is set.
	Value struct {
		String *string `json:"stringValue,omitempty"`
		Int    *string `json:"intValue,omitempty"`
		Bool   *bool   `json:"boolValue,omitempty"`
	}
)

// The values of OTLP's enumerations that are used.
const (
	KindInternal = 1
	KindServer   = 2
	StatusError  = 2
)

// Text returns an attribute that is a text.
func Text(key, value string) Attribute { return Attribute{key, Value{String: &value}} }

// Int returns an attribute that is a whole number.
func Int(key string, value int64) Attribute {
	s := strconv.FormatInt(value, 10)
	return Attribute{key, Value{Int: &s}}
}

// Nanos writes a time as spans have it.
func Nanos(t time.Time) string { return strconv.FormatInt(t.UnixNano(), 10) }

// SpansPerRequest bounds what one request carries.
const SpansPerRequest = 200

// Encode returns requests that carry spans of one part of one source.
func Encode(resource []Attribute, scope string, spans []Span) ([][]byte, error) {
	var out [][]byte
	for len(spans) > 0 {
		n := min(len(spans), SpansPerRequest)
		b, err := json.Marshal(Traces{ResourceSpans: []ResourceSpans{{
			Resource:   Resource{Attributes: resource},
			ScopeSpans: []ScopeSpans{{Scope: Scope{Name: scope}, Spans: spans[:n]}},
		}}})
		if err != nil {
			return nil, fmt.Errorf("encode spans: %w", err)
		}
		out, spans = append(out, b), spans[n:]
	}
	return out, nil
}
