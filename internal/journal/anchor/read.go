package anchor

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"

	"casemate.dev/internal/errs"
)

// maxRead bounds what is read of one place.
const maxRead = 64 << 20

// Read returns the checkpoints that a place holds, a file or a URL of http or https, oldest first: each as it is, one behind
// the other, or as a line of base64. That they are checkpoints is not checked.
// Kinds: NotFound (no such file), Unavailable (the URL does not answer with them), InvalidArgument.
func Read(ctx context.Context, place string) ([][]byte, error) {
	var b []byte
	var err error
	if isURL(place) {
		b, err = get(ctx, place)
	} else {
		b, err = readFile(place)
	}
	if err != nil {
		return nil, err
	}
	return checkpoints(b), nil
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		var p *os.PathError
		if errors.As(err, &p) {
			err = p.Err // the path is named
		}
		return nil, errs.New(errs.NotFound, "cannot read the head %s: %v", path, err)
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, maxRead+1))
	if err != nil {
		return nil, errs.New(errs.Unavailable, "cannot read the head %s: %v", path, err)
	}
	return b, fits(path, b)
}

func fits(place string, b []byte) error {
	if len(b) > maxRead {
		return errs.New(errs.InvalidArgument, "the head %s has more than %d MiB", place, maxRead>>20)
	}
	return nil
}

func get(ctx context.Context, place string) ([]byte, error) {
	if err := Check(place); err != nil {
		return nil, err
	}
	fail := func(what error) error {
		return errs.New(errs.Unavailable, "cannot read the head %s: %v", shown(place), what)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, place, nil)
	if err != nil {
		return nil, fail(errors.New("the URL is malformed"))
	}
	resp, err := (&http.Client{Timeout: readTimeout}).Do(req)
	if err != nil {
		return nil, fail(withoutURL(err))
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return nil, fail(fmt.Errorf("it answers %s", resp.Status))
	}
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxRead+1))
	if err != nil {
		return nil, fail(withoutURL(err))
	}
	return b, fits(shown(place), b)
}

// withoutURL is an error of a request without its URL, which may hold a credential.
func withoutURL(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}
	return err
}

// signature begins the last lines of a signed note (C2SP signed-note).
const signature = "\u2014 "

// checkpoints takes apart what a place holds. What is none stays as it is, so that whoever reads it can say so.
func checkpoints(b []byte) (out [][]byte) {
	var note []byte
	signed := false // note has a signature
	for line := range bytes.Lines(b) {
		text := bytes.TrimSpace(line)
		one, err := base64.StdEncoding.DecodeString(string(text))
		switch {
		case err == nil && len(one) == 0 && len(note) == 0:
			continue
		case err == nil && bytes.Contains(one, []byte("\n"+signature)):
			if len(note) > 0 { // whatever stands before it, it is whole
				out, note, signed = append(out, note), nil, false
			}
			out = append(out, one)
			continue
		}
		is := bytes.HasPrefix(line, []byte(signature))
		if signed && !is { // the next one begins
			out, note, signed = append(out, note), nil, false
			if len(text) == 0 {
				continue
			}
		}
		note, signed = append(note, line...), signed || is
	}
	if len(note) > 0 {
		out = append(out, note)
	}
	return out
}
