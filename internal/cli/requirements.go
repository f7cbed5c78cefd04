package cli

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
)

// requirementsOf returns what the steps of a lock file installed from a Python package index, as pip reads it: with the
// digest of each archive, which pip then checks, where all are known. unknown are the packages whose digest is not.
func requirementsOf(lock string) (text string, unknown []string, err error) {
	type pkg struct{ Manager, Name, Version, Archive string }
	var l struct{ Steps []struct{ Brings []pkg } }
	if lock == "" {
		return "", nil, errs.New(errs.FailedPrecondition, "the build has no lock file: it is not ready")
	}
	if err := json.Unmarshal([]byte(lock), &l); err != nil {
		return "", nil, fmt.Errorf("read the lock file: %w", err)
	}
	archives := map[string]map[string]bool{} // of NAME==VERSION
	for _, s := range l.Steps {
		for _, p := range s.Brings {
			// What does not look like a name and a version may be anything in a file that pip reads.
			if p.Manager != "pip" || strings.ContainsFunc(p.Name+p.Version, notInRequirement) || strings.HasPrefix(p.Name, "-") ||
				p.Archive == "" && seed(p.Name) {
				continue
			}
			line := p.Name + "==" + p.Version
			if archives[line] == nil {
				archives[line] = map[string]bool{}
			}
			if sum, ok := strings.CutPrefix(p.Archive, "sha256:"); ok && len(sum) == 64 && !strings.ContainsFunc(sum, notHex) {
				archives[line][sum] = true
			}
		}
	}
	names := slices.Sorted(maps.Keys(archives))
	for _, line := range names {
		if len(archives[line]) == 0 {
			unknown = append(unknown, line)
		}
	}
	var out strings.Builder
	for _, line := range names {
		out.WriteString(line)
		if len(unknown) == 0 { // pip takes digests of all or of none
			for _, sum := range slices.Sorted(maps.Keys(archives[line])) {
				out.WriteString(" \\\n    --hash=sha256:" + sum)
			}
		}
		out.WriteString("\n")
	}
	return out.String(), unknown, nil
}

// seed reports whether a package is one of those that a new environment has, which pip freeze leaves out as well.
func seed(name string) bool { return name == "pip" || name == "setuptools" || name == "wheel" }

func notHex(r rune) bool { return (r < '0' || r > '9') && (r < 'a' || r > 'f') }

// checkRequirements fails if a requirements file is not what a lock file says.
func checkRequirements(file, lock string) error {
	want, _, err := requirementsOf(lock)
	if err != nil {
		return err
	}
	got, err := os.ReadFile(file)
	if err != nil {
		return errs.Wrap(err, errs.InvalidArgument, "there is no %s", file).WithHint("build once without --locked: that writes it")
	}
	if string(got) == want {
		return nil
	}
	versions := func(text string) (all []string) {
		for line := range strings.Lines(text) {
			if !strings.HasPrefix(line, " ") {
				all = append(all, strings.TrimRight(line, " \\\n"))
			}
		}
		return all
	}
	inFile, inLock := versions(string(got)), versions(want)
	what := "its archives' digests are others"
	for _, line := range inLock {
		if !slices.Contains(inFile, line) {
			what = "it lacks " + line
		}
	}
	for _, line := range inFile {
		if !slices.Contains(inLock, line) {
			what = "it has " + line
		}
	}
	return errs.New(errs.FailedPrecondition, "%s is not what the lock file says: %s", file, what).
		WithHint("build without --locked to write both anew")
}

func notInRequirement(r rune) bool {
	alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
	return !alnum && !strings.ContainsRune("-._!+", r)
}
