package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/oci/layer"
	"casemate.dev/internal/oci/registry"
	"casemate.dev/internal/oci/worker"
	"casemate.dev/internal/rootfs"
)

// PullOptions go with a Pull.
type PullOptions struct {
	// Name is the template's; "": the image's, as people write it.
	Name string
	// Auth is what the registry is shown; zero: what the server's file of credentials has for it, or nothing.
	Auth Auth
}

// Imported is what an import came to.
type Imported struct {
	Template rootfs.Stored
	// Warnings say what is different here than in the image.
	Warnings []string
}

// Pull brings an image of a registry here and makes a template of it, in the place of one that has its name.
// What is here already is not fetched again. progress is called until it returns.
// Kinds: InvalidArgument, NotFound, Unauthenticated, PermissionDenied, Unavailable, Unsupported, TooLarge, ResourceExhausted.
func (s *Service) Pull(ctx context.Context, ref string, o PullOptions, progress func(Progress)) (Imported, error) {
	r, err := registry.ParseRef(ref)
	if err != nil {
		return Imported{}, err
	}
	name, err := templateName(o.Name, r.Short())
	if err != nil {
		return Imported{}, err
	}
	defer s.begin()()
	t := &tracker{step: StepResolve}
	current := &atomic.Pointer[tracker]{}
	current.Store(t)
	defer tell(ctx, current, progress)()
	auth, err := s.authFor(r, o.Auth)
	if err != nil {
		return Imported{}, err
	}
	repo, err := s.remote.Open(ctx, r, auth, false)
	if err != nil {
		return Imported{}, err
	}
	c, err := s.resolve(ctx, repo)
	if err != nil {
		return Imported{}, err
	}
	fetch := func(ctx context.Context, d v1.Descriptor, done *atomic.Int64) error {
		return s.fetchBlob(ctx, repo, d, done)
	}
	warnings, err := s.importShared(ctx, c, fetch, t, current)
	if err != nil {
		return Imported{}, err
	}
	return s.name(c, name, r.String(), warnings)
}

// resolve fetches the manifest that is for this machine, and its configuration.
func (s *Service) resolve(ctx context.Context, repo *registry.Repo) (*contents, error) {
	kind, raw, err := repo.Manifest(ctx)
	if err != nil {
		return nil, err
	}
	if kind.IsIndex() {
		d, err := choose(raw, false)
		if err != nil {
			return nil, err
		}
		if d.Size > registry.MaxManifest {
			return nil, errs.New(errs.TooLarge, "the image's manifest is larger than %d MB", registry.MaxManifest>>20)
		}
		if raw, err = repo.ManifestOf(ctx, d); err != nil {
			return nil, err
		}
		kind = d.MediaType
	}
	if !kind.IsImage() {
		return nil, errs.New(errs.Unsupported, "the registry's manifest has the unknown type %q", kind)
	}
	c, err := parseManifest(kind, raw, s.maxBytes())
	if err != nil {
		return nil, err
	}
	config, err := s.smallBlob(ctx, repo, c.manifest.Config)
	if err != nil {
		return nil, err
	}
	return c, c.withConfig(config)
}

// maxBytes bounds an image's archives together.
func (s *Service) maxBytes() int64 { return s.cfg.Limits.Filled().Bytes }

