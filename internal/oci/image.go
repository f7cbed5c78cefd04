package oci

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
)

// maxLayers bounds the layers of an image, as container engines do.
const maxLayers = 127

// contents are an image's manifest and configuration, checked.
type contents struct {
	digest      v1.Hash // of the manifest
	kind        types.MediaType
	rawManifest []byte
	rawConfig   []byte
	manifest    *v1.Manifest
	config      *v1.ConfigFile
}

func digestOf(data []byte) v1.Hash {
	sum := sha256.Sum256(data)
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
}

func badImage(format string, args ...any) error {
	return errs.New(errs.InvalidArgument, format, args...)
}

// parseManifest reads a manifest and checks what it says of the layers. bytes bounds these together.
func parseManifest(kind types.MediaType, raw []byte, bytesMax int64) (*contents, error) {
	m, err := v1.ParseManifest(bytes.NewReader(raw))
	if err != nil {
		return nil, errs.Wrap(err, errs.InvalidArgument, "the image's manifest can't be read")
	}
	if m.SchemaVersion != 2 {
		return nil, errs.New(errs.Unsupported, "the image's manifest has version %d; push it again with a current tool", m.SchemaVersion)
	}
	if !m.Config.MediaType.IsConfig() && m.Config.MediaType != "" {
		return nil, errs.New(errs.Unsupported, "%q is no container image but an artifact of another kind", m.Config.MediaType)
	}
	if len(m.Layers) == 0 || len(m.Layers) > maxLayers {
		return nil, badImage("the image has %d layers: between 1 and %d are possible", len(m.Layers), maxLayers)
	}
	var sum int64
	for _, d := range m.Layers {
		if err := checkLayer(d); err != nil {
			return nil, err
		}
		if sum += d.Size; sum > bytesMax {
			return nil, errs.New(errs.TooLarge, "the image is larger than %d MB", bytesMax>>20).
				WithHint("if you trust it, start the server with a larger --max-image-size")
		}
	}
	if m.Config.Size < 0 || m.Config.Digest.Algorithm != "sha256" {
		return nil, badImage("the image's manifest names no configuration")
	}
	return &contents{digest: digestOf(raw), kind: kind, rawManifest: raw, manifest: m}, nil
}

// checkLayer refuses what is no layer that can be had from the registry itself.
func checkLayer(d v1.Descriptor) error {
	switch {
	case !d.MediaType.IsDistributable() || len(d.URLs) > 0:
		return errs.New(errs.Unsupported, "the image's layer %s is to be fetched from elsewhere than the registry", d.Digest).
			WithHint("build the image on a base whose layers are in the registry")
	case !d.MediaType.IsLayer():
		return errs.New(errs.Unsupported, "the image's layer %s has the unknown type %q", d.Digest, d.MediaType)
	case d.Digest.Algorithm != "sha256" || len(d.Digest.Hex) != 64:
		return errs.New(errs.Unsupported, "the image's layer has a digest that is no sha256")
	case d.Size < 0:
		return badImage("the image's layer %s has a negative size", d.Digest)
	}
	return nil
}

// withConfig adds the configuration, and checks it against the manifest and this machine.
func (c *contents) withConfig(raw []byte) error {
	if got := digestOf(raw); got != c.manifest.Config.Digest {
		return errs.New(errs.Unavailable, "the image's configuration is not the one of digest %s", c.manifest.Config.Digest)
	}
	cf, err := v1.ParseConfigFile(bytes.NewReader(raw))
	if err != nil {
		return errs.Wrap(err, errs.InvalidArgument, "the image's configuration can't be read")
	}
	if n := len(cf.RootFS.DiffIDs); n != len(c.manifest.Layers) {
		return badImage("the image's manifest has %d layers, and its configuration %d", len(c.manifest.Layers), n)
	}
	for _, d := range cf.RootFS.DiffIDs {
		if d.Algorithm != "sha256" || len(d.Hex) != 64 {
			return badImage("the image's configuration has a diff id that is no sha256")
		}
	}
	host := hostPlatform()
	if cf.OS != "" && cf.OS != host.OS || cf.Architecture != "" && cf.Architecture != host.Architecture {
		return errs.New(errs.Unsupported, "the image is for %s/%s, and this machine is %s", cf.OS, cf.Architecture, host)
	}
	c.rawConfig, c.config = raw, cf
	return nil
}

func hostPlatform() v1.Platform { return v1.Platform{OS: "linux", Architecture: runtime.GOARCH} }

