package e2b

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/template"
)

// defaultTag is the tag of a template that names none, and the only one of those that come with the server.
const defaultTag = "default"

// templateJSON is a template in a list.
type templateJSON struct {
	TemplateID    string     `json:"templateID"`
	BuildID       string     `json:"buildID"`
	CPUCount      int        `json:"cpuCount"`
	MemoryMB      int64      `json:"memoryMB"`
	DiskSizeMB    int64      `json:"diskSizeMB"`
	Public        bool       `json:"public"`
	Names         []string   `json:"names"`
	Aliases       []string   `json:"aliases"`
	CreatedAt     time.Time  `json:"createdAt"`
	UpdatedAt     time.Time  `json:"updatedAt"`
	CreatedBy     *struct{}  `json:"createdBy"`
	LastSpawnedAt *time.Time `json:"lastSpawnedAt"`
	SpawnCount    int        `json:"spawnCount"`
	BuildCount    int        `json:"buildCount"`
	EnvdVersion   string     `json:"envdVersion"`
	BuildStatus   string     `json:"buildStatus"`
}

// buildJSON is one build of a template.
type buildJSON struct {
	BuildID     string    `json:"buildID"`
	Status      string    `json:"status"`
	CreatedAt   time.Time `json:"createdAt"`
	UpdatedAt   time.Time `json:"updatedAt"`
	FinishedAt  time.Time `json:"finishedAt,omitzero"`
	CPUCount    int       `json:"cpuCount"`
	MemoryMB    int64     `json:"memoryMB"`
	DiskSizeMB  int64     `json:"diskSizeMB"`
	EnvdVersion string    `json:"envdVersion"`
}

// buildID is a UUID that stays the same for the same build of a template.
func buildID(t sandbox.Template) string {
	sum := sha256.Sum256([]byte(t.Name + t.BuiltAt.UTC().Format(time.RFC3339Nano)))
	return fmt.Sprintf("%x-%x-4%03x-8%03x-%x", sum[:4], sum[4:6], uint(sum[6])<<4|uint(sum[7])>>4, uint(sum[8])<<4|uint(sum[9])>>4, sum[10:16])
}

// templateShape tells of a template. Its sizes are those of a sandbox that names no limits.
func templateShape(t sandbox.Template) templateJSON {
	limits := sandbox.DefaultLimits(sandbox.Limits{})
	out := templateJSON{
		TemplateID: t.Name, BuildID: buildID(t), CPUCount: max(1, int(limits.CPUs+0.5)), MemoryMB: limits.MemoryBytes >> 20,
		DiskSizeMB: limits.DiskBytes >> 20, Public: true, Names: []string{t.Name}, Aliases: []string{t.Name},
		CreatedAt: t.BuiltAt.UTC(), UpdatedAt: t.BuiltAt.UTC(), EnvdVersion: envd.Version, BuildStatus: "waiting",
	}
	if t.Ready {
		out.BuildStatus, out.BuildCount = "ready", 1
	}
	return out
}

func (a *API) templates(c call) error {
	out, err := a.listTemplates(c)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, out)
}

// listTemplates returns the templates that come with the server and those that were built here, by name.
func (a *API) listTemplates(c call) ([]templateJSON, error) {
	all, err := a.allTemplates(c)
	if err != nil {
		return nil, err
	}
	out := make([]templateJSON, 0, len(all))
	for _, t := range all {
		out = append(out, templateShape(t))
	}
	builds, err := a.builds(c, "")
	if err != nil {
		return nil, err
	}
	byName := make(map[string][]template.Build)
	for _, b := range builds {
		byName[b.Name] = append(byName[b.Name], b)
	}
	shared, err := a.cfg.Manager.SharedTemplates(c.r.Context())
	if err != nil {
		return nil, err
	}
	for name, of := range byName {
		out = append(out, builtTemplate(name, of, shared[name] == of[0].Owner))
	}
	slices.SortFunc(out, func(a, b templateJSON) int { return strings.Compare(a.TemplateID, b.TemplateID) })
	return out, nil
}

