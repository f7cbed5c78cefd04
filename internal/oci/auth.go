package oci

import (
	"encoding/base64"
	"encoding/json"
	"os"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/oci/registry"
)

// Auth is what a registry is shown; the zero value: nothing.
type Auth = authn.AuthConfig

// RegistryOf returns the host and the port of the registry that an image's name names. Kinds: InvalidArgument.
func RegistryOf(image string) (host string, port uint16, err error) {
	r, err := registry.ParseRef(image)
	if err != nil {
		return "", 0, err
	}
	host, port = r.HostPort()
	return host, port, nil
}

// ParseAuth reads credentials as a secret holds them: USER:PASSWORD, or a token alone that the registry takes in
// the place of a password.
func ParseAuth(value string) Auth {
	value = strings.TrimSpace(value)
	if user, password, ok := strings.Cut(value, ":"); ok {
		return Auth{Username: user, Password: password}
	}
	return Auth{Username: "token", Password: value}
}

// maxDockerConfig bounds the file of credentials.
const maxDockerConfig = 1 << 20

// dockerConfig is the part of a docker config file that is read. Helpers are programs: they are not run.
type dockerConfig struct {
	Auths map[string]struct {
		Auth          string `json:"auth"`
		Username      string `json:"username"`
		Password      string `json:"password"`
		IdentityToken string `json:"identitytoken"`
	} `json:"auths"`
}

// authFor returns what a registry is shown: what the caller gave, else what the server's file has for it.
func (s *Service) authFor(r registry.Ref, given Auth) (Auth, error) {
	if given != (Auth{}) || s.cfg.DockerConfig == "" {
		return given, nil
	}
	data, err := os.ReadFile(s.cfg.DockerConfig)
	if err != nil {
		return given, errs.Wrap(err, errs.FailedPrecondition, "the file of registries' credentials can't be read").
			WithHint("see casemate serve --docker-config")
	}
	var c dockerConfig
	if err := json.Unmarshal(data[:min(len(data), maxDockerConfig)], &c); err != nil {
		return given, errs.Wrap(err, errs.FailedPrecondition, "the file of registries' credentials is no JSON")
	}
	for key, a := range c.Auths {
		if !sameRegistry(key, r.Host()) {
			continue
		}
		out := Auth{Username: a.Username, Password: a.Password, IdentityToken: a.IdentityToken}
		if text, err := base64.StdEncoding.DecodeString(a.Auth); err == nil && len(text) > 0 {
			out.Username, out.Password, _ = strings.Cut(string(text), ":")
		}
		return out, nil
	}
	return given, nil
}

// sameRegistry reports whether a key of a docker config file, a host or a URL, means a registry's host.
func sameRegistry(key, host string) bool {
	key = strings.TrimPrefix(strings.TrimPrefix(key, "https://"), "http://")
	key, _, _ = strings.Cut(key, "/")
	hub := func(s string) string { // Docker Hub has several names
		if s == "docker.io" || s == "registry-1.docker.io" {
			return "index.docker.io"
		}
		return s
	}
	return strings.EqualFold(hub(key), hub(host))
}
