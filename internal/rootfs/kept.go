package rootfs

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/fd"
)

// A committed layer is what a sandbox's writable layer held at one moment. It lies in commits/<id>, with
// what it stands on beside it, in commits/<id>.json. There is a layer where both are there: the note is
// written first, the layer comes to be whole or not at all, and one without the other is a half that a
// killed server left. Layers never change. The ids in them are inside-ids, so that any sandbox can have one
// below it.
//
// Each layer lies on others, and they on a template's. Overlayfs takes many, but each costs the start of
// a sandbox a mount; so a layer that would lie on maxStack others lies on one that holds them all.
const maxStack = 4

// kept is what the store has of committed layers.
type kept struct {
	// change is held for reading while layers are added, and for writing while those go that nobody needs. Who reads
	// layers for long holds those instead (hold), and so keeps nobody else waiting.
	change sync.RWMutex
	// mu guards the fields below.
	mu     sync.Mutex
	layers map[string]Layer
	// held counts who reads each layer.
	held map[string]int
}

// Layer is what a committed layer stands on, and how to start from it.
type Layer struct {
	ID string `json:"-"`
	// Below are the committed layers that it lies on, the topmost first.
	Below []string `json:"below,omitempty"`
	// Base is the directory, among the templates', of what lies below all of them.
	Base string `json:"base"`
	// Plan is the template's part of the plan. Paths in the store are relative to it.
	Plan Plan `json:"plan"`
	// Merged names, for a layer that was made of others, what these are, the topmost first.
	Merged []string  `json:"merged,omitempty"`
	Made   time.Time `json:"made"`
	// Bytes is what it holds that nothing else held when it was made. Only Commit tells it.
	Bytes int64 `json:"-"`
}

func (s *Store) keptPath(layer string) string { return filepath.Join(s.area("commits"), layer) }
func (s *Store) keptNote(layer string) string { return s.keptPath(layer) + ".json" }

// recoverKept reads which committed layers there are, and removes halves.
func (s *Store) recoverKept() error {
	s.kept.layers, s.kept.held = map[string]Layer{}, map[string]int{}
	entries, err := os.ReadDir(s.area("commits"))
	if err != nil {
		return err
	}
	there := map[string]bool{}
	for _, e := range entries {
		if e.IsDir() {
			there[e.Name()] = true
			continue
		}
		name, isNote := strings.CutSuffix(e.Name(), ".json")
		l, err := s.readKept(name)
		if !isNote || err != nil { // half a note: then there is no layer yet
			if err := os.Remove(filepath.Join(s.area("commits"), e.Name())); err != nil {
				return err
			}
			continue
		}
		s.kept.layers[name] = l
	}
	for name := range s.kept.layers {
		if !there[name] { // it was being removed
			delete(s.kept.layers, name)
			if err := os.Remove(s.keptNote(name)); err != nil {
				return err
			}
		}
	}
	for name := range there {
		if _, ok := s.kept.layers[name]; !ok {
			if err := s.disk.dropKept(s.keptPath(name)); err != nil {
				return fmt.Errorf("remove half a layer: %w", err)
			}
		}
	}
	return nil
}

func (s *Store) readKept(layer string) (Layer, error) {
	l := Layer{ID: layer}
	data, err := os.ReadFile(s.keptNote(layer))
	if err != nil {
		return l, err
	}
	return l, json.Unmarshal(data, &l)
}

