package api

import (
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// jsonCodec is the JSON of Connect calls. Unlike Connect's own it refuses fields that the schema lacks: a
// limit or a rule whose name is misspelt must not be left out in silence.
type jsonCodec string // its name in a content type, behind "application/"

// Name implements connect.Codec.
func (c jsonCodec) Name() string { return string(c) }

// Marshal implements connect.Codec.
func (jsonCodec) Marshal(v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("%T is no message", v)
	}
	return protojson.Marshal(m)
}

// Unmarshal implements connect.Codec.
func (jsonCodec) Unmarshal(b []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("%T is no message", v)
	}
	return protojson.Unmarshal(b, m)
}
