package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/httpfile"
	"casemate.dev/internal/oci"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Images is what the API needs of package oci; oci.Service implements it.
type Images interface {
	Pull(ctx context.Context, ref string, o oci.PullOptions, progress func(oci.Progress)) (oci.Imported, error)
	Push(ctx context.Context, src oci.Source, ref string, auth oci.Auth, progress func(oci.Progress)) (oci.Exported, error)
	Import(ctx context.Context, r io.Reader, name string, progress func(oci.Progress)) (oci.Imported, error)
	Export(ctx context.Context, src oci.Source, o oci.ExportOptions, w io.Writer, ready func(oci.Exported) error) (oci.Exported, error)
	Images() []rootfs.Stored
	Delete(name string) (rootfs.Stored, error)
}

// images implements ImageService.
type images struct{ *API }

var _ casematev1connect.ImageServiceHandler = (*images)(nil)

// moves returns what moves images.
func (a *API) moves() (Images, error) {
	if a.cfg.Images == nil {
		return nil, errs.New(errs.Unsupported, "this server moves no images")
	}
	return a.cfg.Images, nil
}

// PullImage implements ImageServiceHandler.
func (h *images) PullImage(ctx context.Context, req *v1.PullImageRequest, stream *connect.ServerStream[v1.ImageProgress]) error {
	send, stop := kept(h.API, stream, &v1.ImageProgress{})
	defer stop()
	return h.pullImage(ctx, req, send)
}

// pullImage pulls and sends what happens; the last message carries the image.
func (a *API) pullImage(ctx context.Context, req *v1.PullImageRequest, send func(*v1.ImageProgress) error) error {
	m, err := a.moves()
	if err != nil {
		return err
	}
	auth, err := a.registryAuth(ctx, req.GetSecret(), req.GetImage())
	if err != nil {
		return err
	}
	got, err := m.Pull(ctx, req.GetImage(), oci.PullOptions{Name: req.GetName(), Auth: auth}, sendProgress(send))
	if err != nil {
		return err
	}
	return send(&v1.ImageProgress{Image: imageMessage(got.Template), Warnings: got.Warnings})
}

// sendProgress sends what has changed; a reader who left shows in the context.
func sendProgress(send func(*v1.ImageProgress) error) func(oci.Progress) {
	var last *v1.ImageProgress
	return func(p oci.Progress) {
		m := &v1.ImageProgress{Step: p.Step, DoneBytes: p.Done, TotalBytes: p.Total}
		for _, l := range p.Layers {
			m.Layers = append(m.Layers, &v1.ImageLayer{
				Digest: l.Digest, SizeBytes: l.Size, FetchedBytes: l.Fetched, UnpackedBytes: l.Unpacked, Present: l.Present,
			})
		}
		if last == nil || !proto.Equal(m, last) {
			last = m
			_ = send(m)
		}
	}
}

// registryAuth returns what the secret that a caller names holds for the registry of an image.
func (a *API) registryAuth(ctx context.Context, name, image string) (oci.Auth, error) {
	if name == "" {
		return oci.Auth{}, nil
	}
	if a.cfg.Secrets == nil {
		return oci.Auth{}, errs.New(errs.Unsupported, "this server keeps no secrets")
	}
	host, port, err := oci.RegistryOf(image)
	if err != nil {
		return oci.Auth{}, err
	}
	v, err := a.cfg.Secrets.ForHost(ctx, policy.SecretCaller(principalOf(ctx)), name, host, port)
	if err != nil {
		return oci.Auth{}, err
	}
	text := v.Reveal()
	defer clear(text)
	return oci.ParseAuth(string(text)), nil
}

// PushImage implements ImageServiceHandler.
func (h *images) PushImage(ctx context.Context, req *v1.PushImageRequest, stream *connect.ServerStream[v1.ImageProgress]) error {
	send, stop := kept(h.API, stream, &v1.ImageProgress{})
	defer stop()
	return h.pushImage(ctx, req, send)
}

// pushImage pushes and sends what happens; the last message carries what was pushed.
func (a *API) pushImage(ctx context.Context, req *v1.PushImageRequest, send func(*v1.ImageProgress) error) error {
	m, err := a.moves()
	if err != nil {
		return err
	}
	auth, err := a.registryAuth(ctx, req.GetSecret(), req.GetImage())
	if err != nil {
		return err
	}
	src, err := a.imageSource(ctx, req.GetSource())
	if err != nil {
		return err
	}
	e, err := m.Push(ctx, src, req.GetImage(), auth, sendProgress(send))
	if err != nil {
		return err
	}
	return send(&v1.ImageProgress{Pushed: pushedMessage(e)})
}

