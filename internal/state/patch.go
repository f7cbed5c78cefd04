package state

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/store"
)

// PatchRequest says how to change a document that holds JSON.
type PatchRequest struct {
	Ref
	Links
	// Patch is a JSON merge patch (RFC 7396), an object, or a JSON patch (RFC 6902), an array of operations.
	Patch  []byte
	Expect *uint64 // as in SetRequest
}

// maxOperations bounds a JSON patch, and maxDepth how deep a document may be to be patched.
const (
	maxOperations = 1000
	maxDepth      = 1000
)

// Patch changes a document in one step: nobody's write comes between the reading and the writing. A document that is
// not there begins as null. Kinds: InvalidArgument, FailedPrecondition (it holds no JSON, or a test of the patch
// fails), Conflict, ResourceExhausted.
func (d *Documents) Patch(ctx context.Context, p sandbox.Principal, r PatchRequest) (Document, error) {
	apply, err := parsePatch(r.Patch)
	if err != nil {
		return Document{}, err
	}
	return d.change(ctx, p, r.Ref, r.Links, r.Expect, func(head store.StateVersion, there bool) (content, error) {
		kind := JSON
		var now any
		if there {
			kind = head.ContentType
			if !isJSON(kind) {
				return content{}, errs.New(errs.FailedPrecondition, "document %s/%s is %s, and only JSON can be patched", r.Agent, r.Name, kind)
			}
			full, ok, err := d.cfg.DB.GetStateVersion(ctx, head.Owner, head.Agent, head.Name, head.Version)
			if err != nil || !ok {
				return content{}, fmt.Errorf("read document: %w", err)
			}
			if now, err = decode(full.Content); err != nil {
				return content{}, fmt.Errorf("decode document: %w", err)
			}
		}
		if now, err = apply(now); err != nil {
			return content{}, err
		}
		data, err := encode(now)
		if err != nil {
			return content{}, err
		}
		return content{data: data, kind: kind}, checkSize(len(data))
	})
}

// decode reads JSON and keeps numbers as they are written.
func decode(data []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	var v any
	err := dec.Decode(&v)
	return v, err
}

func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode document: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// parsePatch returns what a patch does to a value.
func parsePatch(text []byte) (func(any) (any, error), error) {
	if err := checkSize(len(text)); err != nil {
		return nil, err
	}
	if err := checkJSON(text); err != nil {
		return nil, err
	}
	switch bytes.TrimSpace(text)[0] {
	case '{':
		patch, err := decode(text)
		if err != nil {
			return nil, invalid("the patch can't be read: %v", err)
		}
		return func(v any) (any, error) { return merge(v, patch, 0) }, nil
	case '[':
		var ops []operation
		dec := json.NewDecoder(bytes.NewReader(text))
		dec.UseNumber()
		if err := dec.Decode(&ops); err != nil {
			return nil, invalid("the patch is no list of operations: %v", err)
		}
		if len(ops) > maxOperations {
			return nil, invalid("the patch has %d operations, limit %d", len(ops), maxOperations)
		}
		return func(v any) (any, error) { return applyAll(ops, v) }, nil
	}
	return nil, invalid("the patch is neither an object (RFC 7396) nor a list of operations (RFC 6902)")
}

// merge is MergePatch of RFC 7396, section 2.
func merge(target, patch any, depth int) (any, error) {
	changes, ok := patch.(map[string]any)
	if !ok {
		return patch, nil
	}
	if depth > maxDepth {
		return nil, invalid("the patch is deeper than %d", maxDepth)
	}
	object, ok := target.(map[string]any)
	if !ok {
		object = make(map[string]any, len(changes))
	}
	for name, change := range changes {
		if change == nil {
			delete(object, name)
			continue
		}
		v, err := merge(object[name], change, depth+1)
		if err != nil {
			return nil, err
		}
		object[name] = v
	}
	return object, nil
}

// operation is one of RFC 6902, section 4.
type operation struct {
	Op    string          `json:"op"`
	Path  *string         `json:"path"`
	From  *string         `json:"from"`
	Value json.RawMessage `json:"value"`
}

func applyAll(ops []operation, v any) (any, error) {
	room := MaxDocument // for copies, of which a few could fill the memory
	for i, op := range ops {
		var err error
		if v, err = op.apply(v, &room); err != nil {
			kind := errs.KindOf(err)
			if kind == errs.Internal {
				kind = errs.InvalidArgument
			}
			return nil, errs.New(kind, "operation %d (%.20s): %v", i, op.Op, err)
		}
	}
	return v, nil
}

func (op operation) apply(v any, room *int) (any, error) {
	if op.Path == nil {
		return nil, invalid("it has no path")
	}
	switch op.Op {
	case "add", "replace", "test":
		if op.Value == nil {
			return nil, invalid("it has no value")
		}
		value, err := decode(op.Value)
		switch {
		case err != nil:
			return nil, invalid("its value can't be read: %v", err)
		case op.Op == "add":
			return change(v, *op.Path, adding, value)
		case op.Op == "replace":
			return change(v, *op.Path, replacing, value)
		}
		got, err := lookup(v, *op.Path)
		if err == nil && !equal(got, value) {
			err = errs.New(errs.FailedPrecondition, "the value at %.80q is another", *op.Path)
		}
		return v, err
	case "remove":
		return change(v, *op.Path, removing, nil)
	case "copy", "move":
		if op.From == nil {
			return nil, invalid("it has no from")
		}
		return op.take(v, room)
	}
	return nil, invalid("there is no such operation: add, remove, replace, move, copy and test are")
}

