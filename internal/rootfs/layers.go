package rootfs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
)

// Plan makes the writable layer of a sandbox and returns its root file system as a value.
// Kinds: NotFound (template, workspace), FailedPrecondition (template not built, profile not allowed),
// AlreadyExists, ResourceExhausted (the store is full).
func (s *Store) Plan(ctx context.Context, r Request) (Plan, error) {
	if !id.ValidSandbox(r.ID) {
		return Plan{}, errs.New(errs.InvalidArgument, "%q is no sandbox id", r.ID)
	}
	from := s.fromTemplate
	if r.Layer != "" {
		from = s.fromLayer
	}
	p, err := from(ctx, r)
	if err != nil {
		return Plan{}, err
	}
	if err := s.planLayer(&p, r); err != nil {
		return Plan{}, errors.Join(fmt.Errorf("make layer %s: %w", r.ID, err), s.unuse(r.ID))
	}
	return p, nil
}

// planLayer fills in the writable layer. Nobody else has the sandbox's name: use saw to that.
func (s *Store) planLayer(p *Plan, r Request) error {
	l, err := s.takeLayer()
	if err != nil {
		return err
	}
	defer l.close()
	path := s.live(r.ID)
	if err := os.Rename(l.path, path); err != nil {
		s.discard(l.path)
		return err
	}
	s.disk.moved(l.path, path)
	l.path = path
	if p.Disk, err = s.disk.limit(l, r.DiskBytes, r.Inodes); err == nil {
		p.Workspaces, err = makeWorkspaces(s.disk.files(path), r.Workspaces)
	}
	if err == nil {
		err = s.onCommitted(p, s.disk.files(path)+"/upper")
	}
	if err != nil {
		s.discard(path)
		return err
	}
	p.Upper, p.Work = s.disk.files(path)+"/upper", s.disk.files(path)+"/work"
	return nil
}

// onCommitted makes a new writable layer fit what it lies on: a commit, or an image.
func (s *Store) onCommitted(p *Plan, upper string) error {
	if len(p.Committed) == 0 && !s.imported(p.Lowers[0]) { // what we build has the root that every layer is made with
		return nil
	}
	if err := sameRoot(upper, p.Lowers[0]); err != nil {
		return err
	}
	for i := range p.Workspaces {
		w := &p.Workspaces[i]
		if w.Lowers = s.workspaceLowers(p.Committed, w.Target); len(w.Lowers) > 0 {
			if err := sameRoot(w.Upper, w.Lowers[0]); err != nil {
				return err
			}
		}
	}
	return nil
}

