package sandbox

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/rootfs"
)

// checkSpec fills the defaults and refuses what can't be.
func (m *Manager) checkSpec(ctx context.Context, p Principal, s Spec, o *CreateOptions) (Spec, error) {
	if o.ID != "" && !id.ValidSandbox(o.ID) {
		return s, invalid("sandbox id %s is malformed", quote(o.ID)).
			WithHint("use 20 characters of a-z and 0-9, or leave it out")
	}
	if err := checkKey(o.IdempotencyKey); err != nil {
		return s, err
	}
	o.ID = or(o.ID, id.Sandbox())
	d := m.cfg.Defaults
	s.Name = or(s.Name, o.ID)
	s.Template = or(s.Template, d.Template)
	asked, forked := s.Template, s.from != nil
	from, err := m.startingCommit(ctx, p, &s)
	if err != nil {
		return s, err
	}
	s.Isolation = or(s.Isolation, d.Isolation)
	s.Limits = fillLimits(s.Limits, d.Limits)
	s.Lifetime = or(s.Lifetime, d.Lifetime)
	s.Record = m.recordFor(p, s.Record)
	s.Labels, s.Env = maps.Clone(s.Labels), maps.Clone(s.Env)
	s.AllowMissing = slices.Clone(s.AllowMissing)
	var c checker
	if err := c.spec(&s); err != nil {
		return s, err
	}
	if m.cfg.Backends[s.Isolation] == nil {
		names := slices.Sorted(maps.Keys(m.cfg.Backends))
		return s, errs.New(errs.NotFound, "isolation %s is unknown", quote(s.Isolation)).
			WithHint("this server has: %s", strings.Join(names, ", "))
	}
	t := from
	if s.Commit == "" {
		if t, err = m.template(ctx, s.Template); err != nil {
			return s, err
		}
		if s.Image == nil && t.Digest != "" { // its commits go out as what it came from
			s.Image = &t.Settings
		}
	}
	if s.Profile, err = profileFor(t, s.Profile, d.Profile); err != nil {
		return s, err
	}
	if s.Workspaces, err = m.checkWorkspaces(s.Workspaces); err != nil {
		return s, err
	}
	if s.Calls, err = m.callsFor(ctx, p, s, asked); err != nil {
		return s, err
	}
	if s.Network, err = m.networkFor(ctx, p, s, asked, forked); err != nil {
		return s, err
	}
	if s.FileChanges == FileChangesOff {
		s.FileChanges = ""
	}
	if s.FileChanges != "" {
		if err := m.cfg.Roots.HasPoints(); err != nil {
			return s, errs.Wrap(err, errs.Unsupported, "cannot record which files change").WithHint("leave file changes off")
		}
	}
	return s, m.checkRights(p, s)
}

// recordFor picks how much content is kept of a new sandbox: what the caller or the commit says, else for a sandbox's
// child what its parent has, since it may not have less.
func (m *Manager) recordFor(p Principal, asked Recording) Recording {
	if asked == "" && p.Sandbox != "" {
		if parent := m.find(p.Sandbox); parent != nil {
			asked = parent.snapshot().Spec.Record
		}
	}
	return or(asked, RecordContent)
}

// profileFor picks the profile: what the caller says, else what the server says, else the template's
// first.
func profileFor(t rootfs.Template, asked, byDefault Profile) (Profile, error) {
	switch {
	case len(t.Profiles) == 0:
		return or(or(asked, byDefault), isolation.Locked), nil
	case asked != "" && !slices.Contains(t.Profiles, string(asked)):
		return "", invalid("template %s does not allow profile %s", t.Name, asked).
			WithHint("it allows: %s", strings.Join(t.Profiles, ", "))
	case asked != "":
		return asked, nil
	case byDefault != "" && slices.Contains(t.Profiles, string(byDefault)):
		return byDefault, nil
	}
	return Profile(t.Profiles[0]), nil
}

