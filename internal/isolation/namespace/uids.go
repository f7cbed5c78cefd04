package namespace

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
)

// The host ids that sandboxes run as. The space lies beyond what systemd gives to containers
// (0x00080000–0x6FFFFFFF, systemd's UIDS-GIDS.md) and below 2^31, from where on ids are taken for
// negative by some programs.
const (
	rangeSize  = 1 << 16
	firstID    = 0x70000000
	lastID     = 0x7fffffff
	blockSize  = 64 // ranges per lock file
	blockCount = (lastID - firstID + 1) / rangeSize / blockSize
)

// idPool hands out id ranges. Servers on one host share the space: each claims blocks of ranges by
// locking a file per block in a directory that all of them use. The kernel drops the lock when a
// server dies, also while its sandboxes run on; so a block's ranges are free only where no process
// of the host runs in them, whatever the files say.
type idPool struct {
	dir    string
	server string

	mu     sync.Mutex // guards the fields below
	locks  []*os.File
	owned  map[uint32]bool // first ids of the ranges in our blocks
	used   map[uint32]bool // handed out or taken
	free   []uint32        // handed out oldest first, so that an id rests long before it comes again
	closed bool
}

// openIDPool claims the blocks that this server had before.
func openIDPool(dir, server string) (*idPool, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory of id claims: %w", err)
	}
	p := &idPool{dir: dir, server: server, owned: map[uint32]bool{}, used: map[uint32]bool{}}
	for block := range blockCount {
		owner, err := os.ReadFile(p.path(block))
		if errors.Is(err, os.ErrNotExist) || err == nil && strings.TrimSpace(string(owner)) != server {
			continue
		}
		if err == nil {
			_, err = p.claim(block)
		}
		if err != nil {
			p.close()
			return nil, err
		}
	}
	return p, nil
}

func (p *idPool) path(block int) string { return filepath.Join(p.dir, fmt.Sprintf("%02d.lock", block)) }

// acquire hands out a range and returns its first id.
func (p *idPool) acquire() (uint32, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return 0, errs.New(errs.Unavailable, "the server is shutting down")
	}
	for block := 0; len(p.free) == 0; block++ {
		if block == blockCount {
			return 0, errs.New(errs.ResourceExhausted, "all %d id ranges of this host are in use", blockCount*blockSize).
				WithHint("delete sandboxes, or stop other servers on this host")
		}
		if _, err := p.claim(block); err != nil {
			return 0, err
		}
	}
	first := p.free[0]
	p.free = p.free[1:]
	p.used[first] = true
	return first, nil
}

// release takes a range back. No process may run in it any more.
func (p *idPool) release(first uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.used, first)
	if p.owned[first] && !slices.Contains(p.free, first) {
		p.free = append(p.free, first)
	}
}

// take marks the range of an adopted instance as in use. It may lie in a block that is another
// server's by now: that one has seen the instance's processes, and leaves the range alone.
func (p *idPool) take(first uint32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if i := slices.Index(p.free, first); i >= 0 {
		p.free = slices.Delete(p.free, i, i+1)
	}
	p.used[first] = true
}

// claim tries to lock a block; it reports false where the block is another's. The lock's holder keeps
// mu, or has the pool for itself.
func (p *idPool) claim(block int) (bool, error) {
	start := uint32(firstID + block*blockSize*rangeSize)
	if p.owned[start] {
		return false, nil
	}
	taken, err := foreignIDs(start, blockSize*rangeSize)
	if err != nil || taken {
		return false, err
	}
	f, err := os.OpenFile(p.path(block), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return false, fmt.Errorf("open id claim: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil
		}
		return false, fmt.Errorf("lock id claim: %w", err)
	}
	busy, err := runningIn(start, blockSize)
	if err == nil && len(busy) > 0 && !p.ownedBefore(f) {
		_ = f.Close() // another server's sandboxes outlived it, and it may come back
		return false, nil
	}
	if err == nil {
		err = writeOwner(f, p.server)
	}
	if err != nil {
		_ = f.Close()
		return false, err
	}
	p.locks = append(p.locks, f)
	for i := range uint32(blockSize) {
		first := start + i*rangeSize
		p.owned[first] = true
		if !busy[first] {
			p.free = append(p.free, first)
		}
	}
	return true, nil
}

func (p *idPool) ownedBefore(f *os.File) bool {
	buf := make([]byte, 128)
	n, _ := f.ReadAt(buf, 0)
	return strings.TrimSpace(string(buf[:n])) == p.server
}

func writeOwner(f *os.File, server string) error {
	if err := f.Truncate(0); err != nil {
		return fmt.Errorf("write id claim: %w", err)
	}
	if _, err := f.WriteAt([]byte(server+"\n"), 0); err != nil {
		return fmt.Errorf("write id claim: %w", err)
	}
	return nil
}

// reclaim frees the ranges that nobody took up and no process runs in any more. It is for the end of
// a sweep.
func (p *idPool) reclaim() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	busy, err := runningIn(firstID, blockCount*blockSize)
	if err != nil {
		return err
	}
	for first := range p.owned {
		if !p.used[first] && !busy[first] && !slices.Contains(p.free, first) {
			p.free = append(p.free, first)
		}
	}
	return nil
}

func (p *idPool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, f := range p.locks {
		_ = f.Close()
	}
	p.locks = nil
}

// foreignIDs reports whether the host gives ids of the span to its users (subuid(5)).
func foreignIDs(start, count uint32) (bool, error) {
	for _, path := range []string{"/etc/subuid", "/etc/subgid"} {
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return false, fmt.Errorf("read %s: %w", path, err)
		}
		if overlapsSubIDs(b, uint64(start), uint64(count)) {
			return true, nil
		}
	}
	return false, nil
}

func overlapsSubIDs(file []byte, start, count uint64) bool {
	lines := bufio.NewScanner(bytes.NewReader(file))
	for lines.Scan() {
		parts := strings.Split(strings.TrimSpace(lines.Text()), ":")
		if len(parts) != 3 {
			continue
		}
		from, errFrom := strconv.ParseUint(parts[1], 10, 32)
		length, errLength := strconv.ParseUint(parts[2], 10, 32)
		if errFrom == nil && errLength == nil && from < start+count && start < from+length {
			return true
		}
	}
	return false
}

// runningIn returns the ranges, from start on, that processes of the host run in now.
func runningIn(start uint32, ranges int) (map[uint32]bool, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	busy := map[uint32]bool{}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		// Not the directory's owner: that is root for the very processes that matter, the guests.
		status, err := os.ReadFile("/proc/" + e.Name() + "/status")
		if err != nil {
			continue // ended meanwhile
		}
		if bytes.Contains(status, []byte("\nState:\tZ")) {
			continue // nothing of it runs; its parent is slow to reap it
		}
		uid, ok := realUID(status)
		if ok && uid >= start && uint64(uid) < uint64(start)+uint64(ranges)*rangeSize {
			busy[uid-uid%rangeSize] = true
		}
	}
	return busy, nil
}

// realUID reads the first number of a status file's Uid line.
func realUID(status []byte) (uint32, bool) {
	_, rest, ok := bytes.Cut(status, []byte("\nUid:"))
	if !ok {
		return 0, false
	}
	fields := bytes.Fields(rest[:min(len(rest), 64)])
	if len(fields) == 0 {
		return 0, false
	}
	n, err := strconv.ParseUint(string(fields[0]), 10, 32)
	return uint32(n), err == nil
}
