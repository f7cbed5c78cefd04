package cgroup

import (
	"context"
	"errors"
	"os"
	"sync"
)

// Scope is the control group of one process and its descendants. It has the method set of
// isolation.Scope.
type Scope struct {
	id     string
	group  *Group
	driver scopeDriver
	layout []string
	files  []*os.File

	closeOnce sync.Once
	closeErr  error
}

// scopeDriver is what differs between the versions.
type scopeDriver interface {
	empty() (bool, error)
	kill(ctx context.Context) error
	remove(ctx context.Context) error
}

// renamer is a scopeDriver whose group can serve one process after another. Groups of version 2 can't
// be renamed (kernel/cgroup/cgroup.c: only cgroup1_kf_syscall_ops has a rename).
type renamer interface {
	rename(id string) (scopeDriver, error)
}

// ID returns the process's id.
func (s *Scope) ID() string { return s.id }

// Files returns the descriptors for the guest, in the order of Layout. They stay the Scope's.
func (s *Scope) Files() []*os.File { return s.files }

// Layout names the files' roles. On v1 "tasks" (write-only), "procs" (read-only; lists pids as the
// reader's pid namespace sees them) and "freezer" (write-only; takes FROZEN and THAWED). On v2 "kill"
// (write-only; takes 1) and "dir" (a detached mount of this one group, for CLONE_INTO_CGROUP; its
// ".." is itself).
//
// Beware of "procs": the kernel caches the list per open file for a second after each read
// (cgroup_pidlist_start), so reading the same descriptor again shows the old processes. Open it anew
// for every look, by /proc/self/fd/N. A frozen process dies only when thawed, and one that was
// signalled needs a moment to die before the next FROZEN: leave a growing pause between rounds.
func (s *Scope) Layout() []string { return s.layout }

// Empty reports whether no live process is left in the scope.
func (s *Scope) Empty() (bool, error) { return s.driver.empty() }

// Kill ends everything in the scope and returns when it is empty. Idempotent.
func (s *Scope) Kill(ctx context.Context) error { return s.driver.kill(ctx) }

// Recycle is Close for the scope of a process that ended by itself and left nothing alive: the group will
// serve another process. The caller must know that nobody is about to kill or freeze it by its files. It
// reports false where the group can't be kept; then Close is due.
func (s *Scope) Recycle() bool {
	if !s.group.mayKeep(s) {
		return false
	}
	s.closeOnce.Do(func() {
		// A Scope of its own: this one stays closed, whoever still holds it.
		if !s.group.keepIdle(&Scope{id: s.id, group: s.group, driver: s.driver, layout: s.layout, files: s.files}) {
			s.closeErr = s.close() // another was faster
		}
	})
	return true
}

// Close closes the files, kills what is left and removes the group. Idempotent.
func (s *Scope) Close() error {
	s.closeOnce.Do(func() { s.closeErr = s.close() })
	return s.closeErr
}

func (s *Scope) close() error {
	var all []error
	for _, f := range s.files {
		all = append(all, f.Close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeTimeout)
	defer cancel()
	return errors.Join(append(all, s.driver.remove(ctx))...)
}
