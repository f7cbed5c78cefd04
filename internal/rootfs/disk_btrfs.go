package rootfs

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/linux/btrfs"
)

// limitAttr keeps, on a layer's directory, the limit that was asked for. Only host root can read it.
const limitAttr = "trusted.casemate.limit"

const (
	// overhead is what a part of the image file is kept for: trees that no quota group counts, the
	// space that deleting needs, and what Lend lends.
	overhead = 64 << 20
	// minGrant is the least room that a new layer starts with.
	minGrant = 8 << 20
	// tend is how often the store looks after deleted layers and, while the limits that were asked for
	// exceed the image, after who needs room. At 1 GB/s a writer fills 250 MB in between.
	tend = 250 * time.Millisecond
	// commitEvery is after how many such looks a commit is asked for, to bring deleted space back.
	commitEvery = 8
)

// btrfsDisk limits subvolumes of a preallocated btrfs image by quota groups. The sum of the limits that
// hold never exceeds the image: where sandboxes were promised more than that together, each has an
// equal room above what it uses, which is evened out while they write.
type btrfsDisk struct {
	dir      string
	rootDir  *os.File
	log      *slog.Logger
	capacity int64
	counters btrfs.Counters

	stop   context.CancelFunc
	worker sync.WaitGroup

	// mu guards the fields below.
	mu     sync.Mutex
	layers map[string]*grant
	gone   map[uint64]int64 // deleted subvolumes whose space has not come back: bytes by id
	// evened is the file system's activity at the last look, and changed says that layers came or went.
	evened  int64
	changed bool
	// pinned is what committed layers hold beside the writable ones, and recount says that it is to be
	// found out anew.
	pinned  int64
	recount bool
}

// grant is what one layer was promised and has.
type grant struct {
	id     uint64
	wanted int64
	given  int64
	rests  bool // nobody writes to it, and it was given no more than it holds
}

func openBtrfs(dir string, size int64, log *slog.Logger) (disk, error) {
	image := filepath.Join(dir, "layers.img")
	if err := makeImage(image, size); err != nil {
		return nil, err
	}
	d := &btrfsDisk{
		dir: filepath.Join(dir, "layers"), log: log, layers: map[string]*grant{}, gone: map[uint64]int64{},
	}
	var err error
	if d.rootDir, err = mountImage(image, d.dir); err != nil {
		return nil, err
	}
	if err := d.prepare(); err != nil {
		return nil, errors.Join(err, d.rootDir.Close(), unmount(d.dir))
	}
	ctx, stop := context.WithCancel(context.Background())
	d.stop = stop
	d.worker.Go(func() { d.tend(ctx) })
	return d, nil
}

// prepare switches quotas on and looks how much there is to give.
func (d *btrfsDisk) prepare() error {
	if err := btrfs.EnableQuota(d.rootDir); err != nil {
		return err
	}
	var err error
	if d.counters, err = btrfs.CountersOf(d.rootDir); err != nil {
		return err
	}
	if d.counters.Astray() { // the flag outlives a mount
		if err := btrfs.Recount(d.rootDir); err != nil {
			return err
		}
	}
	var st syscall.Statfs_t
	if err := syscall.Statfs(d.dir, &st); err != nil {
		return err
	}
	total := int64(st.Blocks) * st.Bsize
	d.capacity = total - total/20 - overhead
	ids, err := btrfs.QuotaGroups(d.rootDir)
	if err != nil {
		return err
	}
	for _, id := range ids { // of an earlier server: what it deleted, and had no time to clean up after
		if is, err := btrfs.Exists(d.rootDir, id); err != nil {
			return err
		} else if !is {
			d.gone[id] = 0
		}
	}
	d.recount = true
	return nil
}

func (d *btrfsDisk) mechanism() string { return byBtrfs }
func (d *btrfsDisk) root() string      { return d.dir }

func (d *btrfsDisk) files(path string) string { return path }