// makeWorkspaces makes the writable layer of each workspace inside the sandbox's own, so that one
// limit holds for all.
func makeWorkspaces(layer string, requests []WorkspaceRequest) ([]Workspace, error) {
	var all []Workspace
	for i, r := range requests {
		var st syscall.Stat_t
		if err := syscall.Stat(r.Source, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFDIR {
			return nil, errs.Wrap(err, errs.NotFound, "workspace %s is no directory", r.Source)
		}
		dir := fmt.Sprintf("%s/ws%d", layer, i)
		w := Workspace{
			Source: r.Source, Target: r.Target, Upper: dir + "/upper", Work: dir + "/work",
			OwnerUID: int(st.Uid), OwnerGID: int(st.Gid),
		}
		if err := os.Mkdir(dir, 0o700); err != nil {
			return nil, err
		}
		if err := makeUpper(dir); err != nil {
			return nil, err
		}
		all = append(all, w)
	}
	return all, nil
}

// makeUpper makes the two directories that overlayfs wants in one layer. Ids are inside-ids: root's.
func makeUpper(dir string) error {
	for _, name := range []string{"/upper", "/work"} {
		if err := os.Mkdir(dir+name, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// takeLayer returns a layer made ahead, or makes one.
func (s *Store) takeLayer() (*layer, error) {
	select {
	case l := <-s.spares:
		return l, nil
	default:
		return s.makeLayer()
	}
}

// makeLayer makes a layer in spare/.
func (s *Store) makeLayer() (*layer, error) {
	l, err := s.disk.create(filepath.Join(s.area("spare"), rand.Text()))
	if err != nil {
		return nil, err
	}
	if err := makeUpper(s.disk.files(l.path)); err != nil {
		l.close()
		s.discard(l.path)
		return nil, err
	}
	return l, nil
}

// startWorkers starts making layers ahead and deleting discarded ones.
func (s *Store) startWorkers(spares int) {
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	if spares == 0 {
		spares = defaultSpares
	}
	// An unbuffered channel still holds one ahead: the filler's, which waits to be taken.
	s.spares = make(chan *layer, max(0, spares-1))
	if spares > 0 {
		s.workers.Go(func() { s.fill(ctx) })
	}
	s.workers.Go(func() { s.empty(ctx) })
}

// fill keeps the spares full. A failure is tried again only when somebody needs a layer: then Plan
// reports it.
func (s *Store) fill(ctx context.Context) {
	for ctx.Err() == nil {
		l, err := s.makeLayer()
		if err != nil {
			s.warn("make spare layer", err)
			return
		}
		select {
		case s.spares <- l:
		case <-ctx.Done():
			l.close()
			return
		}
	}
}

// Release removes the writable layer of a sandbox: at once from its place, its contents in the
// background. Nothing of the sandbox may use it any more. Idempotent.
func (s *Store) Release(_ context.Context, id string) error {
	if !validID(id) {
		return errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	return errors.Join(s.throwAway(s.live(id)), s.unuse(id), s.DropPoints(id))
}

// validID keeps Release and its like to one name below live/.
func validID(s string) bool { return id.ValidSandbox(s) }

// throwAway renames a layer into the trash and wakes the worker.
func (s *Store) throwAway(path string) error {
	trash := filepath.Join(s.area("trash"), rand.Text())
	if err := os.Rename(path, trash); notThere(err) {
		return nil
	} else if err != nil {
		return fmt.Errorf("discard layer: %w", err)
	}
	s.disk.moved(path, trash)
	select {
	case s.discarded <- struct{}{}:
	default: // it is awake already, and looks again
	}
	return nil
}

func (s *Store) discard(path string) { s.warnIf("discard layer", s.throwAway(path)) }

// empty deletes what lies in the trash.
func (s *Store) empty(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.discarded:
		}
		entries, err := os.ReadDir(s.area("trash"))
		s.warnIf("list discarded layers", err)
		for _, e := range entries {
			if ctx.Err() != nil {
				return
			}
			s.warnIf("delete discarded layer", s.disk.remove(filepath.Join(s.area("trash"), e.Name())))
		}
	}
}

// Sweep removes what is there of sandboxes that are not in keep, and says which layers that were.
func (s *Store) Sweep(ctx context.Context, keep map[string]bool) ([]string, error) {
	var removed []string
	for _, area := range []string{s.area("live"), s.useDir()} { // a create that was killed may have only one
		entries, err := os.ReadDir(area)
		if err != nil {
			return removed, err
		}
		for _, e := range entries {
			name := e.Name()
			if keep[name] {
				continue
			}
			if err := errors.Join(ctx.Err(), s.throwAway(s.live(name)), s.unuse(name), s.DropPoints(name)); err != nil {
				return removed, err
			}
			if area != s.useDir() {
				removed = append(removed, "layer "+name)
			}
		}
	}
	return removed, nil
}

// Used returns the bytes that a sandbox's writable layer holds, as of the store's last commit.
func (s *Store) Used(id string) (int64, error) { return s.disk.used(s.live(id)) }

// Rest gives back the room that a sandbox's writable layer was promised and does not use, since nobody will
// write to it until Rouse. Idempotent.
func (s *Store) Rest(id string) error {
	if !validID(id) {
		return errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	return s.disk.rest(s.live(id))
}

// Rouse gives a layer at rest room again. Idempotent. ResourceExhausted: the store is full.
func (s *Store) Rouse(id string) error {
	if !validID(id) {
		return errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	return s.disk.rouse(s.live(id))
}

// Lend raises a layer's limit a little until back is called, so that a sandbox which filled its disk
// can be mounted, cleaned or deleted: overlayfs needs to write for all of these.
func (s *Store) Lend(id string) (back func() error, err error) { return s.disk.lend(s.live(id)) }
