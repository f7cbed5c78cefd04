package main

import (
	"bufio"
	"encoding/json"
	"io"
	"maps"
	"slices"
	"strings"
)

// verdict is what came of a run and the reruns of what failed in it.
type verdict struct {
	// Unsteady names, as PACKAGE.TEST, what failed in one run and passed in a later one, sorted.
	Unsteady []string
	// Inexcusable says why the run has failed whatever came later.
	Inexcusable []string
}

// event is one line of "go test -json" (go doc test2json).
type event struct{ Action, Package, Test, Output string }

// program is one run of a package's test program.
type program struct {
	running map[string]bool // tests that have begun and not ended
	failed  []string
	raced   bool
	ended   bool // it said FAIL, which it does after its last test
	more    bool // it said something after that
}

// judge reads events.
func judge(r io.Reader) (verdict, error) {
	var v verdict
	programs, failed, unsteady := map[string]*program{}, map[string]bool{}, map[string]bool{}
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF && len(line) == 0 {
			break
		}
		if err != nil && err != io.EOF {
			return v, err
		}
		var e event
		if json.Unmarshal(line, &e) != nil || e.Package == "" {
			continue // what a build says; its package's end follows
		}
		p := programs[e.Package]
		if p == nil {
			p = &program{running: map[string]bool{}}
			programs[e.Package] = p
		}
		p.take(e)
		name := e.Package + "." + e.Test
		switch {
		case e.Test == "" && e.Action == "fail":
			if why := p.inexcusable(); why != "" {
				v.Inexcusable = append(v.Inexcusable, e.Package+": "+why)
			}
			delete(programs, e.Package)
		case e.Test == "" && (e.Action == "pass" || e.Action == "skip"):
			delete(programs, e.Package)
		case e.Action == "fail":
			failed[name] = true
		case e.Action == "pass" && failed[name]:
			unsteady[name] = true
		}
	}
	for name := range programs {
		v.Inexcusable = append(v.Inexcusable, name+": the run ended before its tests")
	}
	slices.Sort(v.Inexcusable)
	v.Unsteady = slices.Sorted(maps.Keys(unsteady))
	return v, nil
}

// take notes what an event says of its program.
func (p *program) take(e event) {
	switch e.Action {
	case "run":
		p.running[e.Test] = true
	case "pass", "skip", "fail":
		delete(p.running, e.Test)
		if e.Action == "fail" && e.Test != "" {
			p.failed = append(p.failed, e.Test)
		}
	case "output":
		p.raced = p.raced || strings.Contains(e.Output, "WARNING: DATA RACE") || strings.Contains(e.Output, "race detected ")
		switch {
		case e.Test != "":
		case e.Output == "FAIL\n":
			p.ended = true
		case p.ended && !strings.HasPrefix(e.Output, "FAIL\t") && !strings.HasPrefix(e.Output, "exit status 1\n"):
			p.more = true
		}
	}
}

// inexcusable says why the failure of a test program is one whatever a second run shows; "": it is not.
func (p *program) inexcusable() string {
	switch {
	case p.raced:
		return "a data race"
	case len(p.failed) == 0:
		return "it failed outside of its tests, or was not built"
	case !p.ended || len(p.running) > 0:
		return "its test program crashed or was killed, so that other tests of it may not have run"
	case p.more:
		return "it failed outside of its tests as well"
	}
	return ""
}
