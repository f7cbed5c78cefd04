package cli

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// incomplete reports whether code goes on in the next line. It guesses: who is not understood ends a
// block with an empty line.
func incomplete(language, code string) bool {
	lines := strings.Split(strings.TrimSuffix(code, "\n"), "\n")
	last := lines[len(lines)-1]
	s := scan(language, code)
	if s.open {
		// An empty line after an empty line is a way out where the guess is wrong.
		return len(lines) < 2 || last != "" || lines[len(lines)-2] != ""
	}
	if strings.HasSuffix(last, `\`) {
		return true
	}
	if language != "python" {
		return false
	}
	block := strings.HasPrefix(lines[0], "@")
	for _, l := range s.lines {
		block = block || strings.HasSuffix(strings.TrimSpace(l), ":")
	}
	return block && last != ""
}

// scanned is what code looks like without its strings and comments.
type scanned struct {
	open  bool // a bracket, a string or a block of a shell is not closed
	lines []string
}

func scan(language, code string) scanned {
	var out strings.Builder
	depth, quote := 0, ""
	for i := 0; i < len(code); {
		rest := code[i:]
		switch {
		case quote != "":
			switch {
			case strings.HasPrefix(rest, quote):
				i += len(quote)
				quote = ""
				continue
			case rest[0] == '\\' && (language != "bash" || quote != "'"):
				i++
			case rest[0] == '\n' && len(quote) == 1 && quote != "`" && language != "bash":
				quote = "" // a string that its line does not close is an error, and not ours
			}
		case language == "python" && (strings.HasPrefix(rest, `"""`) || strings.HasPrefix(rest, "'''")):
			quote = rest[:3]
			i += 2
		case rest[0] == '"' || rest[0] == '\'' || rest[0] == '`' && language != "python":
			quote = rest[:1]
		case comment(language, rest, out.String()):
			if n := strings.IndexByte(rest, '\n'); n > 0 {
				i += n - 1
			} else {
				i += len(rest)
			}
		case rest[0] == '\\':
			i++
		case strings.IndexByte("([{", rest[0]) >= 0:
			depth++
			out.WriteByte(rest[0])
		case strings.IndexByte(")]}", rest[0]) >= 0:
			depth--
			out.WriteByte(rest[0])
		default:
			out.WriteByte(rest[0])
		}
		i++
	}
	text := out.String()
	if language == "bash" {
		depth = 0 // case patterns and brackets of tests pair with nothing
		for _, w := range strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\n;&|()", r) }) {
			switch w {
			case "if", "do", "case", "{":
				depth++
			case "fi", "done", "esac", "}":
				depth--
			}
		}
	}
	return scanned{open: depth > 0 || quote != "" && (len(quote) == 3 || quote == "`" || language == "bash"), lines: strings.Split(text, "\n")}
}

func comment(language, rest, before string) bool {
	switch language {
	case "python":
		return rest[0] == '#'
	case "bash":
		return rest[0] == '#' && (before == "" || strings.ContainsRune(" \t\n;", rune(before[len(before)-1])))
	}
	return strings.HasPrefix(rest, "//")
}

// pictures saves what can't be shown in a terminal.
type pictures struct {
	dir   string // made at the first picture
	count int
}

// save writes the picture of a result to a file and returns its name, "" where there is none.
func (p *pictures) save(data map[string]string) (string, error) {
	for _, kind := range []struct {
		mime, extension string
		binary          bool
	}{
		{"image/png", "png", true}, {"image/jpeg", "jpg", true}, {"image/svg+xml", "svg", false}, {"application/pdf", "pdf", true},
	} {
		text, ok := data[kind.mime]
		if !ok {
			continue
		}
		body := []byte(text)
		if kind.binary {
			var err error
			if body, err = base64.StdEncoding.DecodeString(strings.Join(strings.Fields(text), "")); err != nil {
				return "", fmt.Errorf("decode %s: %w", kind.mime, err)
			}
		}
		return p.write(body, kind.extension)
	}
	return "", nil
}

func (p *pictures) write(body []byte, extension string) (string, error) {
	if p.dir == "" {
		dir, err := os.MkdirTemp("", "casemate-repl-")
		if err != nil {
			return "", err
		}
		p.dir = dir
	}
	p.count++
	path := filepath.Join(p.dir, fmt.Sprintf("%d.%s", p.count, extension))
	return path, os.WriteFile(path, body, 0o600)
}