// choose picks the manifest of an index that is for this machine; with nested also an index, where there is no
// manifest and only one index.
func choose(raw []byte, nested bool) (v1.Descriptor, error) {
	index, err := v1.ParseIndexManifest(bytes.NewReader(raw))
	if err != nil {
		return v1.Descriptor{}, errs.Wrap(err, errs.InvalidArgument, "the image's index can't be read")
	}
	host := hostPlatform()
	var fits, indexes []v1.Descriptor
	var others []string
	for _, d := range index.Manifests {
		if d.MediaType.IsIndex() {
			indexes = append(indexes, d)
		}
		if !d.MediaType.IsImage() || d.Annotations["vnd.docker.reference.type"] != "" {
			continue // attestations and the like
		}
		p := d.Platform
		switch {
		case p == nil || p.OS == "" && p.Architecture == "", p.OS == host.OS && p.Architecture == host.Architecture && commonVariant(p.Variant):
			fits = append(fits, d)
		default:
			others = append(others, p.String())
		}
	}
	if len(fits) == 0 && len(others) == 0 && len(indexes) == 1 && nested {
		return indexes[0], nil
	}
	if len(fits) == 0 {
		slices.Sort(others)
		return v1.Descriptor{}, errs.New(errs.Unsupported, "the image is not for this machine, %s: it is for %s", host, cmp.Or(strings.Join(others, ", "), "none"))
	}
	return fits[0], nil
}

// commonVariant reports whether every machine of an architecture runs a variant: amd64 v1 and arm64 v8 are their
// first (image-spec, image-index.md).
func commonVariant(v string) bool { return v == "" || v == "v1" || v == "v8" }

// chainIDs identify each layer together with those below it (image-spec, config.md, Layer ChainID), as hex.
func chainIDs(diffs []v1.Hash) []string {
	var all []string
	at := ""
	for _, d := range diffs {
		if at == "" {
			at = d.String()
		} else {
			at = digestOf([]byte(at + " " + d.String())).String()
		}
		all = append(all, strings.TrimPrefix(at, "sha256:"))
	}
	return all
}

// settingsOf is what an image's configuration says of the processes in it.
func settingsOf(c v1.Config) rootfs.Settings {
	s := rootfs.Settings{
		Env: c.Env, User: c.User, Dir: c.WorkingDir, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Labels: c.Labels,
		Exposed: sortedKeys(c.ExposedPorts), Volumes: sortedKeys(c.Volumes), Shell: c.Shell, StopSignal: c.StopSignal, OnBuild: c.OnBuild,
	}
	if h := c.Healthcheck; h != nil {
		s.Healthcheck = &rootfs.Healthcheck{
			Test: h.Test, Interval: h.Interval, Timeout: h.Timeout, StartPeriod: h.StartPeriod, Retries: h.Retries,
		}
	}
	return s
}

// configOf is the other way round.
func configOf(s rootfs.Settings) v1.Config {
	c := v1.Config{
		Env: s.Env, User: s.User, WorkingDir: s.Dir, Entrypoint: s.Entrypoint, Cmd: s.Cmd, Labels: s.Labels,
		ExposedPorts: setOf(s.Exposed), Volumes: setOf(s.Volumes), Shell: s.Shell, StopSignal: s.StopSignal, OnBuild: s.OnBuild,
	}
	if h := s.Healthcheck; h != nil {
		c.Healthcheck = &v1.HealthConfig{
			Test: h.Test, Interval: h.Interval, Timeout: h.Timeout, StartPeriod: h.StartPeriod, Retries: h.Retries,
		}
	}
	return c
}

func sortedKeys(m map[string]struct{}) []string { return slices.Sorted(maps.Keys(m)) }

func setOf(all []string) map[string]struct{} {
	if len(all) == 0 {
		return nil
	}
	m := make(map[string]struct{}, len(all))
	for _, s := range all {
		m[s] = struct{}{}
	}
	return m
}

// layerNote is what is kept with an imported layer: the archive that it came from.
type layerNote struct {
	Digest v1.Hash         `json:"digest"`
	Size   int64           `json:"size"`
	Kind   types.MediaType `json:"kind"`
	DiffID v1.Hash         `json:"diff_id"`
}

func (s *Service) layerNote(id string) (layerNote, error) {
	var n layerNote
	kept, _, err := s.cfg.Store.ImportedLayer(id)
	if err != nil {
		return n, err
	}
	if len(kept.Extra) == 0 {
		return n, fmt.Errorf("layer %s came from no archive", id)
	}
	return n, json.Unmarshal(kept.Extra, &n)
}

// imageNote is what is kept with an imported image.
type imageNote struct {
	Kind     types.MediaType `json:"kind"`
	Manifest []byte          `json:"manifest"`
	Config   []byte          `json:"config"`
}