// templatePage lists templates in pages; a page's token is the name of the next page's first.
func (a *API) templatePage(c call) error {
	q := c.r.URL.Query()
	size, err := pageSize(q)
	if err != nil {
		return err
	}
	all, err := a.listTemplates(c)
	if err != nil {
		return err
	}
	out := []templateJSON{}
	for _, t := range all {
		if t.TemplateID < q.Get("nextToken") {
			continue
		}
		if len(out) == size {
			c.w.Header().Set("X-Next-Token", t.TemplateID)
			break
		}
		out = append(out, t)
	}
	return c.json(http.StatusOK, out)
}

// namedTemplate returns the template that ref names.
func (a *API) namedTemplate(c call, ref string) (sandbox.Template, error) {
	name, tag := parseTemplate(ref)
	all, err := a.allTemplates(c)
	if err != nil {
		return sandbox.Template{}, err
	}
	for _, t := range all {
		if t.Name == name && tag == defaultTag {
			return t, nil
		}
	}
	return sandbox.Template{}, fail(http.StatusNotFound, "template '%s' not found", name)
}

func (a *API) template(c call) error {
	name, _ := parseTemplate(c.r.PathValue("id"))
	built, err := a.builds(c, name)
	if err != nil {
		return err
	}
	var shape templateJSON
	builds := []buildJSON{}
	if len(built) > 0 {
		shared, err := a.cfg.Manager.SharedTemplates(c.r.Context())
		if err != nil {
			return err
		}
		shape = builtTemplate(name, built, shared[name] == built[0].Owner)
		if built, err = a.buildPage(c, built); err != nil {
			return err
		}
		for _, b := range built {
			builds = append(builds, buildShape(b, shape))
		}
	} else {
		t, err := a.namedTemplate(c, c.r.PathValue("id"))
		if err != nil {
			if shared, serr := a.cfg.Manager.SharedTemplates(c.r.Context()); serr == nil && shared[name] != "" {
				return notYours(name)
			}
			return err
		}
		shape = templateShape(t)
		if t.Ready {
			builds = append(builds, buildJSON{
				BuildID: shape.BuildID, Status: shape.BuildStatus, CreatedAt: shape.CreatedAt, UpdatedAt: shape.UpdatedAt, FinishedAt: shape.UpdatedAt,
				CPUCount: shape.CPUCount, MemoryMB: shape.MemoryMB, DiskSizeMB: shape.DiskSizeMB, EnvdVersion: envd.Version,
			})
		}
	}
	return c.json(http.StatusOK, map[string]any{
		"templateID": shape.TemplateID, "public": shape.Public, "names": shape.Names, "aliases": shape.Aliases, "createdAt": shape.CreatedAt,
		"updatedAt": shape.UpdatedAt, "lastSpawnedAt": nil, "spawnCount": 0, "builds": builds,
	})
}

// buildPage leaves the builds that a request's page has; the token of the next page is the id of its first build.
func (a *API) buildPage(c call, builds []template.Build) ([]template.Build, error) {
	q := c.r.URL.Query()
	size, err := pageSize(q)
	if err != nil {
		return nil, err
	}
	if token := q.Get("nextToken"); token != "" {
		from := slices.IndexFunc(builds, func(b template.Build) bool { return buildUUID(b.ID) == token })
		if from < 0 {
			return nil, fail(http.StatusBadRequest, "Error when parsing request: nextToken is none that this server gave")
		}
		builds = builds[from:]
	}
	if len(builds) > size {
		c.w.Header().Set("X-Next-Token", buildUUID(builds[size].ID))
		builds = builds[:size]
	}
	return builds, nil
}

// notYours is the answer where a template is another key's, which shares it.
func notYours(name string) error {
	return fail(http.StatusForbidden, "you don't have access to template '%s'", name)
}