// noteKept writes a layer's note, so that it survives a power loss if the layer does.
func (s *Store) noteKept(l Layer) error {
	data, err := json.Marshal(l)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(s.keptNote(l.ID), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// addKept makes a layer whose note and files are there one that can be used.
func (s *Store) addKept(l Layer) {
	s.kept.mu.Lock()
	defer s.kept.mu.Unlock()
	s.kept.layers[l.ID] = l
}

func (s *Store) dropNote(id string) {
	s.warnIf("remove half a layer's note", os.Remove(s.keptNote(id)))
}

// Flush writes out what a sandbox's files hold in memory, so that a Commit soon after it is short. It
// may take as long as the disk needs for that. Where they hold little it does nothing, unless all is set:
// then what they hold now survives a power loss.
func (s *Store) Flush(id string, all bool) error {
	if !validID(id) {
		return errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	return s.disk.flush(s.live(id), all)
}

// Durable reports whether what sandboxes write survives the end of the server's mount namespace.
func (s *Store) Durable() bool { return s.disk.mechanism() != byTmpfs }

// Commit keeps what a sandbox's writable layer, and those of its workspaces, hold now, and returns the
// layer. p is the sandbox's plan. Nothing of the sandbox may run meanwhile; hold stops it and release lets
// it go on, which happens as early as it can.
//
// When it returns, the layer survives the death of the server and a power loss. Killed before, it leaves
// nothing, or all of it. The caller must know of the layer before the next Collect, or it goes.
// Kinds: NotFound (no such sandbox), ResourceExhausted (no room to keep it).
func (s *Store) Commit(ctx context.Context, id string, p Plan, hold, release func() error) (Layer, error) {
	if !validID(id) {
		return Layer{}, errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	use, err := s.readUse(id)
	if err != nil {
		return Layer{}, err
	}
	s.kept.change.RLock()
	defer s.kept.change.RUnlock()
	l := Layer{ID: rand.Text(), Base: use.base, Made: time.Now().UTC(), Below: p.Committed}
	if l.Plan, err = s.templatePart(p); err != nil {
		return Layer{}, err
	}
	if len(l.Below) >= maxStack {
		merged, err := s.merged(ctx, l)
		if err != nil {
			return Layer{}, fmt.Errorf("merge layers below %s: %w", id, err)
		}
		l.Below = []string{merged}
	}
	if err := s.noteKept(l); err != nil {
		return Layer{}, err
	}
	undo := cleanup.New(func() { s.dropNote(l.ID) })
	defer undo.Run()
	if l.Bytes, err = s.keepHeld(ctx, s.live(id), s.keptPath(l.ID), hold, release); err != nil {
		return Layer{}, fmt.Errorf("commit %s: %w", id, err)
	}
	undo.Release()
	s.addKept(l)
	return l, nil
}

// keepWork keeps what was made at work, in snapshots/, as a layer.
func (s *Store) keepWork(ctx context.Context, work string, l Layer) (Layer, error) {
	if err := s.noteKept(l); err != nil {
		return Layer{}, err
	}
	bytes, err := s.disk.keep(ctx, work, s.keptPath(l.ID), func() {})
	if err != nil {
		s.dropNote(l.ID)
		return Layer{}, err
	}
	l.Bytes = bytes
	s.addKept(l)
	return l, nil
}

// Unchanged reports whether it is certain that a sandbox's files, with its workspaces' and its environment, are
// what a committed layer holds that was made of them: then nothing is gained by another Commit. False says
// that they changed, or that nobody knows. The caller sees to it that no Collect removes the layer meanwhile.
func (s *Store) Unchanged(id, layer string) bool {
	if !validID(id) {
		return false
	}
	if _, err := s.Layer(layer); err != nil {
		return false
	}
	return s.disk.unchanged(s.live(id), s.keptPath(layer))
}

// keepHeld keeps a layer while its sandbox is held, which ends as soon as it is decided what the layer holds.
func (s *Store) keepHeld(ctx context.Context, path, dst string, hold, release func() error) (int64, error) {
	if err := hold(); err != nil {
		return 0, err
	}
	let := sync.OnceValue(release)
	bytes, err := s.disk.keep(ctx, path, dst, func() { _ = let() })
	if notThere(err) {
		err = errs.Wrap(err, errs.NotFound, "the sandbox has no files any more")
	}
	if rerr := let(); rerr != nil {
		if err == nil {
			s.warnIf("remove half a layer", s.disk.dropKept(dst))
		}
		return 0, errors.Join(err, rerr)
	}
	return bytes, err
}

// templatePart returns what of a plan every sandbox of its template shares.
func (s *Store) templatePart(p Plan) (Plan, error) {
	if len(p.Committed) >= len(p.Lowers) {
		return Plan{}, fmt.Errorf("a plan with %d layers has %d committed ones", len(p.Lowers), len(p.Committed))
	}
	out := Plan{Env: p.Env, User: p.User, Dir: p.Dir}
	for _, dir := range p.Lowers[len(p.Committed):] {
		out.Lowers = append(out.Lowers, s.relative(dir))
	}
	for _, b := range p.Binds {
		b.Source = s.relative(b.Source)
		out.Binds = append(out.Binds, b)
	}
	for _, w := range p.Workspaces {
		out.Workspaces = append(out.Workspaces, Workspace{Source: w.Source, Target: w.Target})
	}
	return out, nil
}

// relative makes a path of the store independent of where the store lies.
func (s *Store) relative(path string) string {
	if rest, ok := strings.CutPrefix(path, s.dir+"/"); ok {
		return rest
	}
	return path
}

func (s *Store) absolute(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(s.dir, path)
}

// Layer returns a committed layer. NotFound: there is none of that id.
func (s *Store) Layer(id string) (Layer, error) {
	s.kept.mu.Lock()
	defer s.kept.mu.Unlock()
	l, ok := s.kept.layers[id]
	if !ok {
		return Layer{}, errs.New(errs.NotFound, "there is no layer %s", id)
	}
	return l, nil
}

// fromLayer returns the part of a plan that every sandbox of a committed layer shares, and notes that
// the sandbox uses it.
func (s *Store) fromLayer(_ context.Context, r Request) (Plan, error) {
	return s.planLayers(r.Layer, r.ID)
}

func (s *Store) planLayers(layer, sandbox string) (Plan, error) {
	// No layer goes between being found and being noted.
	s.kept.change.RLock()
	defer s.kept.change.RUnlock()
	l, err := s.Layer(layer)
	if err != nil {
		return Plan{}, err
	}
	p := l.Plan
	p.Lowers, p.Binds, p.Workspaces = nil, slices.Clone(p.Binds), nil
	p.Committed = l.stack()
	for _, below := range p.Committed {
		p.Lowers = append(p.Lowers, s.keptPath(below)+"/upper")
	}
	for _, dir := range l.Plan.Lowers {
		p.Lowers = append(p.Lowers, s.absolute(dir))
	}
	for i := range p.Binds {
		p.Binds[i].Source = s.absolute(p.Binds[i].Source)
	}
	return p, s.use(sandbox, use{base: l.Base, layers: p.Committed})
}

// stack returns the layer and those below it.
func (l Layer) stack() []string { return append([]string{l.ID}, l.Below...) }

// workspaceLowers returns what committed layers hold of the workspace at target, the topmost first.
func (s *Store) workspaceLowers(committed []string, target string) []string {
	var lowers []string
	for _, id := range committed {
		l, err := s.Layer(id)
		if err != nil {
			continue // can't be: it was noted as used
		}
		at := slices.IndexFunc(l.Plan.Workspaces, func(w Workspace) bool { return w.Target == target })
		if at >= 0 {
			lowers = append(lowers, fmt.Sprintf("%s/ws%d/upper", s.keptPath(id), at))
		}
	}
	return lowers
}

// sameRoot gives the root directory of a new writable layer the owner, mode and attributes of the layer
// below it: what shows as / inside is the writable layer's.
func sameRoot(upper, below string) error {
	from, err := fd.OpenRoot(below)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := fd.OpenRoot(upper)
	if err != nil {
		return err
	}
	defer to.Close()
	c := fd.NewCopier(to)
	defer c.Close()
	return c.CopyRoot(from, overlayXattr)
}

// use is what a sandbox has below it.
type use struct {
	base   string
	layers []string
}

// text is the target of the symbolic link that notes it: no name in it holds a colon.
func (u use) text() string { return strings.Join(append([]string{u.base}, u.layers...), ":") }

func (s *Store) readUse(id string) (use, error) {
	target, err := os.Readlink(filepath.Join(s.useDir(), id))
	if notThere(err) {
		return use{}, errs.Wrap(err, errs.NotFound, "sandbox %s has no files any more", id)
	}
	if err != nil {
		return use{}, err
	}
	parts := strings.Split(target, ":")
	return use{base: parts[0], layers: parts[1:]}, nil
}

// uses returns what all sandboxes have below them.
func (s *Store) uses() ([]use, error) {
	entries, err := os.ReadDir(s.useDir())
	if err != nil {
		return nil, err
	}
	all := make([]use, 0, len(entries))
	for _, e := range entries {
		u, err := s.readUse(e.Name())
		if errs.Is(err, errs.NotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, u)
	}
	return all, nil
}

// envFile keeps, in a layer beside its files, the environment that its sandbox was given. Nothing inside
// sees it, and it goes with the layer.
const envFile = "env.json"

// PutEnv keeps the environment of a sandbox with its files: a commit of them keeps it as well. Values may be
// secrets; they lie where the sandbox's own files do, which nobody but the server's user can read.
func (s *Store) PutEnv(id string, env map[string]string) error {
	if !validID(id) {
		return errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	data, err := json.Marshal(env)
	if err != nil {
		return err
	}
	// Not synced: what keeps or flushes the layer writes it out as well.
	path := filepath.Join(s.disk.files(s.live(id)), envFile)
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// Env returns what PutEnv kept of a sandbox; nil: nothing.
func (s *Store) Env(id string) (map[string]string, error) {
	if !validID(id) {
		return nil, errs.New(errs.InvalidArgument, "%q is no sandbox id", id)
	}
	return readEnv(s.disk.files(s.live(id)))
}

// LayerEnv returns the environment that was kept with a committed layer; nil: none.
func (s *Store) LayerEnv(layer string) (map[string]string, error) {
	if _, err := s.Layer(layer); err != nil {
		return nil, err
	}
	return readEnv(s.keptPath(layer))
}

func readEnv(dir string) (map[string]string, error) {
	data, err := os.ReadFile(filepath.Join(dir, envFile))
	if notThere(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var env map[string]string
	return env, json.Unmarshal(data, &env)
}
