package namespace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/pidfd"
)

// Adopt implements isolation.Backend.
func (b *Backend) Adopt(ctx context.Context, raw json.RawMessage) (isolation.Instance, error) {
	r, err := decodeRecord(raw)
	if err != nil {
		return nil, errs.Wrap(err, errs.InvalidArgument, "the sandbox's record can't be read")
	}
	if b.instance(r.ID) != nil {
		return nil, errs.New(errs.AlreadyExists, "sandbox %s is running here already", r.ID)
	}
	proc, err := b.find(r)
	if err != nil {
		return nil, err
	}
	undo := cleanup.New(func() { _ = proc.Close() })
	defer undo.Run()
	i := &Instance{
		b: b, id: r.ID, name: r.Name, first: r.First, proc: proc, socket: b.socketPath(r.Name),
		record: r, raw: slices.Clone(raw), done: make(chan struct{}),
	}
	if r.Applied != nil {
		i.applied = *r.Applied
	}
	if b.groups != nil && i.applied.CgroupVersion != 0 {
		if i.group, err = b.groups.Open(r.Name); err != nil {
			return nil, fmt.Errorf("adopt %s: %w", r.ID, err)
		}
		undo.Add(func() { _ = i.group.Close() })
	}
	b.ids.take(r.First)
	// For the words of a crash that is still to come. The handle says whether it was the right process.
	i.log, _ = os.Open(fmt.Sprintf("/proc/%d/fd/2", r.PID))
	if !proc.Alive() { // its ids are freed by the next sweep
		if i.log != nil {
			_ = i.log.Close()
		}
		b.ids.release(r.First)
		return nil, errs.New(errs.NotFound, "the sandbox's first process has just ended")
	}
	undo.Release()
	b.known(i.name)
	i.adoptCalls(ctx)
	b.run(i)
	return i, nil
}

// Sweep implements isolation.Backend.
func (b *Backend) Sweep(ctx context.Context, keep map[string]bool) ([]string, error) {
	s := sweep{b: b, keep: map[string]bool{}}
	s.own()
	good, bad, err := b.records()
	if err != nil {
		return nil, err
	}
	for _, r := range good {
		if keep[r.ID] || s.keep[r.Name] {
			s.keep[r.Name] = true
			continue
		}
		s.instance(ctx, r)
	}
	for _, name := range bad {
		s.note("record "+name+" (unreadable)", removeFile(b.recordPath(name)))
	}
	s.groups()
	s.files()
	if err := b.ids.reclaim(); err != nil {
		s.failed = append(s.failed, err)
	}
	return s.removed, errors.Join(s.failed...)
}

// sweep is one Sweep under way. It does all it can and collects what it could not.
type sweep struct {
	b       *Backend
	keep    map[string]bool // names whose groups and files stay
	removed []string
	failed  []error
}

func (s *sweep) note(what string, err error) {
	if err != nil {
		s.failed = append(s.failed, fmt.Errorf("remove %s: %w", what, err))
		return
	}
	s.removed = append(s.removed, what)
}

// own keeps what this very server makes, holds ready or runs.
func (s *sweep) own() {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	maps.Copy(s.keep, s.b.names)
}

// instance ends what a record names. Groups and files go by name afterwards.
func (s *sweep) instance(ctx context.Context, r record) {
	proc, err := s.b.find(r)
	if errs.Is(err, errs.NotFound) {
		return
	}
	if err == nil {
		err = s.kill(ctx, r, proc)
		_ = proc.Close()
	}
	if err != nil {
		s.keep[r.Name] = true
	}
	s.note(fmt.Sprintf("process %d of sandbox %s", r.PID, r.ID), err)
}

// kill ends a sandbox, also a frozen one: its groups' Kill thaws what it has signalled.
func (s *sweep) kill(ctx context.Context, r record, proc *pidfd.Handle) error {
	ctx, cancel := context.WithTimeout(ctx, endTimeout) // a server's start waits for it
	defer cancel()
	if err := proc.Signal(unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	if s.b.groups != nil {
		g, err := s.b.groups.Open(r.Name)
		if err == nil {
			err = errors.Join(g.Kill(ctx), g.Close())
		}
		if err != nil && !errs.Is(err, errs.NotFound) {
			return err
		}
	}
	return killAndWait(proc)
}

// groups removes control groups that belong to nobody, and kills what is in them: also a spare that a
// killed server left in the middle of being made.
func (s *sweep) groups() {
	if s.b.groups == nil {
		return
	}
	names, err := s.b.groups.List()
	if err != nil {
		s.failed = append(s.failed, err)
		return
	}
	for _, name := range names {
		if s.keep[name] {
			continue
		}
		g, err := s.b.groups.Open(name)
		if err == nil {
			err = s.b.removeGroup(g)
		}
		s.note("control groups "+name, err)
	}
}

// files removes records and sockets that belong to nobody.
func (s *sweep) files() {
	for _, pattern := range []string{"g*.json", "g*.sock"} {
		paths, err := filepath.Glob(filepath.Join(s.b.cfg.RunDir, pattern))
		if err != nil {
			s.failed = append(s.failed, err)
			return
		}
		for _, path := range paths {
			name, _, _ := strings.Cut(filepath.Base(path), ".")
			if !s.keep[name] {
				s.note("file "+filepath.Base(path), removeFile(path))
			}
		}
	}
}
