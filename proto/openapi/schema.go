package main

import (
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// collect notes m, and what its fields name, as needed under components.
func collect(m protoreflect.MessageDescriptor, into map[string]protoreflect.MessageDescriptor) {
	if m.ParentFile().Package() != "casemate.v1" || m.IsMapEntry() {
		return
	}
	name := string(m.Name())
	if _, ok := into[name]; ok {
		return
	}
	into[name] = m
	for i := range m.Fields().Len() {
		collectField(m.Fields().Get(i), into)
	}
}

func collectField(f protoreflect.FieldDescriptor, into map[string]protoreflect.MessageDescriptor) {
	if f.IsMap() {
		f = f.MapValue()
	}
	if f.Message() != nil {
		collect(f.Message(), into)
	}
}

func ref(m protoreflect.MessageDescriptor) mapping {
	return mapping{{"$ref", "#/components/schemas/" + string(m.Name())}}
}

func messageSchema(m protoreflect.MessageDescriptor) mapping {
	out := mapping{{"type", "object"}}
	if text := comment(m); text != "" {
		out.set("description", text)
	}
	var props mapping
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		props.set(f.JSONName(), described(f))
	}
	if len(props) > 0 {
		out.set("properties", props)
	}
	return out
}

// described is a field's schema with its comment.
func described(f protoreflect.FieldDescriptor) mapping {
	s := fieldSchema(f)
	if text := comment(f); text != "" {
		s.set("description", text)
	}
	return s
}

func fieldSchema(f protoreflect.FieldDescriptor) mapping {
	switch {
	case f.IsMap():
		return mapping{{"type", "object"}, {"additionalProperties", singular(f.MapValue())}}
	case f.IsList():
		return mapping{{"type", "array"}, {"items", singular(f)}}
	}
	return singular(f)
}

// singular follows ProtoJSON (protobuf.dev/programming-guides/json).
func singular(f protoreflect.FieldDescriptor) mapping {
	switch f.Kind() {
	case protoreflect.BoolKind:
		return mapping{{"type", "boolean"}}
	case protoreflect.Int32Kind, protoreflect.Uint32Kind:
		return mapping{{"type", "integer"}, {"format", f.Kind().String()}}
	case protoreflect.Int64Kind, protoreflect.Uint64Kind:
		return mapping{{"type", "string"}, {"format", f.Kind().String()}}
	case protoreflect.DoubleKind, protoreflect.FloatKind:
		return mapping{{"type", "number"}, {"format", f.Kind().String()}}
	case protoreflect.BytesKind:
		return mapping{{"type", "string"}, {"contentEncoding", "base64"}}
	case protoreflect.EnumKind:
		return mapping{{"type", "string"}, {"enum", values(f.Enum())}}
	case protoreflect.MessageKind:
		return message(f.Message())
	default:
		return mapping{{"type", "string"}}
	}
}

func message(m protoreflect.MessageDescriptor) mapping {
	switch m.FullName() {
	case "google.protobuf.Timestamp":
		return mapping{{"type", "string"}, {"format", "date-time"}}
	case "google.protobuf.Duration":
		return mapping{{"type", "string"}, {"pattern", `^-?[0-9]+(\.[0-9]{1,9})?s$`}}
	case "google.protobuf.Struct":
		return mapping{{"type", "object"}}
	}
	return ref(m)
}

func values(e protoreflect.EnumDescriptor) []any {
	var out []any
	for i := range e.Values().Len() {
		out = append(out, string(e.Values().Get(i).Name()))
	}
	return out
}

// comment returns what stands above d in the schema, as one paragraph a line.
func comment(d protoreflect.Descriptor) string {
	text := d.ParentFile().SourceLocations().ByDescriptor(d).LeadingComments
	var out []string
	for para := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		out = append(out, strings.Join(strings.Fields(para), " "))
	}
	return strings.Join(out, "\n")
}

func errorSchema() mapping {
	return mapping{
		{"type", "object"},
		{"required", []any{"code", "message"}},
		{"properties", mapping{
			{"code", mapping{{"type", "string"}, {"description", "A stable machine word."}, {"enum", []any{
				"internal", "invalid_argument", "not_found", "already_exists", "failed_precondition", "conflict", "permission_denied",
				"unauthenticated", "resource_exhausted", "unsupported", "deadline_exceeded", "canceled", "unavailable", "too_large",
			}}}},
			{"message", mapping{{"type", "string"}}},
			{"hint", mapping{{"type", "string"}, {"description", "What to do next."}}},
			{"id", mapping{{"type", "string"}, {"description", "Names the entry in the server's log, for internal errors."}}},
		}},
	}
}

func outputItemSchema() mapping {
	text, number := mapping{{"type", "string"}}, mapping{{"type", "integer"}, {"format", "int64"}}
	return mapping{
		{"type", "object"},
		{"required", []any{"type"}},
		{"properties", mapping{
			{"type", mapping{{"type", "string"}, {"enum", []any{"started", "output", "gap", "keep_alive", "ended", "more", "error"}}}},
			{"process", mapping{{"$ref", "#/components/schemas/Process"}}},
			{"stream", mapping{{"type", "string"}, {"enum", []any{"stdout", "stderr", "tty"}}}},
			{"offset", number},
			{"next", number},
			{"text", text},
			{"base64", mapping{{"type", "string"}, {"contentEncoding", "base64"}, {"description", "Instead of text, where the bytes are not UTF-8."}}},
			{"from", number},
			{"to", number},
			{"code", text},
			{"message", text},
			{"hint", text},
		}},
	}
}
