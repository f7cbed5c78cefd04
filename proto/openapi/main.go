// Command openapi writes the OpenAPI document of the REST paths to standard output. It reads the
// schema, with its comments, as a FileDescriptorSet from standard input; generate.sh calls it.
//
// The paths that the schema's annotations can't say (streams, bytes, ports) stand in twins.yaml.
package main

import (
	_ "embed"
	"fmt"
	"io"
	"os"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"

	_ "casemate.dev/proto/casemate/v1" // registers the extensions that the schema's options use
)

//go:embed twins.yaml
var twins string

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "openapi:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	b, err := io.ReadAll(in)
	if err != nil {
		return fmt.Errorf("read schema: %w", err)
	}
	set := &descriptorpb.FileDescriptorSet{}
	if err := proto.Unmarshal(b, set); err != nil {
		return fmt.Errorf("parse schema: %w", err)
	}
	files, err := protodesc.NewFiles(set)
	if err != nil {
		return fmt.Errorf("link schema: %w", err)
	}
	_, err = io.WriteString(out, document(files))
	return err
}
