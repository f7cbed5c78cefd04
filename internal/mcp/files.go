package mcp

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/google/jsonschema-go/jsonschema"
	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"casemate.dev/client"
)

// The limits of files in messages.
const (
	defaultRead = 100_000
	maxRead     = 1 << 20
	maxImage    = 5 << 20 // an image is sent whole or not at all
	maxEntries  = 2000
	maxDepth    = 16
)

type readInput struct {
	target

	Path   string `json:"path" jsonschema:"Absolute, or relative to the user's home."`
	Offset int64  `json:"offset,omitempty" jsonschema:"Where to begin, in bytes."`
	Max    int    `json:"max_bytes,omitempty" jsonschema:"Return at most that many bytes."`
	User   string `json:"user,omitempty" jsonschema:"Whose rights to use. Default: the sandbox's user."`
}

type readResult struct {
	Path   string `json:"path"`
	Size   int64  `json:"size" jsonschema:"The whole file's size in bytes."`
	Text   string `json:"text,omitempty"`
	Base64 string `json:"base64,omitempty" jsonschema:"Instead of text where the bytes are not UTF-8."`
	Offset int64  `json:"offset"`
	Next   int64  `json:"next_offset,omitempty" jsonschema:"Where to go on; absent at the end of the file."`
}

type writeInputFile struct {
	target

	Path   string `json:"path" jsonschema:"Absolute, or relative to the user's home. Missing directories are made."`
	Text   string `json:"text,omitempty" jsonschema:"What to write, as text."`
	Base64 string `json:"base64,omitempty" jsonschema:"What to write, for bytes that are no text."`
	Append bool   `json:"append,omitempty" jsonschema:"Add to the end of the file instead of replacing it."`
	Mode   string `json:"mode,omitempty" jsonschema:"Of a new file, in octal, e.g. 0755."`
	User   string `json:"user,omitempty" jsonschema:"Whose rights to use. Default: the sandbox's user."`
}

type listFilesInput struct {
	target

	Path  string `json:"path,omitempty" jsonschema:"The directory. Default: the user's home."`
	Depth int    `json:"depth,omitempty" jsonschema:"How many levels down; 1 is the directory's own entries."`
	User  string `json:"user,omitempty" jsonschema:"Whose rights to use. Default: the sandbox's user."`
}

type entry struct {
	Path     string `json:"path"`
	Type     string `json:"type"`
	Size     int64  `json:"size"`
	Mode     string `json:"mode"`
	Owner    string `json:"owner,omitempty"`
	Modified string `json:"modified,omitempty"`
	Target   string `json:"target,omitempty" jsonschema:"Where a symbolic link points."`
}

type fileList struct {
	Files   []entry `json:"files"`
	Omitted int     `json:"omitted,omitempty" jsonschema:"How many more there are."`
}

func entryOf(f *client.File) entry {
	return entry{
		Path: f.GetPath(), Type: f.GetType(), Size: f.GetSize(), Mode: fmt.Sprintf("%04o", f.GetMode()&0o7777), Owner: f.GetOwner(),
		Modified: stamp(f.GetModifiedAt()), Target: f.GetTarget(),
	}
}

func (s *Server) addFileTools() {
	add(s, tool{
		name: "read_file", title: "Read a file", kind: reads,
		text: "Read a file of a sandbox, or a part of it. Text comes as text, PNG, JPEG, GIF and WebP images as images, other bytes in base64. " +
			"A long file comes in parts: pass next_offset as offset.",
		shape: func(in *jsonschema.Schema) {
			bounds(in, "offset", 0, 1<<53, 0)
			bounds(in, "max_bytes", 4, maxRead, defaultRead)
		},
	}, readFile)
	add(s, tool{
		name: "write_file", title: "Write a file", kind: replaces,
		text: "Write a file in a sandbox: a new one, or the whole of an existing one, which is replaced at once. Missing directories are made.",
	}, writeFile)
	add(s, tool{
		name: "list_files", title: "List files", kind: reads,
		text:  "List what a directory of a sandbox holds, with type, size and time of change.",
		shape: func(in *jsonschema.Schema) { bounds(in, "depth", 1, maxDepth, 1) },
	}, listFiles)
}

