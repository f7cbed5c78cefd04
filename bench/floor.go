package bench

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

//go:embed floor/floor.c
var floorSource []byte

// floor starts /bin/true as fast as this machine can.
type floor struct {
	program string // "" where there is no C compiler
	dir     string
}

// newFloor compiles the floor's program.
func newFloor(ctx context.Context) (*floor, error) {
	dir, err := os.MkdirTemp("", "casemate-bench")
	if err != nil {
		return nil, err
	}
	f := &floor{dir: dir}
	cc, err := exec.LookPath("cc")
	if err != nil {
		return f, nil
	}
	source := filepath.Join(dir, "floor.c")
	if err := os.WriteFile(source, floorSource, 0o600); err != nil {
		return f, err
	}
	program := filepath.Join(dir, "floor")
	if out, err := exec.CommandContext(ctx, cc, "-O2", "-o", program, source).CombinedOutput(); err != nil {
		return f, fmt.Errorf("compile floor/floor.c: %w: %s", err, bytes.TrimSpace(out))
	}
	f.program = program
	return f, nil
}

func (f *floor) close() { _ = os.RemoveAll(f.dir) }

// note says what stands in for the floor, or nothing.
func (f *floor) note() string {
	if f.program != "" {
		return ""
	}
	return "no C compiler here: the floor is a Go program's fork and exec, which is slower"
}

// each starts count processes in each of some workers, in three rounds, and returns the best.
func (f *floor) each(ctx context.Context, workers, count int) (Stats, error) {
	var best Stats
	for range 3 {
		s, err := f.round(ctx, workers, count)
		if err != nil {
			return Stats{}, err
		}
		if s.Rate > best.Rate {
			best = s
		}
	}
	return best, nil
}

func (f *floor) round(ctx context.Context, workers, count int) (Stats, error) {
	if f.program == "" {
		return goRound(ctx, workers, count)
	}
	out, err := exec.CommandContext(ctx, f.program, "each", strconv.Itoa(workers), strconv.Itoa(count)).Output()
	if err != nil {
		return Stats{}, fmt.Errorf("run the floor: %w", err)
	}
	return floorStats(out)
}

// floorStats sums up what the floor's program printed.
func floorStats(out []byte) (Stats, error) {
	total, all, err := parseFloor(out)
	if err != nil {
		return Stats{}, err
	}
	s := summarize(all)
	s.Rate = float64(len(all)) / total.Seconds()
	return s, nil
}

func parseFloor(out []byte) (total time.Duration, all []time.Duration, err error) {
	lines := bufio.NewScanner(bytes.NewReader(out))
	for lines.Scan() {
		text, isTotal := strings.CutPrefix(lines.Text(), "total ")
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, nil, fmt.Errorf("the floor printed %q: %w", lines.Text(), err)
		}
		if isTotal {
			total = time.Duration(n)
		} else {
			all = append(all, time.Duration(n))
		}
	}
	if total <= 0 {
		return 0, nil, fmt.Errorf("the floor printed no total")
	}
	return total, all, nil
}

// burst starts count processes at once and returns the time until all have ended, best of three.
func (f *floor) burst(ctx context.Context, count int) (time.Duration, error) {
	var best time.Duration
	for range 3 {
		var took time.Duration
		if f.program == "" {
			begun := time.Now()
			if err := atOnce(count, func(int) error { return exec.CommandContext(ctx, "/bin/true").Run() }); err != nil {
				return 0, err
			}
			took = time.Since(begun)
		} else {
			out, err := exec.CommandContext(ctx, f.program, "burst", strconv.Itoa(count)).Output()
			if err != nil {
				return 0, fmt.Errorf("run the floor: %w", err)
			}
			if took, _, err = parseFloor(out); err != nil {
				return 0, err
			}
		}
		if best == 0 || took < best {
			best = took
		}
	}
	return best, nil
}

// goRound is the floor without a C compiler.
func goRound(ctx context.Context, workers, count int) (Stats, error) {
	begun := time.Now()
	all, err := inParallel(workers, count, func() error { return exec.CommandContext(ctx, "/bin/true").Run() })
	if err != nil {
		return Stats{}, err
	}
	s := summarize(all)
	s.Rate = float64(len(all)) / time.Since(begun).Seconds()
	return s, nil
}