// updateTemplate shares a template with every key, or no longer.
func (a *API) updateTemplate(c call) error {
	var req struct {
		Public *bool `json:"public"`
	}
	if err := c.decode(&req); err != nil {
		return err
	}
	ref := c.r.PathValue("id")
	if t, err := a.namedTemplate(c, ref); err == nil {
		return fail(http.StatusForbidden, "template '%s' comes with the server: it is everybody's", t.Name)
	}
	name, _ := parseTemplate(ref)
	built, err := a.builds(c, name)
	if err != nil {
		return err
	}
	shared, err := a.cfg.Manager.SharedTemplates(c.r.Context())
	switch {
	case err != nil:
		return err
	case len(built) == 0 && shared[name] != "":
		return notYours(name)
	case len(built) == 0:
		return fail(http.StatusNotFound, "template '%s' not found", name)
	}
	if is := shared[name] == built[0].Owner; req.Public != nil && *req.Public != is {
		if err := a.cfg.Manager.ShareTemplate(c.r.Context(), c.p, name, *req.Public); err != nil {
			return err
		}
	}
	return c.json(http.StatusOK, map[string]any{"names": []string{namespace + name}})
}

// buildShape tells of one build of a template.
func buildShape(b template.Build, t templateJSON) buildJSON {
	out := buildJSON{
		BuildID: buildUUID(b.ID), Status: statusOf(b.State), CreatedAt: b.CreatedAt.UTC(), UpdatedAt: b.CreatedAt.UTC(),
		CPUCount: t.CPUCount, MemoryMB: t.MemoryMB, DiskSizeMB: t.DiskSizeMB, EnvdVersion: envd.Version,
	}
	if b.State.Over() {
		out.UpdatedAt, out.FinishedAt = b.EndedAt.UTC(), b.EndedAt.UTC()
	}
	return out
}

// templatePart serves the two paths below a template's: its tags, and the search for an alias.
func (a *API) templatePart(c call) error {
	first, second := c.r.PathValue("id"), c.r.PathValue("part")
	ref := first
	if first == "aliases" {
		ref = second
	} else if second != "tags" {
		return notYet(c.r.Method + " " + c.r.URL.Path)
	}
	name, _ := parseTemplate(ref)
	built, err := a.builds(c, name)
	if err != nil {
		return err
	}
	shared, err := a.cfg.Manager.SharedTemplates(c.r.Context())
	if err != nil {
		return err
	}
	id, tags, public := name, []tagJSON{}, true
	switch {
	case len(built) > 0:
		public = shared[name] == built[0].Owner
		tags, err = a.tagsOf(c, name, built)
	case shared[name] != "" && first != "aliases":
		err = notYours(name)
	case shared[name] == "":
		var t sandbox.Template
		if t, err = a.namedTemplate(c, ref); err == nil {
			id, tags = t.Name, append(tags, tagJSON{defaultTag, buildID(t), t.BuiltAt.UTC()})
		}
	}
	switch {
	case err != nil:
		return err
	case first == "aliases":
		return c.json(http.StatusOK, map[string]any{"templateID": id, "public": public})
	}
	return c.json(http.StatusOK, tags)
}

// deleteTemplate deletes a template that was built here, or a snapshot. Others come with the server.
func (a *API) deleteTemplate(c call) error {
	ref := c.r.PathValue("id")
	if t, err := a.namedTemplate(c, ref); err == nil {
		return fail(http.StatusForbidden, "template '%s' comes with the server and can't be deleted", t.Name)
	}
	name, _ := parseTemplate(ref)
	built, err := a.builds(c, name)
	if err != nil {
		return err
	}
	if len(built) > 0 {
		if err := a.cfg.Builder.Delete(c.r.Context(), c.p, name); err != nil {
			return err
		}
		return c.done()
	}
	made, err := a.commitOf(c.r.Context(), c.p, ref)
	if err != nil {
		return err
	}
	if _, err = a.cfg.Manager.DeleteCommit(c.r.Context(), c.p, made.ID); errs.Is(err, errs.NotFound) {
		return notYours(name) // it is read, and can't be changed
	}
	if err != nil {
		return err
	}
	return c.done()
}