func (d *btrfsDisk) create(path string) (*layer, error) {
	parent, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer parent.Close()
	if err := btrfs.CreateSubvolume(parent, filepath.Base(path)); err != nil {
		return nil, err
	}
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := dir.Chmod(0o700); err != nil {
		_ = dir.Close()
		return nil, err
	}
	id, err := btrfs.ID(dir)
	if err != nil {
		_ = dir.Close()
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.layers[path] = &grant{id: id}
	return &layer{path: path, dir: dir}, nil
}

func (d *btrfsDisk) limit(l *layer, bytes, _ int64) (DiskLimit, error) {
	wanted := min(bytes, d.capacity)
	if wanted <= 0 {
		wanted = d.capacity
	}
	if err := syscall.Setxattr(l.path, limitAttr, []byte(strconv.FormatInt(wanted, 10)), 0); err != nil {
		return DiskLimit{}, fmt.Errorf("note limit: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	g := d.layers[l.path]
	given := min(wanted, d.freeLocked())
	if given < wanted { // leave as much to the next ones
		given /= 2
	}
	if given < min(wanted, minGrant) {
		if given = min(wanted, d.makeRoomLocked()/2); given < min(wanted, minGrant) {
			return DiskLimit{}, errs.New(errs.ResourceExhausted, "the store is full").
				WithHint("delete sandboxes; a larger store needs a new data directory: casemate serve --store-size")
		}
	}
	if err := btrfs.Limit(l.dir, given); err != nil {
		return DiskLimit{}, err
	}
	g.wanted, g.given, d.changed = wanted, given, true
	return DiskLimit{Mechanism: byBtrfs, Bytes: wanted, Backed: given}, nil
}

// freeLocked is what no layer was given.
func (d *btrfsDisk) freeLocked() int64 {
	free := d.capacity
	for _, g := range d.layers {
		free -= g.given
	}
	for _, bytes := range d.gone {
		free -= bytes
	}
	return max(0, free-d.pinned)
}

// reclaim bounds how long a create waits for the space of deleted layers.
const reclaim = 3 * time.Second

// makeRoomLocked takes room from layers that don't use it, waits for what deleted ones held, and
// returns how much is free then.
func (d *btrfsDisk) makeRoomLocked() int64 {
	d.evenLocked()
	look := time.NewTicker(tend / 4)
	defer look.Stop()
	for end := time.Now().Add(reclaim); len(d.gone) > 0 && d.freeLocked() < 2*minGrant && time.Now().Before(end); {
		if err := btrfs.StartCommit(d.rootDir); err != nil {
			d.log.Warn("commit the store", "error", err)
			break
		}
		d.mu.Unlock() // others go on meanwhile
		<-look.C
		d.mu.Lock()
		d.reapLocked()
	}
	return d.freeLocked()
}

// reapLocked takes back the space of deleted layers, and drops their quota groups once these count nothing.
func (d *btrfsDisk) reapLocked() {
	for id := range d.gone {
		if is, err := btrfs.Exists(d.rootDir, id); err != nil || is {
			continue
		}
		d.gone[id] = 0
		if btrfs.DropQuotaGroup(d.rootDir, id) == nil {
			delete(d.gone, id)
		}
	}
}

// holdLimits has everything counted anew where the kernel has stopped counting: limits would hold no more.
func (d *btrfsDisk) holdLimits() {
	if !d.counters.Astray() {
		return
	}
	d.log.Error("the kernel has stopped counting what sandboxes write; counting anew, until then disk limits don't hold")
	if err := btrfs.Recount(d.rootDir); err != nil {
		d.log.Error("count what sandboxes have written", "error", err)
	}
}

// strainedLocked reports whether some layer has less than it was promised.
func (d *btrfsDisk) strainedLocked() bool {
	for _, g := range d.layers {
		if g.given < g.wanted && !g.rests {
			return true
		}
	}
	return false
}

// evenLocked divides the room anew: first it lowers limits, then it raises others.
func (d *btrfsDisk) evenLocked() {
	paths := slices.Sorted(maps.Keys(d.layers))
	capacity := d.capacity - d.capacity/16 - d.pinned // a part is for those who come next
	for _, bytes := range d.gone {
		capacity -= bytes
	}
	claims := make([]claim, 0, len(paths))
	for _, p := range paths {
		g := d.layers[p]
		used, err := btrfs.Usage(d.rootDir, g.id)
		if err != nil { // takes part with what it has
			used = g.given
		}
		used += d.counters.Pending(g.id)
		want := max(g.wanted, used)
		if g.rests {
			want = used
		}
		claims = append(claims, claim{used: used, want: want})
	}
	limits := share(capacity, claims)
	for _, lower := range []bool{true, false} {
		for i, p := range paths {
			g := d.layers[p]
			if g.wanted == 0 || limits[i] == g.given || limits[i] < g.given != lower {
				continue
			}
			if err := btrfs.LimitID(d.rootDir, g.id, limits[i]); err != nil {
				d.log.Warn("change disk limit", "error", err)
				continue
			}
			g.given = limits[i]
		}
	}
}

func (d *btrfsDisk) adopt(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	if !btrfs.IsSubvolume(dir) {
		return nil // not ours; Sweep removes it
	}
	id, err := btrfs.ID(dir)
	if err != nil {
		return err
	}
	var buf [32]byte
	g := &grant{id: id}
	if n, err := syscall.Getxattr(path, limitAttr, buf[:]); err == nil {
		g.wanted, _ = strconv.ParseInt(string(buf[:n]), 10, 64)
	}
	if g.given, err = btrfs.LimitOf(d.rootDir, id); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.layers[path] = g
	return nil
}

func (d *btrfsDisk) moved(from, to string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g, ok := d.layers[from]
	if !ok {
		return
	}
	delete(d.layers, from)
	d.layers[to] = g
	if filepath.Base(filepath.Dir(to)) == "trash" {
		// It will write no more: what it does not use is free for others, the rest when it is deleted.
		if used, err := btrfs.Usage(d.rootDir, g.id); err == nil {
			g.given = min(g.given, used)
		}
		g.wanted = 0
	}
}

func (d *btrfsDisk) remove(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	subvolume := btrfs.IsSubvolume(dir)
	id, err := btrfs.ID(dir)
	_ = dir.Close()
	if err != nil {
		return err
	}
	if !subvolume {
		return os.RemoveAll(path)
	}
	parent, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer parent.Close()
	if err := btrfs.DeleteTree(d.rootDir, parent, filepath.Base(path)); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	var held int64
	if g, ok := d.layers[path]; ok {
		held = g.given
	}
	delete(d.layers, path)
	d.gone[id], d.changed = held, true
	return nil
}

func (d *btrfsDisk) used(path string) (int64, error) {
	d.mu.Lock()
	g, ok := d.layers[path]
	d.mu.Unlock()
	if !ok {
		return 0, errs.New(errs.NotFound, "no such layer")
	}
	return btrfs.Usage(d.rootDir, g.id)
}

func (d *btrfsDisk) lend(path string) (func() error, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	g, ok := d.layers[path]
	if !ok {
		return nil, errs.New(errs.NotFound, "no such layer")
	}
	back := func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		return btrfs.LimitID(d.rootDir, g.id, g.given)
	}
	return back, btrfs.LimitID(d.rootDir, g.id, g.given+lendBytes)
}

func (d *btrfsDisk) rest(path string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	g, ok := d.layers[path]
	if !ok {
		return errs.New(errs.NotFound, "no such layer")
	}
	if g.rests || g.wanted == 0 {
		return nil
	}
	used, err := btrfs.Usage(d.rootDir, g.id)
	if err != nil {
		return err
	}
	least := min(g.given, used+d.counters.Pending(g.id))
	if err := btrfs.LimitID(d.rootDir, g.id, max(least, 1)); err != nil {
		return err
	}
	g.given, g.rests, d.changed = least, true, true
	return nil
}

func (d *btrfsDisk) rouse(path string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	g, ok := d.layers[path]
	if !ok {
		return errs.New(errs.NotFound, "no such layer")
	}
	if !g.rests {
		return nil
	}
	room := min(g.wanted-g.given, d.freeLocked())
	if room < min(g.wanted-g.given, minGrant) {
		if room = min(g.wanted-g.given, d.makeRoomLocked()/2); room < min(g.wanted-g.given, minGrant) {
			return errs.New(errs.ResourceExhausted, "the store is full").
				WithHint("delete sandboxes or commits; a larger store needs a new data directory: casemate serve --store-size")
		}
	}
	given := g.given + max(room, 0)
	if err := btrfs.LimitID(d.rootDir, g.id, given); err != nil {
		return err
	}
	g.given, g.rests, d.changed = given, false, true
	return nil
}

func (d *btrfsDisk) snapshot(path string) (string, func() error, error) {
	src, err := os.Open(path)
	if err != nil {
		return "", nil, err
	}
	defer src.Close()
	parent, err := os.Open(filepath.Join(d.dir, "snapshots"))
	if err != nil {
		return "", nil, err
	}
	defer parent.Close()
	name := rand.Text()
	if err := btrfs.Snapshot(src, parent, name); err != nil {
		return "", nil, err
	}
	dir := filepath.Join(d.dir, "snapshots", name)
	return dir, func() error { return d.remove(dir) }, nil
}

// tend gives quota groups of deleted layers back once the kernel has freed their space, and evens the
// room out while it is short.
func (d *btrfsDisk) tend(ctx context.Context) {
	round := 0
	tick := time.NewTicker(tend)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		d.holdLimits()
		d.mu.Lock()
		if len(d.gone) > 0 {
			d.reapLocked()
			if round++; round%commitEvery == 0 && len(d.gone) > 0 {
				if err := btrfs.StartCommit(d.rootDir); err != nil {
					d.log.Warn("commit the store", "error", err)
				}
			}
		}
		d.recountLocked()
		// While nobody writes there is nothing to even out.
		if now := d.counters.Activity(); d.strainedLocked() && (d.changed || now != d.evened) {
			d.evened, d.changed = now, false
			d.evenLocked()
		}
		d.mu.Unlock()
	}
}

func (d *btrfsDisk) close() error {
	if d.stop != nil {
		d.stop()
		d.worker.Wait()
	}
	return errors.Join(d.rootDir.Close(), unmount(d.dir))
}