// take copies or moves a value.
func (op operation) take(v any, room *int) (any, error) {
	value, err := lookup(v, *op.From)
	if err != nil {
		return nil, err
	}
	if op.Op == "copy" {
		if value, err = clone(value, room); err != nil {
			return nil, err
		}
		return change(v, *op.Path, adding, value)
	}
	if strings.HasPrefix(*op.Path, *op.From+"/") {
		return nil, invalid("a value can't be moved into itself")
	}
	if v, err = change(v, *op.From, removing, nil); err != nil {
		return nil, err
	}
	return change(v, *op.Path, adding, value)
}

// clone copies a value, so that a later operation changes one of the two, and takes its size from room.
func clone(v any, room *int) (any, error) {
	const node = 2 // bytes that a value takes at least, with its comma
	if *room -= node; *room < 0 {
		return nil, errs.New(errs.ResourceExhausted, "the patch copies more than %d bytes", MaxDocument)
	}
	switch t := v.(type) {
	case map[string]any:
		c := make(map[string]any, len(t))
		for k, e := range t {
			*room -= len(k)
			var err error
			if c[k], err = clone(e, room); err != nil {
				return nil, err
			}
		}
		return c, nil
	case []any:
		c := make([]any, len(t))
		for i, e := range t {
			var err error
			if c[i], err = clone(e, room); err != nil {
				return nil, err
			}
		}
		return c, nil
	case string:
		*room -= len(t)
	case json.Number:
		*room -= len(t)
	}
	return v, nil
}

// equal compares as RFC 6902, section 4.6: numbers by their value.
func equal(a, b any) bool {
	na, oka := a.(json.Number)
	nb, okb := b.(json.Number)
	if oka && okb {
		if na == nb {
			return true
		}
		fa, erra := na.Float64()
		fb, errb := nb.Float64()
		return erra == nil && errb == nil && fa == fb
	}
	switch ta := a.(type) {
	case map[string]any:
		tb, ok := b.(map[string]any)
		if !ok || len(ta) != len(tb) {
			return false
		}
		for k, v := range ta {
			w, ok := tb[k]
			if !ok || !equal(v, w) {
				return false
			}
		}
		return true
	case []any:
		tb, ok := b.([]any)
		return ok && slices.EqualFunc(ta, tb, equal)
	}
	return reflect.DeepEqual(a, b)
}

// pointer splits a JSON pointer (RFC 6901) into its parts.
func pointer(s string) ([]string, error) {
	if s == "" {
		return nil, nil
	}
	if s[0] != '/' {
		return nil, invalid("a path begins with a slash, as in /messages/0")
	}
	parts := strings.Split(s[1:], "/")
	if len(parts) > maxDepth {
		return nil, invalid("the path has more than %d parts", maxDepth)
	}
	for i, p := range parts {
		parts[i] = strings.ReplaceAll(strings.ReplaceAll(p, "~1", "/"), "~0", "~")
	}
	return parts, nil
}

func nothingAt(part string) error { return invalid("there is no %.80q", part) }

// index reads the place in a list; most is the greatest that there is.
func index(part string, most int) (int, error) {
	n, err := strconv.Atoi(part)
	if err != nil || n < 0 || strconv.Itoa(n) != part {
		return 0, invalid("%.80q is no place in a list", part)
	}
	if n > most {
		return 0, nothingAt(part)
	}
	return n, nil
}

func lookup(v any, path string) (any, error) {
	parts, err := pointer(path)
	if err != nil {
		return nil, err
	}
	for _, part := range parts {
		switch t := v.(type) {
		case map[string]any:
			next, ok := t[part]
			if !ok {
				return nil, nothingAt(part)
			}
			v = next
		case []any:
			n, err := index(part, len(t)-1)
			if err != nil {
				return nil, err
			}
			v = t[n]
		default:
			return nil, nothingAt(part)
		}
	}
	return v, nil
}

// how is what change does at the end of its path.
type how int

const (
	adding how = iota
	replacing
	removing
)

// change returns v with the value at a path changed.
func change(v any, path string, h how, value any) (any, error) {
	parts, err := pointer(path)
	if err != nil {
		return nil, err
	}
	return changeAt(v, parts, h, value)
}

func changeAt(v any, parts []string, h how, value any) (any, error) {
	if len(parts) == 0 {
		return value, nil
	}
	part, last := parts[0], len(parts) == 1
	switch t := v.(type) {
	case map[string]any:
		old, ok := t[part]
		switch {
		case !ok && (!last || h != adding):
			return nil, nothingAt(part)
		case last && h == removing:
			delete(t, part)
			return t, nil
		}
		next, err := changeAt(old, parts[1:], h, value)
		if err != nil {
			return nil, err
		}
		t[part] = next
		return t, nil
	case []any:
		return changeList(t, parts, h, value)
	}
	return nil, nothingAt(part)
}

func changeList(list []any, parts []string, h how, value any) (any, error) {
	part, last := parts[0], len(parts) == 1
	if last && h == adding {
		if part == "-" {
			return append(list, value), nil
		}
		n, err := index(part, len(list))
		if err != nil {
			return nil, err
		}
		return slices.Insert(list, n, value), nil
	}
	n, err := index(part, len(list)-1)
	if err != nil {
		return nil, err
	}
	if last && h == removing {
		return slices.Delete(list, n, n+1), nil
	}
	list[n], err = changeAt(list[n], parts[1:], h, value)
	return list, err
}
