package sandbox

import (
	"context"
	"slices"
	"sync"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
)

// templateCache keeps what Roots offers, since every create asks.
type templateCache struct {
	// mu guards the fields below.
	mu  sync.Mutex
	all []rootfs.Template
	at  time.Time
}

// templatesFor is how long the list is believed. A template that was not there or not ready is
// asked for again at once.
const templatesFor = 5 * time.Second

func (m *Manager) template(ctx context.Context, name string) (rootfs.Template, error) {
	c := &m.templates
	c.mu.Lock()
	defer c.mu.Unlock()
	now := m.clock.Now()
	for fresh := now.Sub(c.at) > templatesFor || c.all == nil; ; fresh = true {
		if fresh {
			all, err := m.cfg.Roots.Templates(ctx)
			if err != nil {
				return rootfs.Template{}, err
			}
			c.all, c.at = all, now
		}
		i := slices.IndexFunc(c.all, func(t rootfs.Template) bool { return t.Name == name })
		switch {
		case i >= 0 && c.all[i].Ready:
			return c.all[i], nil
		case !fresh:
			continue
		case i >= 0:
			return rootfs.Template{}, errs.New(errs.FailedPrecondition, "template %s is not built", name).
				WithHint("casemate template build %s", name)
		}
		return rootfs.Template{}, errs.New(errs.NotFound, "no template %s", quote(name)).
			WithHint("casemate template ls shows them")
	}
}

// Templates lists what a sandbox can start from.
func (m *Manager) Templates(ctx context.Context) ([]Template, error) {
	return m.cfg.Roots.Templates(ctx)
}

// Capabilities tells what each backend could do on this host.
func (m *Manager) Capabilities(ctx context.Context) map[string][]Capability {
	all := make(map[string][]Capability, len(m.cfg.Backends))
	for name, b := range m.cfg.Backends {
		all[name] = b.Capabilities(ctx)
	}
	return all
}

// DefaultIsolation is the isolation of sandboxes that ask for none.
func (m *Manager) DefaultIsolation() string { return m.cfg.Defaults.Isolation }
