package api

import (
	"context"
	"maps"
	"runtime"
	"slices"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/policy"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// system implements SystemService.
type system struct{ *API }

var _ casematev1connect.SystemServiceHandler = (*system)(nil)

// GetVersion implements SystemServiceHandler.
func (h *system) GetVersion(context.Context, *v1.GetVersionRequest) (*v1.Version, error) {
	return &v1.Version{
		Version: h.cfg.Version, Go: runtime.Version(), Os: runtime.GOOS, Arch: runtime.GOARCH, ServerId: h.cfg.ServerID,
	}, nil
}

// GetHost implements SystemServiceHandler.
func (h *system) GetHost(ctx context.Context, _ *v1.GetHostRequest) (*v1.Host, error) {
	backends := h.cfg.Manager.Capabilities(ctx)
	resp := &v1.Host{Kernel: h.cfg.Kernel}
	for _, name := range slices.Sorted(maps.Keys(backends)) {
		b := &v1.Backend{Name: name, Default: name == h.cfg.Manager.DefaultIsolation()}
		for _, c := range backends[name] {
			b.Capabilities = append(b.Capabilities, &v1.Capability{
				Name: c.Name, Ok: c.OK, Required: c.Required, Detail: c.Detail, Remedy: c.Remedy,
			})
		}
		resp.Backends = append(resp.Backends, b)
	}
	return resp, nil
}

// ListTemplates implements SystemServiceHandler.
func (h *system) ListTemplates(ctx context.Context, _ *v1.ListTemplatesRequest) (*v1.ListTemplatesResponse, error) {
	all, err := h.cfg.Manager.Templates(ctx)
	if err != nil {
		return nil, err
	}
	resp := &v1.ListTemplatesResponse{}
	for _, t := range all {
		resp.Templates = append(resp.Templates, templateMessage(t))
	}
	return resp, h.addShared(ctx, resp)
}

// addShared adds the built templates that other keys share: who asks starts from them as from those of the server.
func (h *system) addShared(ctx context.Context, resp *v1.ListTemplatesResponse) error {
	shared, err := h.cfg.Manager.SharedTemplates(ctx)
	p := principalOf(ctx)
	for _, name := range slices.Sorted(maps.Keys(shared)) {
		if owner := shared[name]; owner == p.ID || p.Admin && p.Sandbox == "" {
			continue // ListBuilds shows it
		}
		c, cerr := h.cfg.Manager.GetCommit(ctx, p, name)
		if errs.Is(cerr, errs.NotFound) {
			continue // only its tags lead anywhere
		}
		if cerr != nil {
			return cerr
		}
		resp.Templates = append(resp.Templates, &v1.Template{
			Name: name, Description: "shared by " + shared[name], Profiles: c.Profiles, Ready: true, BuiltAt: stamp(c.CreatedAt),
		})
	}
	return err
}

// BuildTemplate implements SystemServiceHandler.
func (h *system) BuildTemplate(ctx context.Context, req *v1.BuildTemplateRequest, stream *connect.ServerStream[v1.BuildProgress]) error {
	send, stop := kept(h.API, stream, &v1.BuildProgress{Fraction: -1})
	defer stop()
	return h.buildTemplate(ctx, req, send)
}

// buildTemplate builds and sends what happens; the last message carries the template.
func (a *API) buildTemplate(ctx context.Context, req *v1.BuildTemplateRequest, send func(*v1.BuildProgress) error) error {
	if a.cfg.BuildTemplate == nil {
		return errs.New(errs.Unsupported, "this server builds no templates")
	}
	t, err := a.cfg.BuildTemplate(ctx, req.GetName(), req.GetForce(), func(step string, fraction float64, line string) {
		_ = send(&v1.BuildProgress{Step: step, Fraction: fraction, Line: line}) // a reader who left shows in ctx
	})
	if err != nil {
		return err
	}
	return send(&v1.BuildProgress{Fraction: 1, Template: templateMessage(t)})
}

// CreateKey implements SystemServiceHandler.
func (h *system) CreateKey(ctx context.Context, req *v1.CreateKeyRequest) (*v1.CreateKeyResponse, error) {
	k, secret, err := h.cfg.Keys.Create(ctx, policy.KeyOptions{Name: req.GetName(), Admin: req.GetAdmin(), E2B: req.GetE2B()})
	if err != nil {
		return nil, err
	}
	return &v1.CreateKeyResponse{Key: keyMessage(k), Secret: secret}, nil
}

// ListKeys implements SystemServiceHandler.
func (h *system) ListKeys(ctx context.Context, _ *v1.ListKeysRequest) (*v1.ListKeysResponse, error) {
	all, err := h.cfg.Keys.List(ctx)
	if err != nil {
		return nil, err
	}
	resp := &v1.ListKeysResponse{}
	for _, k := range all {
		resp.Keys = append(resp.Keys, keyMessage(k))
	}
	return resp, nil
}

// RevokeKey implements SystemServiceHandler.
func (h *system) RevokeKey(ctx context.Context, req *v1.RevokeKeyRequest) (*v1.Key, error) {
	k, err := h.cfg.Keys.Revoke(ctx, req.GetKey())
	if err != nil {
		return nil, err
	}
	return keyMessage(k), nil
}
