package e2b

import (
	"net/http"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/template"
)

// buildWith returns the build that a commit came of, of the template called name.
func (a *API) buildWith(c call, name, commit string) (template.Build, error) {
	builds, err := a.builds(c, name)
	if err != nil {
		return template.Build{}, err
	}
	for _, b := range builds {
		if b.Commit == commit {
			return b, nil
		}
	}
	return template.Build{}, fail(http.StatusNotFound, "template '%s' not found", name)
}

// builds returns the builds of a template, the newest first; none where nothing is built here.
func (a *API) builds(c call, name string) ([]template.Build, error) {
	if a.cfg.Builder == nil {
		return nil, nil
	}
	return a.cfg.Builder.List(c.r.Context(), c.p, template.Query{Name: name})
}

// assignTags gives the build that a target names further tags.
func (a *API) assignTags(c call) error {
	var req struct {
		Target string   `json:"target"`
		Tags   []string `json:"tags"`
	}
	if err := c.decode(&req); err != nil {
		return err
	}
	if len(req.Tags) == 0 {
		return fail(http.StatusBadRequest, "At least one tag is required")
	}
	for _, t := range req.Tags {
		if err := checkTag(t); err != nil {
			return err
		}
	}
	name, _ := parseTemplate(req.Target)
	made, err := a.commitOf(c.r.Context(), c.p, req.Target)
	if err != nil {
		return err
	}
	b, err := a.buildWith(c, name, made.ID)
	if err != nil {
		return err
	}
	for _, t := range req.Tags {
		for _, full := range commitTags(name, strings.ToLower(t)) {
			if _, err := a.cfg.Manager.TagCommit(c.r.Context(), c.p, made.ID, full, false); err != nil {
				return badTag(err)
			}
		}
	}
	return c.json(http.StatusCreated, map[string]any{"buildID": buildUUID(b.ID), "tags": req.Tags})
}

// commitTags are the tags of a commit that stand for a template's tag.
func commitTags(name, tag string) []string {
	if tag == defaultTag {
		return []string{name + ":" + tag, name}
	}
	return []string{name + ":" + tag}
}

func badTag(err error) error {
	if errs.Is(err, errs.InvalidArgument) {
		return fail(http.StatusBadRequest, "Invalid tag: %s", publicText(err))
	}
	return err
}

// removeTags takes tags from a template's builds.
func (a *API) removeTags(c call) error {
	var req struct {
		Name string   `json:"name"`
		Tags []string `json:"tags"`
	}
	if err := c.decode(&req); err != nil {
		return err
	}
	if len(req.Tags) == 0 {
		return fail(http.StatusBadRequest, "At least one tag is required")
	}
	if slices.ContainsFunc(req.Tags, func(t string) bool { return strings.EqualFold(t, defaultTag) }) {
		return fail(http.StatusBadRequest, "Cannot delete the 'default' tag")
	}
	name, _ := parseTemplate(strings.ToLower(req.Name))
	builds, err := a.builds(c, name)
	if err != nil {
		return err
	}
	if len(builds) == 0 {
		return fail(http.StatusNotFound, "template '%s' not found", name)
	}
	for _, t := range req.Tags {
		if err := checkTag(t); err != nil {
			return err
		}
		for _, full := range commitTags(name, strings.ToLower(t)) {
			made, err := a.cfg.Manager.GetCommit(c.r.Context(), c.p, full)
			if err == nil {
				_, err = a.cfg.Manager.TagCommit(c.r.Context(), c.p, made.ID, full, true)
			}
			if err != nil && !errs.Is(err, errs.NotFound) {
				return badTag(err)
			}
		}
	}
	return c.done()
}

// tagJSON is a tag of a template, and the build that has it.
type tagJSON struct {
	Tag       string    `json:"tag"`
	BuildID   string    `json:"buildID"`
	CreatedAt time.Time `json:"createdAt"`
}

// tagsOf lists the tags of a template's builds.
func (a *API) tagsOf(c call, name string, builds []template.Build) ([]tagJSON, error) {
	out := []tagJSON{}
	for _, b := range builds {
		names, err := a.tagsOfBuild(c, name, b)
		if err != nil {
			return nil, err
		}
		for _, t := range names {
			out = append(out, tagJSON{t, buildUUID(b.ID), b.EndedAt.UTC()})
		}
	}
	return out, nil
}

// tagsOfBuild returns the tags of one build.
func (a *API) tagsOfBuild(c call, name string, b template.Build) ([]string, error) {
	if b.Commit == "" {
		return nil, nil
	}
	made, err := a.cfg.Manager.GetCommit(c.r.Context(), c.p, b.Commit)
	if errs.Is(err, errs.NotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []string
	for _, t := range made.Tags {
		if t == name {
			t = name + ":" + defaultTag
		}
		if tag, ok := strings.CutPrefix(t, name+":"); ok && !slices.Contains(out, tag) {
			out = append(out, tag)
		}
	}
	return out, nil
}

// builtTemplate tells of a template that was built here by its builds, the newest first.
func builtTemplate(name string, builds []template.Build, shared bool) templateJSON {
	b, ready := builds[0], 0
	for _, one := range slices.Backward(builds) {
		if one.State == template.Ready {
			b = one
			ready++
		}
	}
	limits := sandbox.DefaultLimits(b.Limits)
	t := templateShape(sandbox.Template{Name: name, BuiltAt: builds[len(builds)-1].CreatedAt})
	t.Public, t.BuildCount, t.BuildStatus, t.BuildID = shared, ready, statusOf(b.State), buildUUID(b.ID)
	t.Names = []string{namespace + name}
	t.UpdatedAt = b.CreatedAt.UTC()
	t.CPUCount, t.MemoryMB, t.DiskSizeMB = max(1, int(limits.CPUs+0.5)), limits.MemoryBytes>>20, limits.DiskBytes>>20
	return t
}
