package bench

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/cleanup"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/journal/bundle"
	"casemate.dev/internal/store"
)

// journalRow times what the journal adds to a process, on this machine's disk and in a log of its own, since a server that
// records nothing can't be had: the event of its start, that of its end until it can't be lost any more, with its arguments
// and its output beside them, and the signed checkpoint that the answer carries.
func journalRow(ctx context.Context, b *bench) (row Row, err error) {
	log, done, err := openJournal(ctx)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, done()) }()
	n := 0
	each := func() error {
		n++
		return recordProcess(ctx, log, n)
	}
	if _, err := repeat(ctx, 50, each); err != nil {
		return row, err
	}
	took, err := repeat(ctx, b.rounds(2000), each)
	row = Row{Unit: "ms", Stats: summarize(took)}
	row.budget("p50 ≤ 1 ms", row.P50, 1, 0)
	return row, err
}

// openJournal opens a journal of its own in a new directory; done closes and removes it.
func openJournal(ctx context.Context) (log *journal.Log, done func() error, err error) {
	dir, err := os.MkdirTemp("", "casemate-bench-journal")
	if err != nil {
		return nil, nil, err
	}
	var undo cleanup.Stack
	done = func() error {
		undo.Run()
		return os.RemoveAll(dir)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, done())
		}
	}()
	db, err := store.Open(store.Config{Dir: filepath.Join(dir, "store")})
	if err != nil {
		return nil, nil, err
	}
	undo.Add(func() { _ = db.Close() })
	key, err := journal.LoadKey(dir, "casemate.dev/bench")
	if err != nil {
		return nil, nil, err
	}
	if log, err = journal.OpenSigned(ctx, db, journal.SignedOptions{Dir: filepath.Join(dir, "journal"), Key: key}); err != nil {
		return nil, nil, err
	}
	undo.Add(func() { _ = log.Close() })
	return log, done, nil
}

// recordProcess records the start of a process and its end, and makes the checkpoint that the answer carries.
func recordProcess(ctx context.Context, log *journal.Log, n int) error {
	e := journal.Event{Sandbox: "bench", Actor: "bench", Process: fmt.Sprint("prc_", n)}
	argv, said := journal.NewKeeper(true), journal.NewKeeper(true)
	_, _ = argv.Write([]byte(`["/bin/true"]`)) // never fails
	_, _ = said.Write([]byte("done\n"))
	e.Type = journal.ProcessStarted
	log.Post(e.With(journal.Server, map[string]string{"dir": "/"}).WithKept(journal.Server, "argv", argv))
	e.Type = journal.ProcessEnded
	e = e.With(journal.Guest, map[string]any{"end": "exited", "code": 0}).WithKept(journal.Guest, "stdout", said)
	if _, err := log.Record(ctx, e); err != nil {
		return err
	}
	_, err := log.Checkpoint()
	return err
}

// verifiedProcesses is how many processes the bundle has that verifyRow verifies.
const verifiedProcesses = 500

// verifyRow times the verification of a bundle of 500 processes with their arguments and output, beside hashing as many bytes.
func verifyRow(ctx context.Context, b *bench) (row Row, err error) {
	log, done, err := openJournal(ctx)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, done()) }()
	for n := range verifiedProcesses {
		if err := recordProcess(ctx, log, n); err != nil {
			return row, err
		}
	}
	var text bytes.Buffer
	if err := log.Export(ctx, "bench", nil, &text); err != nil {
		return row, err
	}
	took, err := repeat(ctx, b.rounds(40), func() error {
		r, err := bundle.Verify(bytes.NewReader(text.Bytes()), bundle.Options{Key: log.PublicKey()})
		if p, bad := r.First(); bad || r.Events != 2*verifiedProcesses {
			return errors.Join(err, fmt.Errorf("of a clean bundle %d events are verified, and: %s", r.Events, p.What))
		}
		return err
	})
	if err != nil {
		return row, err
	}
	hashed, err := repeat(ctx, b.rounds(40), func() error {
		_ = sha256.Sum256(text.Bytes())
		return nil
	})
	row = Row{Unit: "ms", Stats: summarize(took), Peers: map[string]Stats{"sha256": summarize(hashed)}}
	row.budget("p50 < 1,000 ms", row.P50, 1000, 0)
	row.Note = fmt.Sprintf("%d processes, %.1f MB", verifiedProcesses, float64(text.Len())/1e6)
	return row, err
}

// fileChangesMost is how much longer work may take whose changes of files are recorded, as a share.
const fileChangesMost = 1.05

// fileChanges times work that changes ten files, where these changes are recorded in full, in turns with the same where
// they are not.
func fileChanges(ctx context.Context, b *bench) (row Row, err error) {
	const levels = 2
	var ids [levels]string
	for i, level := range [levels]string{"off", "full"} {
		sb, cerr := b.c.Sandboxes.Create(ctx, &client.CreateRequest{
			Isolation: b.o.Isolation, Template: b.o.Template, Profile: b.o.Profile, FileChanges: level,
			Labels: map[string]string{"casemate": "bench"}, Lifetime: durationpb.New(30 * time.Minute),
		})
		if cerr != nil {
			return row, cerr
		}
		ids[i] = sb.GetId()
		defer func() { err = errors.Join(err, b.delete(ctx, ids[i])) }()
	}
	// Work of the processor, of a length that it has in both.
	const work = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done; for n in 0 1 2 3 4 5 6 7 8 9; do echo $i $$ >changed$n; done"
	var took [levels][]time.Duration
	for range b.rounds(60) {
		for i, id := range ids {
			one, err := b.shell(ctx, id, work)
			if err != nil {
				return row, err
			}
			took[i] = append(took[i], one)
		}
	}
	off := summarize(took[0])
	row = Row{Unit: "ms", Stats: summarize(took[1]), Peers: map[string]Stats{"off": off}}
	row.budget(fmt.Sprintf("p50 ≤ %g × without", fileChangesMost), row.P50, fileChangesMost*off.P50, off.P50)
	row.Note = fmt.Sprintf("recording adds %.1f ms to each", row.P50-off.P50)
	return row, nil
}
