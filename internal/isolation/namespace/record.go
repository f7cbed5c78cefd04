package namespace

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/pidfd"
)

// record is what identifies a running instance after the server was restarted. It lies in the run
// directory from before the launch on, and in the domain's store from Start's return on.
type record struct {
	Version int    `json:"v"`
	ID      string `json:"id"`   // the sandbox's
	Name    string `json:"name"` // of sockets and control groups
	Boot    string `json:"boot"`
	PID     int    `json:"pid"`
	Start   uint64 `json:"start"`  // in clock ticks after boot
	PIDNS   string `json:"pid_ns"` // "pid:[inode]"
	First   uint32 `json:"first"`  // of the id range
	Disk    disk   `json:"disk"`
	// NetIndex and NetName are the network device's; 0 where there is none.
	NetIndex int    `json:"net_index,omitempty"`
	NetName  string `json:"net_name,omitempty"`
	// Calls are those that the keeper observes.
	Calls isolation.Calls `json:"calls,omitzero"`
	// Owner is the user that the user namespace belongs to; 0: root.
	Owner uint32 `json:"owner,omitempty"`
	// Applied is what was put in place, once that is known.
	Applied *isolation.Applied `json:"applied,omitempty"`
}

const recordVersion = 1

// newRecord describes a guest that is about to become a sandbox.
func (b *Backend) newRecord(g *guest, s isolation.Spec) record {
	return record{
		Version: recordVersion, ID: s.ID, Disk: disk{s.Root.Disk.Mechanism, s.Root.Upper}, Name: g.name, Boot: b.boot, PID: g.proc.PID(),
		Start: g.start, PIDNS: g.inodes["pid"], First: g.first,
		Calls: s.Calls, Owner: g.owner,
	}
}

func (b *Backend) recordPath(name string) string { return filepath.Join(b.cfg.RunDir, name+".json") }

// writeRecord writes the record's file, which is new. It is whole before the launch begins, so one that
// a crash cut short names nothing that still runs. No fsync: the run directory's content means
// nothing after a restart of the machine.
func (b *Backend) writeRecord(r record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode record: %w", err)
	}
	f, err := os.OpenFile(b.recordPath(r.Name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	return nil
}

func decodeRecord(data []byte) (record, error) {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("decode record: %w", err)
	}
	if r.Version != recordVersion {
		return r, errs.New(errs.Unsupported, "the record has version %d, this server knows %d", r.Version, recordVersion)
	}
	if r.Name == "" || strings.ContainsAny(r.Name, "/.") || r.PID <= 1 {
		return r, errors.New("decode record: names no instance")
	}
	return r, nil
}

// records reads the records in the run directory. What can't be read is reported by name.
func (b *Backend) records() (good []record, bad []string, err error) {
	files, err := filepath.Glob(filepath.Join(b.cfg.RunDir, "g*.json"))
	if err != nil {
		return nil, nil, err
	}
	for _, path := range files {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, nil, fmt.Errorf("read record: %w", err)
		}
		r, err := decodeRecord(data)
		if err != nil {
			bad = append(bad, strings.TrimSuffix(filepath.Base(path), ".json"))
			continue
		}
		good = append(good, r)
	}
	return good, bad, nil
}

// find opens the process that a record names, or returns an error of kind NotFound. The handle is
// opened first: what is compared afterwards is then about that very process, since its pid can't be
// given to another while it lives, and if it dies meanwhile the handle says so.
func (b *Backend) find(r record) (*pidfd.Handle, error) {
	gone := func(why string) error {
		return errs.New(errs.NotFound, "the sandbox's first process is gone: %s", why)
	}
	if r.Boot != b.boot {
		return nil, gone("the machine was restarted")
	}
	h, err := pidfd.Open(r.PID)
	if err != nil {
		return nil, gone("no process has its pid")
	}
	start, err := pidfd.StartTime(r.PID)
	if err == nil && start != r.Start {
		err = errors.New("its pid belongs to another process now")
	}
	if err == nil {
		var inode string
		if inode, err = os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", r.PID)); err == nil && inode != r.PIDNS {
			err = errors.New("the process is in another pid namespace")
		}
	}
	if err == nil && !h.Alive() {
		err = errors.New("it has ended")
	}
	if err != nil {
		_ = h.Close()
		return nil, gone(err.Error())
	}
	return h, nil
}
