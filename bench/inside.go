package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"casemate.dev/client"
)

const (
	// insideName is the floor's program inside a sandbox among the peers.
	insideName = "fork+exec inside"
	// insidePath is where it lies there.
	insidePath = "/tmp/casemate-bench-floor"
)

// putFloor puts the floor's program into a sandbox. It reports false where it does not run there: another C
// library, say.
func (b *bench) putFloor(ctx context.Context, id string) (bool, error) {
	if b.floor.program == "" {
		return false, nil
	}
	text, err := os.ReadFile(b.floor.program)
	if err != nil {
		return false, err
	}
	o := client.WriteOptions{Mode: 0o755, Size: int64(len(text))}
	if _, err := b.c.Files.Write(ctx, id, insidePath, bytes.NewReader(text), o); err != nil {
		return false, fmt.Errorf("put the floor's program into a sandbox: %w", err)
	}
	_, err = b.insideRound(ctx, id, 1)
	return err == nil, nil
}

// insideRound starts count processes inside, one after the other, without Casemate taking part: what they take
// is the kernel's, within the walls.
func (b *bench) insideRound(ctx context.Context, id string, count int) (Stats, error) {
	spec := &client.ProcessSpec{Argv: []string{insidePath, "each", "1", strconv.Itoa(count)}}
	res, err := b.c.Processes.Execute(ctx, id, spec, nil)
	if err != nil {
		return Stats{}, err
	}
	if p := res.GetProcess(); p.GetEnd() != "exited" || p.GetCode() != 0 {
		return Stats{}, errors.New("the floor's program does not run inside: " + p.GetEnd())
	}
	return floorStats(res.GetStdout())
}
