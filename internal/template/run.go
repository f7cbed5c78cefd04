package template

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/sandbox"
)

// runAction runs a command.
type runAction struct {
	line string   // for a shell; "": argv holds
	argv []string // runs as it is
	// script is what the shell, or the program that its first line names, executes; "": line holds.
	script string
	user   string // "": the state's
	// login uses a login shell, as E2B's builder does.
	login bool
	// vars adds ARGs to the environment, and proxies are those that make no difference to what it gives.
	vars    bool
	proxies map[string]string
	mounts  []mount
	// offline takes the network away.
	offline bool
}

func (a *runAction) prepare(ctx context.Context, x *execution, s *state) (*work, error) {
	c := command{env: s.env.toMap(), user: or(a.user, s.runUser()), dir: s.runDir()}
	if a.vars {
		maps.Copy(c.env, s.args)
	}
	// What tools are asked to do so that a build gives the same files again, unless the build says otherwise.
	for name, value := range map[string]string{
		"SOURCE_DATE_EPOCH": strconv.FormatInt(x.epoch().Unix(), 10), "PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
		"DEBIAN_FRONTEND": "noninteractive", "PYTHONHASHSEED": "0",
	} {
		if _, set := c.env[name]; !set {
			c.env[name] = value
		}
	}
	switch {
	case a.script != "" && !strings.HasPrefix(a.script, "#!"):
		c.argv = append(slices.Clone(s.shell()), a.script)
	case a.script != "":
	case a.login:
		c.argv = []string{"/bin/bash", "-l", "-c", a.line}
	case a.line != "":
		c.argv = append(slices.Clone(s.shell()), a.line)
	default:
		c.argv = a.argv
	}
	c.shown = "RUN " + or(a.line, strings.Join(a.argv, " "))
	parts := append([]string{"run", c.user, c.dir, a.script, strconv.FormatBool(a.offline)}, c.argv...)
	for _, name := range slices.Sorted(maps.Keys(c.env)) {
		parts = append(parts, name+"="+c.env[name])
	}
	for name, value := range a.proxies {
		if _, set := c.env[name]; !set {
			c.env[name] = value
		}
	}
	placed := make([]*placement, 0, len(a.mounts))
	for _, m := range a.mounts {
		p, err := m.prepare(ctx, x, s)
		if err != nil {
			return nil, err
		}
		placed = append(placed, p)
		parts = append(parts, p.parts...)
	}
	return &work{parts: parts, network: !a.offline, pinned: true, run: func(ctx context.Context, b *box) error {
		return a.run(ctx, b, c, placed)
	}}, nil
}

// run runs the command with what is mounted for it.
func (a *runAction) run(ctx context.Context, b *box, c command, placed []*placement) error {
	for _, p := range placed {
		if err := p.put(ctx, b); err != nil {
			return err
		}
	}
	if strings.HasPrefix(a.script, "#!") {
		var name [8]byte
		_, _ = rand.Read(name[:])
		file := "/tmp/.run-" + hex.EncodeToString(name[:])
		r := sandbox.WriteRequest{PathRequest: b.asRoot(file), Mode: 0o755, Offset: -1, Size: int64(len(a.script)), Parents: true}
		if _, err := b.files.Write(ctx, r, strings.NewReader(a.script)); err != nil {
			return err
		}
		defer func() { _ = b.files.Remove(ctx, sandbox.RemoveRequest{PathRequest: b.asRoot(file)}) }()
		c.argv = []string{file}
	}
	unpin, err := b.pins.put(ctx, b, &c)
	if err != nil {
		return err
	}
	report, err := b.report(ctx, &c)
	if err != nil {
		return err
	}
	if err := b.run(ctx, c); err != nil {
		return err
	}
	if err := errors.Join(unpin(), report()); err != nil {
		return err
	}
	for _, p := range slices.Backward(placed) {
		if err := p.take(ctx, b); err != nil {
			return err
		}
	}
	return nil
}

// mount is a place that a command has for itself: it is empty, or shows files of elsewhere, and nothing of it
// stays. There is no mount: what lies there goes aside meanwhile, in the step's own sandbox.
type mount struct {
	target string
	// source is what it shows; nil: nothing, as a cache that is empty.
	source *copyAction
	mode   uint32
	owner  string // of an empty one; "": who the command runs as
}

// placement is a mount of one step.
type placement struct {
	target string
	parts  []string
	fill   *work
	mode   uint32
	owner  string
	aside  string // where what was there lies meanwhile; "": there was nothing
	made   string // the topmost directory that was made for it; "": none
}

func (m mount) prepare(ctx context.Context, x *execution, s *state) (*placement, error) {
	p := &placement{target: s.resolve(m.target), mode: m.mode, owner: or(m.owner, s.runUser())}
	if p.target == "/" {
		return nil, errs.New(errs.InvalidArgument, "RUN --mount: the target / would hide everything").WithHint("name a directory below it")
	}
	p.parts = []string{"mount", p.target, p.owner, strconv.FormatUint(uint64(p.mode), 8)}
	if m.source == nil {
		return p, nil
	}
	copied := *m.source
	copied.dest = p.target
	w, err := copied.prepare(ctx, x, s)
	if err != nil {
		return nil, err
	}
	p.fill = w
	p.parts = append(p.parts, w.parts...)
	return p, nil
}

// put makes the place.
func (p *placement) put(ctx context.Context, b *box) error {
	var err error
	if p.made, err = b.firstMissing(ctx, path.Dir(p.target)); err != nil {
		return err
	}
	there, err := b.exists(ctx, p.target)
	if err != nil {
		return err
	}
	if there {
		p.aside = path.Join(path.Dir(p.target), ".aside-"+path.Base(p.target))
		if _, err := b.files.Move(ctx, sandbox.MoveRequest{PathRequest: b.asRoot(p.target), To: p.aside}); err != nil {
			return err
		}
	}
	if p.fill != nil {
		return p.fill.run(ctx, b)
	}
	if err := b.makeDir(ctx, path.Dir(p.target), ""); err != nil {
		return err
	}
	r := sandbox.MakeDirRequest{PathRequest: b.asRoot(p.target), Mode: or(p.mode, 0o755)}
	r.User = p.owner
	_, err = b.files.MakeDir(ctx, r)
	return err
}

// take removes the place, and brings back what was there.
func (p *placement) take(ctx context.Context, b *box) error {
	if err := b.remove(ctx, p.target); err != nil {
		return err
	}
	if p.aside != "" {
		_, err := b.files.Move(ctx, sandbox.MoveRequest{PathRequest: b.asRoot(p.aside), To: p.target})
		return err
	}
	if p.made != "" {
		return b.removeEmpty(ctx, p.made)
	}
	return nil
}