// checkRights refuses what only an administrator may ask for, and what would give a child more
// rights than its parent has.
func (m *Manager) checkRights(p Principal, s Spec) error {
	if !p.admin() {
		if len(s.Workspaces) > 0 {
			return errs.New(errs.PermissionDenied, "only an administrator may show host directories in a sandbox").
				WithHint("use an admin key, or copy the files in")
		}
		if len(s.AllowMissing) > 0 {
			return errs.New(errs.PermissionDenied, "only an administrator may do without isolation layers").
				WithHint("use an admin key, or leave allow_missing out")
		}
	}
	if p.Sandbox == "" {
		return nil
	}
	parent := m.find(p.Sandbox)
	if parent == nil {
		return errs.New(errs.FailedPrecondition, "sandbox %s has ended and can have no children", p.Sandbox)
	}
	above := parent.snapshot().Spec
	if !s.Record.keeps(above.Record) {
		return errs.New(errs.PermissionDenied, "a child's record keeps no less than its parent's, which keeps %s", or(above.Record, RecordContent))
	}
	if s.Profile == isolation.Standard && above.Profile != isolation.Standard {
		return errs.New(errs.PermissionDenied, "a child can't have profile standard where its parent has %s", above.Profile)
	}
	if s.Isolation != above.Isolation {
		return errs.New(errs.PermissionDenied, "a child has its parent's isolation, %s, not %s", above.Isolation, s.Isolation)
	}
	return withinParent(s.Limits, above.Limits)
}

func withinParent(child, parent Limits) error {
	var over string
	switch {
	case child.MemoryBytes > parent.MemoryBytes:
		over = "memory"
	case child.CPUs > parent.CPUs:
		over = "cpus"
	case child.Pids > parent.Pids:
		over = "pids"
	case child.OpenFiles > parent.OpenFiles:
		over = "open_files"
	case child.DiskBytes > parent.DiskBytes:
		over = "disk"
	case parent.Inodes > 0 && (child.Inodes == 0 || child.Inodes > parent.Inodes):
		over = "inodes"
	default:
		return nil
	}
	return errs.New(errs.PermissionDenied, "limits: a child's %s can't be above its parent's", over)
}

const maxWorkspaces = 8

// checkWorkspaces resolves what is shown inside. Links in a source are followed once, here, so that
// what was checked is what is mounted.
func (m *Manager) checkWorkspaces(asked []Workspace) ([]Workspace, error) {
	if len(asked) > maxWorkspaces {
		return nil, invalid("%d workspaces, limit %d", len(asked), maxWorkspaces)
	}
	var out []Workspace
	for _, w := range asked {
		target, err := cleanTarget(w.Target)
		if err != nil {
			return nil, err
		}
		for _, other := range out {
			if inside(target, other.Target) || inside(other.Target, target) {
				return nil, invalid("workspace targets %s and %s overlap", quote(other.Target), quote(target)).
					WithHint("give each a target of its own")
			}
		}
		source, err := m.checkSource(w.Source)
		if err != nil {
			return nil, err
		}
		out = append(out, Workspace{Source: source, Target: target})
	}
	return out, nil
}

func (m *Manager) checkSource(source string) (string, error) {
	if !filepath.IsAbs(source) {
		return "", invalid("workspace %s is not an absolute path", quote(source)).WithHint("write it from / on")
	}
	resolved, err := filepath.EvalSymlinks(source)
	if errors.Is(err, os.ErrNotExist) {
		return "", errs.Wrap(err, errs.InvalidArgument, "workspace %s does not exist", quote(source))
	}
	if err != nil {
		return "", errs.Wrap(err, errs.InvalidArgument, "workspace %s can't be used", quote(source))
	}
	info, err := os.Stat(resolved)
	if err != nil || !info.IsDir() {
		return "", errs.Wrap(err, errs.InvalidArgument, "workspace %s is no directory", quote(source))
	}
	for _, system := range []string{"/proc", "/sys", "/dev"} {
		if inside(resolved, system) {
			return "", invalid("workspace %s belongs to the kernel", quote(source))
		}
	}
	if resolved == "/" {
		return "", invalid("workspace / would show the whole host").WithHint("name the directory that the task needs")
	}
	for _, own := range m.cfg.HostPaths {
		if linked, err := filepath.EvalSymlinks(own); err == nil {
			own = linked
		}
		if inside(resolved, own) || inside(own, resolved) {
			return "", invalid("workspace %s holds data of the server itself", quote(source)).
				WithHint("name a directory that neither holds the server's data directory nor lies in it")
		}
	}
	return resolved, nil
}
