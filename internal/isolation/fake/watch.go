package fake

import (
	"path"
	"strings"
	"syscall"

	"casemate.dev/internal/guestwire"
)

// watcher receives changes below a directory. Where it is too slow, it gets one overflow instead.
type watcher struct {
	dir       string
	recursive bool
	events    chan guestwire.WatchEvent
	lost      bool
}

func (t *tree) watch(p string, recursive bool) (*watcher, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n, at, err := t.findLocked(p, true)
	if err != nil {
		return nil, err
	}
	if n.kind != guestwire.TypeDir {
		return nil, syscall.ENOTDIR
	}
	w := &watcher{dir: at, recursive: recursive, events: make(chan guestwire.WatchEvent, 1024)}
	t.watchers[w] = true
	return w, nil
}

func (t *tree) unwatch(w *watcher) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.watchers, w)
}

func (t *tree) notifyLocked(op, p string) {
	for w := range t.watchers {
		below := path.Dir(p) == w.dir || w.recursive && strings.HasPrefix(p, strings.TrimSuffix(w.dir, "/")+"/")
		if !below {
			continue
		}
		e := guestwire.WatchEvent{Op: op, Path: p}
		if w.lost {
			e = guestwire.WatchEvent{Op: "overflow", Path: w.dir}
		}
		select {
		case w.events <- e:
			w.lost = false
		default:
			w.lost = true
		}
	}
}
