package api

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/oci"
	"casemate.dev/internal/rootfs"
)

// fakeImages moves nothing: it tells what it was asked.
type fakeImages struct{}

var _ Images = fakeImages{}

// Pull implements Images.
func (fakeImages) Pull(_ context.Context, ref string, o oci.PullOptions, progress func(oci.Progress)) (oci.Imported, error) {
	progress(oci.Progress{Step: oci.StepFetch, Done: 1, Total: 2, Layers: []oci.LayerProgress{{Digest: "sha256:00", Size: 2, Fetched: 1}}})
	if strings.Contains(ref, "missing") {
		return oci.Imported{}, errs.New(errs.NotFound, "there is no %s", ref)
	}
	return oci.Imported{
		Template: rootfs.Stored{Name: o.Name, Source: ref, Digest: o.Auth.Username, Settings: rootfs.Settings{User: "app"}}, Warnings: []string{"careful"},
	}, nil
}

// Push implements Images.
func (fakeImages) Push(_ context.Context, src oci.Source, _ string, _ oci.Auth, progress func(oci.Progress)) (oci.Exported, error) {
	progress(oci.Progress{Step: oci.StepPack})
	return oci.Exported{Digest: "sha256:00", Layers: len(src.Template)}, nil
}

// Import implements Images.
func (fakeImages) Import(_ context.Context, r io.Reader, name string, _ func(oci.Progress)) (oci.Imported, error) {
	data, err := io.ReadAll(r)
	return oci.Imported{Template: rootfs.Stored{Name: name, SizeBytes: int64(len(data))}}, err
}

// Export implements Images.
func (fakeImages) Export(_ context.Context, src oci.Source, o oci.ExportOptions, w io.Writer, ready func(oci.Exported) error) (oci.Exported, error) {
	e := oci.Exported{Digest: "sha256:00", Tree: "sha256:11"}
	if err := ready(e); err != nil {
		return e, err
	}
	_, err := fmt.Fprintf(w, "%s %s %v", src.Template, o.Name, o.Docker)
	return e, err
}

// Images implements Images.
func (fakeImages) Images() []rootfs.Stored { return []rootfs.Stored{{Name: "app"}} }

// Delete implements Images.
func (fakeImages) Delete(name string) (rootfs.Stored, error) {
	return rootfs.Stored{Name: name}, nil
}

func (h *harness) client(key string) *client.Client {
	c, err := client.New(h.url, key)
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(c.Close)
	return c
}

// TestImages goes through the client: streams, archives both ways, secrets, and who may do what.
func TestImages(t *testing.T) {
	h := newHarness(t)
	c := h.client(h.admin)
	var steps []string
	img, warnings, err := c.Images.Pull(t.Context(), &client.PullImageRequest{Image: "example.com/app:1", Name: "app"}, func(p *client.ImageProgress) {
		steps = append(steps, p.GetStep())
	})
	if err != nil || img.GetName() != "app" || img.GetSettings().GetUser() != "app" || len(warnings) != 1 || len(steps) == 0 {
		t.Errorf("pull: %v %v %v %v", img, warnings, steps, err)
	}
	if _, _, err := c.Images.Pull(t.Context(), &client.PullImageRequest{Image: "example.com/missing"}, nil); client.KindOf(err) != client.NotFound {
		t.Errorf("pull of nothing: %v", err)
	}
	if _, _, err := c.Images.Pull(t.Context(), &client.PullImageRequest{Image: "example.com/app", Secret: "none"}, nil); client.KindOf(err) != client.NotFound {
		t.Errorf("a secret that is not there: %v", err)
	}
	if _, err := c.Secrets.Set(t.Context(), &client.SetSecretRequest{Name: "hub", Class: "tool", Value: "robot:a password"}); err != nil {
		t.Fatal(err)
	}
	if img, _, err = c.Images.Pull(t.Context(), &client.PullImageRequest{Image: "example.com/app", Name: "x", Secret: "hub"}, nil); err != nil || img.GetDigest() != "robot" {
		t.Errorf("with a secret: %v, %v", img, err)
	}
	if p, err := c.Images.Push(t.Context(), &client.PushImageRequest{Source: "host", Image: "example.com/copy"}, nil); err != nil || p.GetLayers() != 4 {
		t.Errorf("push: %v, %v", p, err)
	}
	if _, err := c.Images.Push(t.Context(), &client.PushImageRequest{Source: "nothing", Image: "example.com/copy"}, nil); client.KindOf(err) != client.NotFound {
		t.Errorf("push of nothing: %v", err)
	}
	if img, _, err := c.Images.Import(t.Context(), strings.NewReader("archive"), "loaded"); err != nil || img.GetSizeBytes() != 7 {
		t.Errorf("import: %v, %v", img, err)
	}
	r, out, err := c.Images.Export(t.Context(), "host", "docker", "")
	if err != nil || out.GetDigest() != "sha256:00" || out.GetTreeDigest() != "sha256:11" {
		t.Fatalf("export: %v, %v", out, err)
	}
	if data, err := io.ReadAll(r); err != nil || string(data) != "host host true" {
		t.Errorf("export: %q, %v", data, err)
	}
	_ = r.Close()
	if _, _, err := c.Images.Export(t.Context(), "host", "zip", ""); client.KindOf(err) != client.InvalidArgument {
		t.Errorf("a format that is none: %v", err)
	}
	user := h.client(h.user)
	if _, _, err := user.Images.Pull(t.Context(), &client.PullImageRequest{Image: "example.com/app"}, nil); client.KindOf(err) != client.PermissionDenied {
		t.Errorf("a pull without an admin key: %v", err)
	}
	if _, _, err := user.Images.Import(t.Context(), strings.NewReader("x"), "x"); client.KindOf(err) != client.PermissionDenied {
		t.Errorf("an import without an admin key: %v", err)
	}
	none := newHarness(t, func(c *Config) { c.Images = nil })
	if _, err := none.client(none.admin).Images.List(t.Context()); client.KindOf(err) != client.Unsupported {
		t.Errorf("a server that moves no images: %v", err)
	}
}

// TestImageFeeds: the streams have twins in plain HTTP.
func TestImageFeeds(t *testing.T) {
	h := newHarness(t)
	for _, tt := range []struct{ path, body, want string }{
		{"/v1/images/pull", `{"image":"example.com/app:1"}`, `"type":"pulled"`},
		{"/v1/images/push", `{"image":"example.com/app:1","source":"host"}`, `"type":"pushed"`},
	} {
		path, want := tt.path, tt.want
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, h.url+path, strings.NewReader(tt.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", h.admin)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err != nil || !strings.Contains(string(body), want) || !strings.Contains(string(body), `"type":"progress"`) {
			t.Errorf("%s: %s, %v", path, body, err)
		}
	}
}
