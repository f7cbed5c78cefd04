package cli

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
)

// requirementsOf returns what the steps of a lock file installed from a Python package index, as pip reads it.
func requirementsOf(lock string) (string, error) {
	type pkg struct{ Manager, Name, Version string }
	var l struct{ Steps []struct{ Brings []pkg } }
	if lock == "" {
		return "", errs.New(errs.FailedPrecondition, "the build has no lock file: it is not ready")
	}
	if err := json.Unmarshal([]byte(lock), &l); err != nil {
		return "", fmt.Errorf("read the lock file: %w", err)
	}
	lines := map[string]bool{}
	for _, s := range l.Steps {
		for _, p := range s.Brings {
			// What does not look like a name and a version may be anything in a file that pip reads.
			if p.Manager == "pip" && !strings.ContainsFunc(p.Name+p.Version, notInRequirement) && !strings.HasPrefix(p.Name, "-") {
				lines[p.Name+"=="+p.Version+"\n"] = true
			}
		}
	}
	return strings.Join(slices.Sorted(maps.Keys(lines)), ""), nil
}

func notInRequirement(r rune) bool {
	alnum := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9'
	return !alnum && !strings.ContainsRune("-._!+", r)
}