// smallBlob fetches a configuration.
func (s *Service) smallBlob(ctx context.Context, repo *registry.Repo, d v1.Descriptor) ([]byte, error) {
	if d.Size > registry.MaxManifest {
		return nil, errs.New(errs.TooLarge, "the image's configuration is larger than %d MB", registry.MaxManifest>>20)
	}
	f, err := os.CreateTemp(s.workDir(), "config-")
	if err != nil {
		return nil, err
	}
	defer func() {
		_ = f.Close()
		if err := os.Remove(f.Name()); err != nil {
			s.log.Warn("remove a configuration", "error", err)
		}
	}()
	if err := repo.Fetch(ctx, d, f, &atomic.Int64{}); err != nil {
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return io.ReadAll(f)
}

// fetcher brings a layer's archive here.
type fetcher func(ctx context.Context, d v1.Descriptor, done *atomic.Int64) error

// importShared imports an image, together with whoever imports the same one.
func (s *Service) importShared(ctx context.Context, c *contents, fetch fetcher, t *tracker, current *atomic.Pointer[tracker]) ([]string, error) {
	v, err := s.images.do(ctx, c.digest.Hex, t, func(shared any) {
		if other, ok := shared.(*tracker); ok {
			current.Store(other)
		}
	}, func(ctx context.Context) (any, error) { return s.importImage(ctx, c, fetch, t) })
	warnings, _ := v.([]string)
	return warnings, err
}

// arriving is one layer of an image on its way in.
type arriving struct {
	id     string // its chain's
	desc   v1.Descriptor
	diff   v1.Hash
	track  *layerTrack
	draft  *rootfs.Draft
	result layer.Result
}

// importImage fetches and unpacks the layers that are not here, all at once, and puts them on each other then.
func (s *Service) importImage(ctx context.Context, c *contents, fetch fetcher, t *tracker) (warnings []string, err error) {
	t.set(StepFetch)
	ids := chainIDs(c.config.RootFS.DiffIDs)
	var missing []*arriving
	for i, d := range c.manifest.Layers {
		a := &arriving{id: ids[i], desc: d, diff: c.config.RootFS.DiffIDs[i], track: t.add(d.Digest.String(), d.Size)}
		if _, _, err := s.cfg.Store.ImportedLayer(a.id); err == nil {
			a.track.present.Store(true)
			continue
		}
		missing = append(missing, a)
	}
	defer func() {
		for _, a := range missing {
			if a.draft != nil {
				a.draft.Discard()
			}
		}
	}()
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(jobs)
	for _, a := range missing {
		g.Go(func() error { return s.bring(gctx, a, fetch) })
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	t.set(StepKeep)
	for _, a := range missing {
		if err := s.put(ctx, a, ids); err != nil {
			return nil, err
		}
		warnings = append(warnings, warningsOf(a)...)
	}
	if err := s.checkTree(ctx, c, ids); err != nil {
		return nil, err
	}
	return warnings, s.putImage(ctx, c, ids, &warnings)
}

// bring fetches and unpacks one layer.
func (s *Service) bring(ctx context.Context, a *arriving, fetch fetcher) error {
	if err := fetch(ctx, a.desc, &a.track.fetched); err != nil {
		return err
	}
	select {
	case s.unpacks <- struct{}{}:
		defer func() { <-s.unpacks }()
	case <-ctx.Done():
		return ctx.Err()
	}
	blob, err := os.Open(s.blobPath(a.desc.Digest))
	if err != nil {
		return err
	}
	defer blob.Close()
	if a.draft, err = s.cfg.Store.NewDraft(); err != nil {
		return err
	}
	first, release, err := s.cfg.ReserveID()
	if err != nil {
		return err
	}
	defer release()
	defer follow(blob, a.track)()
	a.result, err = s.cfg.Unpack(ctx, worker.Job{
		Blob: blob, Size: a.desc.Size, Root: a.draft.Root(), FirstID: first, Limits: s.cfg.Limits, Free: a.draft.Free, Reserve: reserve,
	})
	if err != nil {
		return fmt.Errorf("unpack %s: %w", a.desc.Digest, err)
	}
	a.track.unpacked.Store(a.desc.Size)
	if a.result.DiffID != a.diff.String() {
		return badImage("the image's layer %s unpacks to %s, and its configuration says %s", a.desc.Digest, a.result.DiffID, a.diff)
	}
	return nil
}

// follow tells how far a worker has read a blob: it reads through the same open file.
func follow(blob *os.File, t *layerTrack) (stop func()) {
	done, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(tellEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if at, err := blob.Seek(0, io.SeekCurrent); err == nil {
					t.unpacked.Store(min(at, t.size))
				}
			case <-done:
				return
			}
		}
	}()
	return func() { close(done); <-stopped }
}

// put lays a layer on those below it.
func (s *Service) put(ctx context.Context, a *arriving, ids []string) error {
	extra, err := json.Marshal(layerNote{Digest: a.desc.Digest, Size: a.desc.Size, Kind: a.desc.MediaType, DiffID: a.diff})
	if err != nil {
		return err
	}
	var below []string
	for _, id := range ids {
		if id == a.id {
			break
		}
		below = append(below, id)
	}
	return a.draft.Finish(ctx, a.id, rootfs.Fit{Below: below, Implied: a.result.Implied, Whiteouts: a.result.Whiteouts},
		rootfs.LayerNote{SizeBytes: a.result.Bytes, Files: a.result.Files, Extra: extra})
}

