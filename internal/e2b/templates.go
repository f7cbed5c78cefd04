package e2b

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"casemate.dev/internal/e2b/envd"
	"casemate.dev/internal/sandbox"
)

// defaultTag is the tag of a template that names none, and the only one that there is.
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
	FinishedAt  time.Time `json:"finishedAt"`
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
	all, err := a.allTemplates(c)
	if err != nil {
		return err
	}
	out := make([]templateJSON, 0, len(all))
	for _, t := range all {
		out = append(out, templateShape(t))
	}
	return c.json(http.StatusOK, out)
}

// templatePage lists templates in pages; a page's token is the name of the next page's first.
func (a *API) templatePage(c call) error {
	q := c.r.URL.Query()
	size, err := pageSize(q)
	if err != nil {
		return err
	}
	all, err := a.allTemplates(c)
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b sandbox.Template) int { return strings.Compare(a.Name, b.Name) })
	out := []templateJSON{}
	for _, t := range all {
		if t.Name < q.Get("nextToken") {
			continue
		}
		if len(out) == size {
			c.w.Header().Set("X-Next-Token", t.Name)
			break
		}
		out = append(out, templateShape(t))
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
	t, err := a.namedTemplate(c, c.r.PathValue("id"))
	if err != nil {
		return err
	}
	shape := templateShape(t)
	builds := []buildJSON{}
	if t.Ready {
		builds = append(builds, buildJSON{
			BuildID: shape.BuildID, Status: shape.BuildStatus, CreatedAt: shape.CreatedAt, UpdatedAt: shape.UpdatedAt, FinishedAt: shape.UpdatedAt,
			CPUCount: shape.CPUCount, MemoryMB: shape.MemoryMB, DiskSizeMB: shape.DiskSizeMB, EnvdVersion: envd.Version,
		})
	}
	return c.json(http.StatusOK, map[string]any{
		"templateID": shape.TemplateID, "public": true, "names": shape.Names, "aliases": shape.Aliases, "createdAt": shape.CreatedAt,
		"updatedAt": shape.UpdatedAt, "lastSpawnedAt": nil, "spawnCount": 0, "builds": builds,
	})
}

// templatePart serves the two paths below a template's: its tags, and the search for an alias.
func (a *API) templatePart(c call) error {
	first, second := c.r.PathValue("id"), c.r.PathValue("part")
	switch {
	case first == "aliases":
		t, err := a.namedTemplate(c, second)
		if err != nil {
			return err
		}
		return c.json(http.StatusOK, map[string]any{"templateID": t.Name, "public": true})
	case second == "tags":
		t, err := a.namedTemplate(c, first)
		if err != nil {
			return err
		}
		return c.json(http.StatusOK, []map[string]any{{"tag": defaultTag, "buildID": buildID(t), "createdAt": t.BuiltAt.UTC()}})
	}
	return notYet(c.r.Method + " " + c.r.URL.Path)
}

// deleteTemplate deletes a snapshot. Templates come with the server.
func (a *API) deleteTemplate(c call) error {
	t, err := a.namedTemplate(c, c.r.PathValue("id"))
	if err != nil {
		made, err := a.commitOf(c.r.Context(), c.p, c.r.PathValue("id"))
		if err != nil {
			return err
		}
		if _, err := a.cfg.Manager.DeleteCommit(c.r.Context(), c.p, made.ID); err != nil {
			return err
		}
		return c.done()
	}
	return fail(http.StatusForbidden, "template '%s' comes with the server and can't be deleted", t.Name)
}
