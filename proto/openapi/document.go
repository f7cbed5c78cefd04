package main

import (
	"sort"
	"strings"

	"google.golang.org/genproto/googleapis/api/annotations"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	casematev1 "casemate.dev/proto/casemate/v1"
)

const head = `# Generated from proto/casemate/v1 and proto/openapi/twins.yaml by proto/generate.sh. Do not edit.
openapi: "3.1.0"
info:
  title: "Casemate"
  description: "Runs AI agents, and the code they write, in sandboxes on machines that you own. Names of fields are lowerCamelCase here; the server also takes them as the schema writes them. 64-bit integers are strings in answers and either in requests."
  version: "v1"
  license:
    name: "Apache-2.0"
    identifier: "Apache-2.0"
servers:
  - url: "http://127.0.0.1:7433"
security:
  - bearer: []
  - apiKey: []
`

const components = `  securitySchemes:
    bearer:
      type: "http"
      scheme: "bearer"
    apiKey:
      type: "apiKey"
      in: "header"
      name: "X-API-Key"
  parameters:
    sandbox:
      name: "sandbox"
      in: "path"
      required: true
      description: "Id, a unique beginning of it (4 characters or more), or name."
      schema:
        type: "string"
    process:
      name: "process"
      in: "path"
      required: true
      schema:
        type: "string"
    path:
      name: "path"
      in: "query"
      required: true
      description: "Absolute, or from the user's home."
      schema:
        type: "string"
    user:
      name: "user"
      in: "query"
      description: "As whom; default the sandbox's user."
      schema:
        type: "string"
  responses:
    Items:
      description: "A stream of JSON objects, each with a type."
      content:
        application/x-ndjson: {}
        text/event-stream: {}
    OutputItems:
      description: "A stream of items of type started, output, gap, keep_alive, ended, more or error."
      content:
        application/x-ndjson:
          schema:
            $ref: "#/components/schemas/OutputItem"
        text/event-stream: {}
        application/octet-stream: {}
    Error:
      description: "Any error. The status follows from the code."
      content:
        application/json:
          schema:
            $ref: "#/components/schemas/Error"
`

// document returns the whole document for the schema in files.
func document(files *protoregistry.Files) string {
	paths, messages := map[string]mapping{}, map[string]protoreflect.MessageDescriptor{}
	files.RangeFilesByPackage("casemate.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			service(f.Services().Get(i), paths, messages)
		}
		return true
	})
	var b strings.Builder
	b.WriteString(head + "paths:\n")
	for _, path := range sorted(paths) {
		write(&b, mapping{{path, paths[path]}}, 1)
	}
	b.WriteString(twins)
	b.WriteString("components:\n" + components + "  schemas:\n")
	write(&b, mapping{{"Error", errorSchema()}}, 2)
	write(&b, mapping{{"OutputItem", outputItemSchema()}}, 2)
	for _, name := range sorted(messages) {
		write(&b, mapping{{name, messageSchema(messages[name])}}, 2)
	}
	return b.String()
}

func sorted[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return keys
}

// service adds the REST paths of s, and the messages that they name.
func service(s protoreflect.ServiceDescriptor, paths map[string]mapping, messages map[string]protoreflect.MessageDescriptor) {
	for i := range s.Methods().Len() {
		m := s.Methods().Get(i)
		rule, ok := proto.GetExtension(m.Options(), annotations.E_Http).(*annotations.HttpRule)
		if !ok || rule == nil {
			continue
		}
		verb, path := verbOf(rule)
		p := paths[path]
		p.set(verb, operation(m, rule, path, messages))
		paths[path] = p
	}
}

func verbOf(r *annotations.HttpRule) (verb, path string) {
	switch {
	case r.GetGet() != "":
		return "get", r.GetGet()
	case r.GetPost() != "":
		return "post", r.GetPost()
	case r.GetPut() != "":
		return "put", r.GetPut()
	case r.GetPatch() != "":
		return "patch", r.GetPatch()
	default:
		return "delete", r.GetDelete()
	}
}

func operation(m protoreflect.MethodDescriptor, rule *annotations.HttpRule, path string, messages map[string]protoreflect.MessageDescriptor) mapping {
	var op mapping
	op.set("operationId", lowerFirst(string(m.Name())))
	op.set("tags", []any{strings.TrimSuffix(string(m.Parent().Name()), "Service")})
	text := comment(m)
	summary, _, _ := strings.Cut(text, ". ")
	op.set("summary", strings.TrimSuffix(summary, "."))
	op.set("description", text)
	access, _ := proto.GetExtension(m.Options(), casematev1.E_Access).(casematev1.Access)
	op.set("x-access", strings.ToLower(strings.TrimPrefix(access.String(), "ACCESS_")))
	if access == casematev1.Access_ACCESS_OPEN {
		op.set("security", []any{})
	}
	if params := parameters(m, rule, path); len(params) > 0 {
		op.set("parameters", params)
	}
	if rule.GetBody() == "*" {
		op.set("requestBody", mapping{
			{"required", true},
			{"content", mapping{{"application/json", mapping{{"schema", bodySchema(m.Input(), path, messages)}}}}},
		})
	}
	collect(m.Output(), messages)
	op.set("responses", mapping{
		{"200", mapping{
			{"description", "Done."},
			{"content", mapping{{"application/json", mapping{{"schema", ref(m.Output())}}}}},
		}},
		{"default", mapping{{"$ref", "#/components/responses/Error"}}},
	})
	return op
}

func lowerFirst(s string) string { return strings.ToLower(s[:1]) + s[1:] }

// parameters lists what stands in the path and, where there is no body, in the query.
func parameters(m protoreflect.MethodDescriptor, rule *annotations.HttpRule, path string) []any {
	var params []any
	in := inPath(path)
	fields := m.Input().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		name := string(f.Name())
		var p mapping
		switch {
		case in[name]:
			p.set("name", name)
			p.set("in", "path")
			p.set("required", true)
		case rule.GetBody() == "" && !f.IsMap():
			p.set("name", f.JSONName())
			p.set("in", "query")
		default:
			continue
		}
		if text := comment(f); text != "" {
			p.set("description", text)
		}
		p.set("schema", fieldSchema(f))
		params = append(params, p)
	}
	switch m.Name() {
	case "CreateSandbox", "StartProcess", "Execute":
		params = append(params, mapping{
			{"name", "Idempotency-Key"},
			{"in", "header"},
			{"description", "For 24 hours the same key and body give the same answer; another body is a conflict."},
			{"schema", mapping{{"type", "string"}, {"maxLength", 255}}},
		})
	}
	return params
}

func inPath(path string) map[string]bool {
	in := map[string]bool{}
	for part := range strings.SplitSeq(path, "/") {
		if name, ok := strings.CutPrefix(part, "{"); ok {
			in[strings.TrimSuffix(name, "}")] = true
		}
	}
	return in
}

// bodySchema is the input without what stands in the path.
func bodySchema(m protoreflect.MessageDescriptor, path string, messages map[string]protoreflect.MessageDescriptor) mapping {
	in := inPath(path)
	if len(in) == 0 {
		collect(m, messages)
		return ref(m)
	}
	var props mapping
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		if in[string(f.Name())] {
			continue
		}
		props.set(f.JSONName(), described(f))
		collectField(f, messages)
	}
	out := mapping{{"type", "object"}}
	if len(props) > 0 {
		out.set("properties", props)
	}
	return out
}