func warningsOf(a *arriving) (all []string) {
	if n := a.result.Nobodies; n > 0 {
		all = append(all, fmt.Sprintf("layer %.19s: %d files belong to ids above 65535, which no sandbox has; here they belong to nobody (65534)", a.desc.Digest, n))
	}
	if n := a.result.Attributes; n > 0 {
		all = append(all, fmt.Sprintf("layer %.19s: %d extended attributes mean nothing in a sandbox and were left out", a.desc.Digest, n))
	}
	return all
}

// putImage keeps the image, with the directory that its processes start in.
func (s *Service) putImage(ctx context.Context, c *contents, ids []string, warnings *[]string) error {
	extra, err := json.Marshal(imageNote{Kind: c.kind, Manifest: c.rawManifest, Config: c.rawConfig})
	if err != nil {
		return err
	}
	layers := ids
	if dir := strings.Trim(c.config.Config.WorkingDir, "/"); dir != "" {
		top, err := s.workingDir(ctx, ids, dir)
		switch {
		case errs.Is(err, errs.InvalidArgument):
			*warnings = append(*warnings, fmt.Sprintf("the image's working directory /%s is not there and can't be made", dir))
		case err != nil:
			return err
		case top != "":
			layers = append(layers[:len(layers):len(layers)], top)
		}
	}
	return s.cfg.Store.PutImage(ctx, rootfs.Image{ID: c.digest.Hex, Layers: layers, Extra: extra})
}

// workingDir makes a layer with the image's working directory where its own layers have none, as container engines
// do when a container starts; "": they have it.
func (s *Service) workingDir(ctx context.Context, ids []string, dir string) (string, error) {
	shown, err := s.cfg.Store.ShowsDir(ids, dir)
	if shown || err != nil {
		return "", err
	}
	names := strings.FieldsFunc(dir, func(r rune) bool { return r == '/' })
	for _, n := range names {
		if n == "." || n == ".." || len(n) > 255 {
			return "", badImage("%q is no directory", dir)
		}
	}
	d, err := s.cfg.Store.NewDraft()
	if err != nil {
		return "", err
	}
	defer d.Discard()
	if err := os.MkdirAll(d.Root()+"/"+strings.Join(names, "/"), 0o755); err != nil {
		return "", err
	}
	implied := []string{"."}
	for i := range names[:len(names)-1] {
		implied = append(implied, strings.Join(names[:i+1], "/"))
	}
	id := digestOf([]byte(ids[len(ids)-1] + " directory " + dir)).Hex
	return id, d.Finish(ctx, id, rootfs.Fit{Below: ids, Implied: implied}, rootfs.LayerNote{Files: 1})
}

// name makes a template of an image that is here.
func (s *Service) name(c *contents, name, source string, warnings []string) (Imported, error) {
	t := rootfs.Stored{
		Name: name, Image: c.digest.Hex, Settings: settingsOf(c.config.Config), Source: source, Digest: c.digest.String(),
		Made: time.Now().UTC(), Tree: c.tree(),
	}
	for _, id := range chainIDs(c.config.RootFS.DiffIDs) {
		n, _, err := s.cfg.Store.ImportedLayer(id)
		if err != nil {
			return Imported{}, err
		}
		t.SizeBytes += n.SizeBytes
	}
	if err := s.cfg.Store.PutTemplate(t); err != nil {
		return Imported{}, err
	}
	got, err := s.cfg.Store.StoredTemplate(name)
	return Imported{Template: got, Warnings: warnings}, err
}

// maxName is the longest name of a template.
const maxName = 128

// templateName checks a template's name, and takes one from the image where none is given.
func templateName(given, image string) (string, error) {
	name := given
	if name == "" {
		name = image
	}
	lowerOrNum := func(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }
	ok := name != "" && len(name) <= maxName && lowerOrNum(name[0]) && lowerOrNum(name[len(name)-1]) && !strings.HasPrefix(name, "cmt_")
	for i := range len(name) {
		ok = ok && (lowerOrNum(name[i]) || strings.IndexByte("._/:-", name[i]) >= 0)
	}
	if !ok {
		return "", errs.New(errs.InvalidArgument, "%.150q can't be a template's name", name).
			WithHint("choose one of lower-case letters, digits and . _ / : -, with --name")
	}
	return name, nil
}

// mirror copies a counter to another until stop is closed.
func mirror(from, to *atomic.Int64, stop <-chan struct{}) {
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for {
		to.Store(from.Load())
		select {
		case <-tick.C:
		case <-stop:
			return
		}
	}
}
