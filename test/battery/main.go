// Command battery runs the attack battery on every isolation backend of a server of its own, the same scripts in runc and
// bubblewrap beside, and writes what came of it into docs/security.md. It needs root, bin/casemate and bin/runsc.
//
// What belongs here: the page's table, and which tests try what no script inside can. What does not: the cases, and what must
// come of them (package selftest).
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"casemate.dev/internal/selftest"
)

func main() {
	program := flag.String("casemate", "bin/casemate", "the program")
	page := flag.String("page", "docs/security.md", "the page to write; empty: none")
	dir := flag.String("dir", "", "a directory for the server that stays, so that the next run finds template base built; empty: one that goes")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	wrong, err := run(ctx, *program, *page, *dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "battery:", err)
		os.Exit(125)
	}
	if wrong > 0 {
		os.Exit(1)
	}
}

// run returns how many cases came out wrong on our backends.
func run(ctx context.Context, program, page, dir string) (wrong int, err error) {
	if dir == "" {
		if dir, err = os.MkdirTemp("/tmp", "casemate-battery-"); err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	}
	s := server{program, dir}
	if err := s.start(ctx); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, s.stop()) }()
	begun := time.Now()
	r := newResults("")
	if wrong, err = r.attackAll(ctx, s); err != nil {
		return wrong, err
	}
	if r.stamp, err = s.stamp(ctx, begun); err != nil || page == "" {
		return wrong, err
	}
	return wrong, r.write(page)
}

// attackAll runs the battery on every backend, and on peers, and returns how many cases are not as they must be on ours. Of each
// backend one sandbox is attacked at a time, so that no case is judged by what the next one takes; those of the network, which wait
// more than they work, are tried beside, and then the peers.
func (r *results) attackAll(ctx context.Context, s server) (int, error) {
	var wg sync.WaitGroup
	wrong, errs := make([]int, len(backends())+1), make([]error, len(backends())+1)
	for i, isolation := range backends() {
		wg.Go(func() { wrong[i], errs[i] = r.attack(ctx, s, "A,B,C,D,X", isolation) })
	}
	wg.Go(func() {
		last := len(backends())
		if wrong[last], errs[last] = r.attack(ctx, s, "F", backends()...); errs[last] == nil {
			errs[last] = r.runPeers(ctx)
		}
	})
	wg.Wait()
	sum := 0
	for _, n := range wrong {
		sum += n
	}
	return sum, errors.Join(errs...)
}

// attack runs some sections on backends, in one profile after the other.
func (r *results) attack(ctx context.Context, s server, only string, isolations ...string) (wrong int, err error) {
	for _, isolation := range isolations {
		for _, profile := range profiles() {
			report, err := s.selftest(ctx, isolation, profile, only)
			if err != nil {
				return wrong, fmt.Errorf("%s, %s, %s: %w", isolation, profile, only, err)
			}
			wrong += r.add(isolation, profile, only, report)
		}
	}
	return wrong, nil
}

// add takes in the verdicts of some sections in one column, says them in one line, and returns how many are not as they must be.
func (r *results) add(isolation, profile, only string, report selftest.Report) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := map[selftest.Outcome]int{}
	for _, v := range report.Verdicts {
		n[v.Outcome]++
		r.ours[column{v.ID, isolation, profile}] = v.Outcome
		if v.Outcome == selftest.Wrong || v.Outcome == selftest.Broken {
			fmt.Fprintf(os.Stdout, "%s %s %s %s: %s: %s\n", isolation, profile, v.ID, v.Title, v.Outcome, v.Detail)
		}
	}
	missing := -len(report.Verdicts)
	for _, c := range selftest.Cases() {
		if selftest.Selected(c.ID, strings.Split(only, ",")) {
			missing++
		}
	}
	fmt.Fprintf(os.Stdout, "%s %s %s: %d right, %d wrong, %d broken, %d not applicable, %d without a verdict, in %v\n", isolation, profile, only,
		n[selftest.Right], n[selftest.Wrong], n[selftest.Broken], n[selftest.NotApplicable], missing, report.Took.Round(time.Second))
	return n[selftest.Wrong] + n[selftest.Broken] + missing
}

// server is one of the battery's own.
type server struct{ program, dir string }

func (s server) start(ctx context.Context) error {
	err := s.command(ctx, "up", "--data-dir", filepath.Join(s.dir, "d"), "--run-dir", filepath.Join(s.dir, "r"), "--keys-dir", filepath.Join(s.dir, "k"),
		"--listen", "127.0.0.1:0", "--store-size", "4g")
	if err != nil {
		return err
	}
	if err = s.command(ctx, "--url", s.url(), "template", "build", selftest.StandardTemplate); err != nil {
		return errors.Join(err, s.stop())
	}
	return nil
}

func (s server) url() string { return "unix://" + filepath.Join(s.dir, "r", "casemate.sock") }

// stop ends it though ctx may have ended.
func (s server) stop() error {
	return s.command(context.Background(), "down", "--run-dir", filepath.Join(s.dir, "r"), "--sandboxes")
}

func (s server) command(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, s.program, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", s.program, strings.Join(args, " "), err, out)
	}
	return nil
}

// patience is that of the tests: all are attacked at once, and the machine may have more to do.
const patience = 30 * time.Second

// selftest runs some sections of the program's own.
func (s server) selftest(ctx context.Context, isolation, profile, only string) (selftest.Report, error) {
	var report selftest.Report
	cmd := exec.CommandContext(ctx, s.program, "--url", s.url(), "selftest", "--isolation", isolation, "--profile", profile,
		"--only", only, "--patience", patience.String(), "--json")
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) } // it ends its sandboxes first
	out, err := cmd.Output()
	var exit *exec.ExitError
	if err != nil && !(errors.As(err, &exit) && exit.ExitCode() == 1) { // 1: something came out wrong
		return report, err
	}
	return report, json.Unmarshal(out, &report)
}

// stamp says when and on what this was run.
func (s server) stamp(ctx context.Context, begun time.Time) (string, error) {
	parts := []string{"Run on " + begun.UTC().Format("2 January 2006")}
	for _, argv := range [][]string{{"uname", "-sr"}, {filepath.Join(filepath.Dir(s.program), "runsc"), "--version"}, {"runc", "--version"}, {"bwrap", "--version"}} {
		out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
		if err != nil {
			return "", fmt.Errorf("%s: %w", argv[0], err)
		}
		line, _, _ := strings.Cut(string(out), "\n")
		parts = append(parts, line)
	}
	return fmt.Sprintf("%s, all within %d minutes.", strings.Join(parts, ", "), int(time.Since(begun).Minutes())+1), nil
}
