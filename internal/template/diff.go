package template

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// Difference is what two builds differ in.
type Difference struct {
	Packages []PackageChange
	Files    []sandbox.Change
	// MoreFiles says that there are more than Files holds.
	MoreFiles bool
	Settings  []SettingChange
}

// SettingChange is a setting that differs.
type SettingChange struct {
	// Name is "env NAME", "label NAME", user, dir, entrypoint, cmd, exposed, volumes, shell, stopsignal, healthcheck,
	// onbuild, "limit NAME", start or ready.
	Name, From, To string
}

// maxDiffFiles bounds the files of a Difference.
const maxDiffFiles = 10_000

// Diff tells what two builds differ in. Each is a build's id, or a template's name, for its newest build that is
// ready.
func (b *Builder) Diff(ctx context.Context, p sandbox.Principal, from, to string) (Difference, error) {
	var sides [2]Build
	for i, name := range []string{from, to} {
		var err error
		if sides[i], err = b.Get(ctx, p, name); err != nil {
			return Difference{}, err
		}
		if sides[i].State != Ready {
			return Difference{}, errs.New(errs.FailedPrecondition, "build %s is %s, and has nothing to compare", sides[i].ID, sides[i].State)
		}
	}
	d := Difference{Settings: compareSettings(sides[0], sides[1])}
	if sides[0].Lock != nil && sides[1].Lock != nil {
		d.Packages = comparePackages(sides[0].Lock.Packages, sides[1].Lock.Packages)
	}
	files, err := b.m.Compare(ctx, p, sides[0].Commit, sides[1].Commit)
	if err != nil {
		return Difference{}, err
	}
	d.MoreFiles = len(files) > maxDiffFiles
	d.Files = files[:min(len(files), maxDiffFiles)]
	return d, nil
}

func compareSettings(a, b Build) []SettingChange {
	before, after := settingsOf(a), settingsOf(b)
	names := map[string]bool{}
	for n := range before {
		names[n] = true
	}
	for n := range after {
		names[n] = true
	}
	var out []SettingChange
	for n := range names {
		if before[n] != after[n] {
			out = append(out, SettingChange{Name: n, From: before[n], To: after[n]})
		}
	}
	slices.SortFunc(out, func(a, b SettingChange) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// settingsOf are a build's settings as text.
func settingsOf(b Build) map[string]string {
	quoted := func(list []string) string {
		if len(list) == 0 {
			return ""
		}
		return fmt.Sprintf("%q", list)
	}
	whole := func(v any) string {
		text, _ := json.Marshal(v) // plain data: can't fail
		return strings.TrimPrefix(string(text), "null")
	}
	out := map[string]string{
		"shell": quoted(b.Image.Shell), "stopsignal": b.Image.StopSignal, "healthcheck": whole(b.Image.Healthcheck),
		"onbuild": quoted(b.Image.OnBuild),
		"user":    b.User, "dir": b.Dir, "entrypoint": quoted(b.Image.Entrypoint), "cmd": quoted(b.Image.Cmd),
		"exposed": strings.Join(b.Image.Exposed, " "), "volumes": strings.Join(b.Image.Volumes, " "), "start": b.Start, "ready": b.Ready,
	}
	l := b.Limits
	for name, n := range map[string]float64{
		"memory": float64(l.MemoryBytes), "cpus": l.CPUs, "pids": float64(l.Pids), "open files": float64(l.OpenFiles),
		"disk": float64(l.DiskBytes), "inodes": float64(l.Inodes),
	} {
		if n != 0 { // else the server's
			out["limit "+name] = strconv.FormatFloat(n, 'f', -1, 64)
		}
	}
	for _, kv := range b.Env {
		name, value, _ := strings.Cut(kv, "=")
		out["env "+name] = value
	}
	for name, value := range b.Image.Labels {
		out["label "+name] = value
	}
	return out
}
