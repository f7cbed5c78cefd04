package sandbox

import (
	"context"
	"slices"

	"casemate.dev/internal/errs"
)

// FindProcess returns the process that has a pid inside a sandbox or, where pid is 0, a tag: the one
// that runs, else the last of those that ended whose output may still be there. It does not count as
// activity.
func (m *Manager) FindProcess(ctx context.Context, p Principal, ref string, pid int, tag string) (Process, error) {
	b, err := m.alive(ctx, p, ref)
	if err == nil {
		err = b.settled(ctx)
	}
	if err != nil {
		return Process{}, err
	}
	found, ok := Process{}, false
	for _, one := range b.processes() {
		if pid != 0 && one.PID != pid || pid == 0 && (tag == "" || one.Tag != tag) {
			continue
		}
		runs := one.End == EndNone
		if !ok || runs || found.End != EndNone {
			found, ok = one, true
		}
	}
	switch {
	case ok:
		return found, nil
	case pid != 0:
		return Process{}, errs.New(errs.NotFound, "process with pid %d not found", pid)
	}
	return Process{}, errs.New(errs.NotFound, "process with tag %s not found", quote(tag))
}

// RunningProcesses returns the processes of a sandbox that have not ended, the oldest first. It does
// not count as activity.
func (m *Manager) RunningProcesses(ctx context.Context, p Principal, ref string) ([]Process, error) {
	b, err := m.alive(ctx, p, ref)
	if err == nil {
		err = b.settled(ctx)
	}
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(b.processes(), func(p Process) bool { return p.End != EndNone }), nil
}

// processes returns those that the box holds and that have started, the oldest first.
func (b *box) processes() []Process {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]Process, 0, len(b.procs))
	for _, pr := range b.procs {
		if !pr.info.StartedAt.IsZero() {
			all = append(all, pr.info)
		}
	}
	slices.SortFunc(all, func(a, b Process) int { return a.StartedAt.Compare(b.StartedAt) })
	return all
}