func readFile(ctx context.Context, c call, in readInput) (answer[readResult], error) {
	var none answer[readResult]
	f, err := c.client.Files.Stat(ctx, c.box, in.Path, in.User, true)
	if err != nil {
		return none, err
	}
	if f.GetType() == "dir" {
		return none, invalid("use list_files", "%s is a directory", in.Path)
	}
	limit := int64(in.Max)
	if in.Offset == 0 && f.GetSize() <= maxImage && imageName(in.Path) {
		limit = max(limit, maxImage)
	}
	r, err := c.client.Files.Open(ctx, c.box, in.Path, client.ReadOptions{User: in.User, Offset: in.Offset, Length: limit})
	if err != nil {
		return none, err
	}
	defer func() { _ = r.Close() }()
	data, err := io.ReadAll(io.LimitReader(r, limit))
	if err != nil {
		return none, err
	}
	out := readResult{Path: f.GetPath(), Size: f.GetSize(), Offset: in.Offset}
	if kind := http.DetectContentType(data); in.Offset == 0 && imageType(kind) && int64(len(data)) == f.GetSize() {
		return answer[readResult]{
			text: fmt.Sprintf("%s: %s, %d bytes", out.Path, kind, out.Size), out: out,
			extra: []sdk.Content{&sdk.ImageContent{Data: data, MIMEType: kind}},
		}, nil
	}
	data = data[:min(len(data), in.Max)]
	return fileText(out, data), nil
}

// fileText is a part of a file as text, or in base64 where it is none.
func fileText(out readResult, data []byte) answer[readResult] {
	more := out.Offset+int64(len(data)) < out.Size
	if whole := wholeEnd(data); more && len(whole) > 0 {
		data = whole
	}
	if more {
		out.Next = out.Offset + int64(len(data))
	}
	var t string
	if utf8.Valid(data) {
		out.Text, t = string(data), string(data)
	} else {
		out.Base64 = base64.StdEncoding.EncodeToString(data)
		t = out.Base64 + fmt.Sprintf("\n[base64 of %d bytes]", len(data))
	}
	if more {
		t += fmt.Sprintf("\n[%d of %d bytes; next_offset %d]", len(data), out.Size, out.Next)
	}
	if t == "" {
		t = "(the file is empty)"
		if out.Offset > 0 {
			t = fmt.Sprintf("(nothing there: the file has %d bytes)", out.Size)
		}
	}
	return answer[readResult]{text: t, out: out}
}

func imageType(kind string) bool {
	switch kind {
	case "image/png", "image/jpeg", "image/gif", "image/webp":
		return true
	}
	return false
}

func imageName(path string) bool {
	p := strings.ToLower(path)
	for _, end := range [...]string{".png", ".jpg", ".jpeg", ".gif", ".webp"} {
		if strings.HasSuffix(p, end) {
			return true
		}
	}
	return false
}

func writeFile(ctx context.Context, c call, in writeInputFile) (answer[entry], error) {
	var none answer[entry]
	data := []byte(in.Text)
	if in.Base64 != "" {
		if in.Text != "" {
			return none, invalid("pass one of them", "both text and base64 are given")
		}
		var err error
		if data, err = base64.StdEncoding.DecodeString(in.Base64); err != nil {
			return none, invalid("encode the bytes in standard base64 with padding, or pass text", "base64 can't be decoded: %v", err)
		}
	}
	o := client.WriteOptions{User: in.User, Parents: true, Append: in.Append, Size: int64(len(data))}
	if in.Mode != "" {
		mode, err := strconv.ParseUint(in.Mode, 8, 32)
		if err != nil || mode > 0o7777 {
			return none, invalid("write it in octal, e.g. 0644 or 0755", "mode %q is none", in.Mode)
		}
		o.Mode = uint32(mode)
	}
	f, err := c.client.Files.Write(ctx, c.box, in.Path, strings.NewReader(string(data)), o)
	if err != nil {
		return none, err
	}
	e := entryOf(f)
	return answer[entry]{text: fmt.Sprintf("wrote %d bytes to %s", len(data), e.Path), out: e}, nil
}

func listFiles(ctx context.Context, c call, in listFilesInput) (answer[fileList], error) {
	path := in.Path
	if path == "" {
		path = "."
	}
	all, err := c.client.Files.List(ctx, c.box, path, in.User, in.Depth)
	if err != nil {
		return answer[fileList]{}, err
	}
	out := fileList{Omitted: max(0, len(all)-maxEntries)}
	all = all[:len(all)-out.Omitted]
	out.Files = make([]entry, len(all))
	var b strings.Builder
	for i, f := range all {
		e := entryOf(f)
		out.Files[i] = e
		fmt.Fprintf(&b, "%s %9d %s %s", e.Mode, e.Size, e.Modified, e.Path)
		switch {
		case e.Target != "":
			b.WriteString(" -> " + e.Target)
		case e.Type == "dir":
			b.WriteByte('/')
		}
		b.WriteByte('\n')
	}
	if len(all) == 0 {
		b.WriteString("(the directory is empty)\n")
	}
	if out.Omitted > 0 {
		fmt.Fprintf(&b, "[%d more; list a directory below, or less depth]\n", out.Omitted)
	}
	return answer[fileList]{text: strings.TrimSuffix(b.String(), "\n"), out: out}, nil
}