// imageSource finds the template or the commit that a reference names, as a create does.
func (a *API) imageSource(ctx context.Context, ref string) (oci.Source, error) {
	if ref == "" {
		return oci.Source{}, errs.New(errs.InvalidArgument, "no source is named: a template or a commit")
	}
	all, err := a.cfg.Manager.Templates(ctx)
	if err != nil {
		return oci.Source{}, err
	}
	if slices.ContainsFunc(all, func(t sandbox.Template) bool { return t.Name == ref }) {
		return oci.Source{Template: ref}, nil
	}
	c, err := a.cfg.Manager.GetCommit(ctx, principalOf(ctx), ref)
	if errs.Is(err, errs.NotFound) {
		return oci.Source{}, errs.Wrap(err, errs.NotFound, "%.200q is neither a template nor a commit", ref).
			WithHint("casemate template ls and casemate log show them")
	}
	if err != nil {
		return oci.Source{}, err
	}
	return oci.Source{Layer: c.Layer(), Commit: c.ID, Message: c.Message, Settings: c.Spec.Image}, nil
}

// ImportImage implements ImageServiceHandler.
func (h *images) ImportImage(ctx context.Context, stream *connect.ClientStream[v1.ImportImageRequest]) (*v1.ImportImageResponse, error) {
	m, err := h.moves()
	if err != nil {
		return nil, err
	}
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, errs.New(errs.InvalidArgument, "the stream ended before its first message")
	}
	body := &messageReader[v1.ImportImageRequest, *v1.ImportImageRequest]{stream: stream, rest: stream.Msg().GetData()}
	got, err := m.Import(ctx, body, stream.Msg().GetName(), func(oci.Progress) {})
	if err != nil {
		return nil, err
	}
	return &v1.ImportImageResponse{Image: imageMessage(got.Template), Warnings: got.Warnings}, nil
}

// ExportImage implements ImageServiceHandler.
func (h *images) ExportImage(ctx context.Context, req *v1.ExportImageRequest, stream *connect.ServerStream[v1.ExportImageResponse]) error {
	return h.exportImage(ctx, req, writerFunc(func(b []byte) error {
		return stream.Send(&v1.ExportImageResponse{Data: b})
	}), func(e oci.Exported) error { return stream.Send(&v1.ExportImageResponse{Image: pushedMessage(e)}) })
}

func (a *API) exportImage(ctx context.Context, req *v1.ExportImageRequest, w io.Writer, ready func(oci.Exported) error) error {
	m, err := a.moves()
	if err != nil {
		return err
	}
	o := oci.ExportOptions{Name: req.GetName(), Docker: req.GetFormat() == "docker"}
	if f := req.GetFormat(); f != "" && f != "oci" && !o.Docker {
		return errs.New(errs.InvalidArgument, "the format is %.40q", f).WithHint("use oci or docker")
	}
	src, err := a.imageSource(ctx, req.GetSource())
	if err != nil {
		return err
	}
	if o.Name == "" {
		o.Name = src.Template
	}
	_, err = m.Export(ctx, src, o, w, ready)
	return err
}

// ListImages implements ImageServiceHandler.
func (h *images) ListImages(context.Context, *v1.ListImagesRequest) (*v1.ListImagesResponse, error) {
	m, err := h.moves()
	if err != nil {
		return nil, err
	}
	out := &v1.ListImagesResponse{}
	for _, t := range m.Images() {
		out.Images = append(out.Images, imageMessage(t))
	}
	return out, nil
}

// DeleteImage implements ImageServiceHandler.
func (h *images) DeleteImage(_ context.Context, req *v1.DeleteImageRequest) (*v1.Image, error) {
	m, err := h.moves()
	if err != nil {
		return nil, err
	}
	t, err := m.Delete(req.GetName())
	if err != nil {
		return nil, err
	}
	return imageMessage(t), nil
}

