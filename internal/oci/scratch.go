package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
)

// scratch is the name of the template that holds no files.
const scratch = "scratch"

// Scratch makes the template that a build FROM scratch begins with: an image without files. One that is there stays.
func (s *Service) Scratch(ctx context.Context) error {
	if _, err := s.cfg.Store.StoredTemplate(scratch); err == nil {
		return nil
	}
	data, err := emptyImage()
	if err != nil {
		return err
	}
	_, err = s.Import(ctx, bytes.NewReader(data), scratch, func(Progress) {})
	return err
}

// emptyImage is the archive of an image without files, as docker save writes them.
func emptyImage() ([]byte, error) {
	var layer, out bytes.Buffer
	if err := tar.NewWriter(&layer).Close(); err != nil {
		return nil, err
	}
	p := hostPlatform()
	// The environment is the one that container engines begin with.
	config := fmt.Sprintf(`{"architecture":%q,"os":%q,"config":{"Env":["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},"rootfs":{"type":"layers","diff_ids":[%q]}}`,
		p.Architecture, p.OS, digestOf(layer.Bytes()))
	w := tar.NewWriter(&out)
	for _, f := range []struct{ name, data string }{
		{"config.json", config},
		{"layer.tar", layer.String()},
		{dockerFile, `[{"Config":"config.json","RepoTags":["` + scratch + `:latest"],"Layers":["layer.tar"]}]`},
	} {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(f.data))}); err != nil {
			return nil, err
		}
		if _, err := io.WriteString(w, f.data); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), w.Close()
}
