package server

import (
	"context"
	"crypto/x509"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"

	"casemate.dev/internal/api"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation/namespace"
	"casemate.dev/internal/oci"
	"casemate.dev/internal/oci/layer"
	"casemate.dev/internal/oci/registry"
	"casemate.dev/internal/oci/worker"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/template"
)

// UnpackVerb is the program's first argument that makes it the process that unpacks an image's layer; see
// UnpackLayer.
const UnpackVerb = worker.Verb

// UnpackLayer is the process that unpacks a layer, which a server starts.
func UnpackLayer(args []string) error { return worker.Main(args) }

// ImageLimits bound what the layer of an image may unpack to; zero fields: the defaults of package oci/layer.
type ImageLimits = layer.Limits

// openImages makes what moves images.
func (s *Server) openImages(store *rootfs.Store, b *namespace.Backend) error {
	for _, host := range s.cfg.InsecureRegistries {
		if host == "" || strings.ContainsAny(host, "/@ *") {
			return errs.New(errs.InvalidArgument, "%q is no registry's host", host).WithHint("name it as HOST or HOST:PORT: --insecure-registry localhost:5000")
		}
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(s.trust.roots)
	var err error
	s.images, err = oci.New(oci.Config{
		Dir: filepath.Join(s.cfg.DataDir, "oci"), Store: store, ReserveID: b.ReserveID, Limits: s.cfg.ImageLimits,
		DockerConfig: s.cfg.DockerConfig, Log: s.log,
		Registry: registry.Config{Roots: pool, Insecure: s.cfg.InsecureRegistries, Proxy: s.registryProxy},
	})
	if err != nil {
		return fmt.Errorf("open images: %w", err)
	}
	s.undo.Add(s.images.Close)
	return nil
}

// registryProxy chooses the proxy for a request to a registry: the one that sandboxes' connections leave through, where
// one is set, else what the environment says.
func (s *Server) registryProxy(r *http.Request) (*url.URL, error) {
	if s.proxy == nil {
		return http.ProxyFromEnvironment(r)
	}
	p := s.currentProxy(context.WithoutCancel(r.Context()))
	port := uint64(443)
	if text := r.URL.Port(); text != "" {
		port, _ = strconv.ParseUint(text, 10, 16)
	}
	addr, _ := netip.ParseAddr(r.URL.Hostname())
	if p.Bypassed(strings.ToLower(r.URL.Hostname()), addr, uint16(port)) {
		return nil, nil
	}
	if p.Fault != "" {
		return nil, errs.New(errs.FailedPrecondition, "%s", p.Fault)
	}
	u := &url.URL{Scheme: "http", Host: p.String()}
	if p.TLS {
		u.Scheme = "https"
	}
	if user, password, ok := strings.Cut(string(p.Credentials), ":"); ok {
		u.User = url.UserPassword(user, password)
	}
	return u, nil
}

// imageAPI is what the API moves images with; nil where backends were injected.
func (s *Server) imageAPI() api.Images {
	if s.images == nil {
		return nil
	}
	return s.images
}

// imageCommits is what the builder pulls images with that its FROM names; nil where backends were injected.
func (s *Server) imageCommits() imageCommits {
	if s.images == nil {
		return nil
	}
	return func(ctx context.Context, p sandbox.Principal, ref string, auth template.Credentials, progress func(line string)) (sandbox.Commit, error) {
		return s.images.CommitOf(ctx, s.manager, p, ref, oci.Auth{Username: auth.User, Password: auth.Password}, progress)
	}
}

// imageCommits is as template.Config.Images.
type imageCommits = func(ctx context.Context, p sandbox.Principal, ref string, auth template.Credentials, progress func(line string)) (sandbox.Commit, error)

// scratch makes the template without files for whoever builds upon it; nil: no images are taken in.
func (s *Server) scratch() func(ctx context.Context) error {
	if s.images == nil {
		return nil
	}
	return s.images.Scratch
}