func imageMessage(t rootfs.Stored) *v1.Image {
	s := t.Settings
	return &v1.Image{
		Name: t.Name, Source: t.Source, Digest: t.Digest, MadeAt: stamp(t.Made), SizeBytes: t.SizeBytes, Profiles: t.Profiles, TreeDigest: t.Tree,
		Settings: &v1.ImageSettings{
			Env: s.Env, User: s.User, WorkingDir: s.Dir, Entrypoint: s.Entrypoint, Cmd: s.Cmd, Labels: s.Labels,
			ExposedPorts: s.Exposed, Volumes: s.Volumes, Shell: s.Shell, StopSignal: s.StopSignal,
		},
	}
}

func pushedMessage(e oci.Exported) *v1.PushedImage {
	return &v1.PushedImage{Digest: e.Digest, SizeBytes: e.Size, Layers: clamp32(e.Layers), TreeDigest: e.Tree}
}

// progressItem is one item of the feeds of pull and push.
type progressItem struct {
	Type     string   `json:"type"`
	Step     string   `json:"step,omitempty"`
	Done     int64    `json:"doneBytes"`
	Total    int64    `json:"totalBytes"`
	Image    *raw     `json:"image,omitempty"`
	Pushed   *raw     `json:"pushed,omitempty"`
	Warnings []string `json:"warnings,omitempty"`
}

// sendItem sends progress over a feed.
func sendItem(f *feed) func(*v1.ImageProgress) error {
	return func(m *v1.ImageProgress) error {
		it := progressItem{Type: "progress", Step: m.GetStep(), Done: m.GetDoneBytes(), Total: m.GetTotalBytes(), Warnings: m.GetWarnings()}
		if m.GetImage() != nil {
			it.Type, it.Image = "pulled", &raw{m.GetImage()}
		}
		if m.GetPushed() != nil {
			it.Type, it.Pushed = "pushed", &raw{m.GetPushed()}
		}
		return f.item(it.Type, "", it)
	}
}

// servePull is the twin of ImageService.PullImage.
func (a *API) servePull(w http.ResponseWriter, r *http.Request) error {
	req := &v1.PullImageRequest{}
	if err := readMessage(w, r, req); err != nil {
		return err
	}
	f := a.newFeed(w, r)
	defer f.beat.Stop()
	return a.endFeed(r.Context(), f, "pull", a.pullImage(r.Context(), req, sendItem(f)))
}

// servePush is the twin of ImageService.PushImage.
func (a *API) servePush(w http.ResponseWriter, r *http.Request) error {
	req := &v1.PushImageRequest{}
	if err := readMessage(w, r, req); err != nil {
		return err
	}
	f := a.newFeed(w, r)
	defer f.beat.Stop()
	return a.endFeed(r.Context(), f, "push", a.pushImage(r.Context(), req, sendItem(f)))
}

// saveArchive is the twin of ImageService.ImportImage: PUT.
func (a *API) saveArchive(w http.ResponseWriter, r *http.Request) error {
	m, err := a.moves()
	if err != nil {
		return err
	}
	body := httpfile.NewBody(r.Body)
	got, err := m.Import(r.Context(), body, r.URL.Query().Get("name"), func(oci.Progress) {})
	if body.Err() != nil {
		return errs.Wrap(errors.Join(body.Err(), err), errs.InvalidArgument, "the request's body broke off; nothing was imported")
	}
	if err != nil {
		return err
	}
	return writeMessage(w, &v1.ImportImageResponse{Image: imageMessage(got.Template), Warnings: got.Warnings})
}

// serveArchive is the twin of ImageService.ExportImage: GET.
func (a *API) serveArchive(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	req := &v1.ExportImageRequest{Source: q.Get("source"), Format: q.Get("format"), Name: q.Get("name")}
	began := false
	err := a.exportImage(r.Context(), req, w, func(e oci.Exported) error {
		began = true
		h := w.Header()
		h.Set("Content-Type", "application/x-tar")
		h.Set("Content-Disposition", disposition(url.PathEscape(req.GetSource())+".tar"))
		h.Set("Casemate-Image-Digest", e.Digest)
		if e.Tree != "" {
			h.Set("Casemate-Tree-Digest", e.Tree)
		}
		w.WriteHeader(http.StatusOK)
		return nil
	})
	if err != nil && began {
		panic(http.ErrAbortHandler) // the status is out: only a cut connection can tell
	}
	return err
}
