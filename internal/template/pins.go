package template

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/sandbox"
)

// Where pins lie while a step runs, and pip's report of what it did. They are put there before it and taken away after it.
const (
	pipPins   = "/tmp/.casemate-constraints.txt"
	pipReport = "/tmp/.casemate-pip-report.json"
	aptPins   = "/etc/apt/preferences.d/00-casemate-lock"
)

// pins are the versions that a lock file asks a step for: they are told to pip by a file of constraints, and to apt
// by its preferences.
type pins struct{ pip, apt string }

func (p pins) none() bool { return p == pins{} }

// canPin reports whether a package's name and version are made of what they may be made of: they become lines of files
// that pip and apt read, and come from a file that anybody wrote.
func canPin(p Package) bool {
	const lower, digits = "abcdefghijklmnopqrstuvwxyz", "0123456789"
	const letters = lower + "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
	of := func(s, first, more string) bool {
		return s != "" && strings.Contains(first, s[:1]) && strings.Trim(s, first+more) == ""
	}
	switch p.Manager {
	case "dpkg":
		return of(p.Name, lower+digits, "+.-") && of(p.Version, letters+digits, ".+:~-")
	case "pip":
		return of(p.Name, lower+digits, "-") && of(p.Version, digits, letters+".!+")
	}
	return false
}

// pinsOf returns what a step of a lock file pins.
func pinsOf(s LockStep) pins {
	versions := map[string]map[string]bool{}
	var apt strings.Builder
	for _, p := range s.Brings {
		switch {
		case !canPin(p):
		case p.Manager == "dpkg":
			// A priority above 1000 takes the version also where that is a step back.
			fmt.Fprintf(&apt, "Package: %s\nPin: version %s\nPin-Priority: 1001\n\n", p.Name, p.Version)
		case p.Name == "setuptools", p.Name == "wheel":
			// Constraints hold in the environments that pip builds packages in, too, which ask for versions of their own.
		default:
			if versions[p.Name] == nil {
				versions[p.Name] = map[string]bool{}
			}
			versions[p.Name][p.Version] = true
		}
	}
	var pip strings.Builder
	for _, name := range slices.Sorted(maps.Keys(versions)) {
		// One that a step installs in two versions, for two environments, is asked for in neither.
		if all := slices.Collect(maps.Keys(versions[name])); len(all) == 1 {
			fmt.Fprintf(&pip, "%s==%s\n", name, all[0])
		}
	}
	return pins{pip: pip.String(), apt: apt.String()}
}

// lockedStep returns what the lock file says of the step that is next; nil: nothing.
func (x *execution) lockedStep(text string) *LockStep {
	if x.req.Locked == nil {
		return nil
	}
	x.run.mu.Lock()
	next := len(x.run.build.Steps)
	x.run.mu.Unlock()
	if next >= len(x.req.Locked.Steps) || x.req.Locked.Steps[next].Text != text {
		return nil // another step than the lock file's, which the end tells of
	}
	return &x.req.Locked.Steps[next]
}

// put makes a command's package managers take the versions, and returns what undoes it.
func (p pins) put(ctx context.Context, b *box, c *command) (undo func() error, err error) {
	var put []string
	write := func(file, text string) error {
		if err := b.remove(ctx, file); err != nil { // a step before may have left something there
			return err
		}
		r := sandbox.WriteRequest{PathRequest: b.asRoot(file), Mode: 0o644, Offset: -1, Size: int64(len(text))}
		if _, err := b.files.Write(ctx, r, strings.NewReader(text)); err != nil {
			return fmt.Errorf("put the lock file's versions for the step: %w", err)
		}
		put = append(put, file)
		return nil
	}
	c.env = maps.Clone(c.env)
	if p.pip != "" {
		if err := write(pipPins, p.pip); err != nil {
			return nil, err
		}
		for _, name := range []string{"PIP_CONSTRAINT", "UV_CONSTRAINT"} {
			c.env[name] = strings.TrimSpace(c.env[name] + " " + pipPins)
		}
	}
	there, err := b.isDir(ctx, path.Dir(aptPins))
	if err != nil {
		return nil, err
	}
	if p.apt != "" && there {
		if err := write(aptPins, p.apt); err != nil {
			return nil, err
		}
	}
	return func() error {
		for _, file := range put {
			if err := b.remove(ctx, file); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// report asks pip for a report of what a command installs, and returns what takes it into the box.
func (b *box) report(ctx context.Context, c *command) (take func() error, err error) {
	if _, own := c.env["PIP_REPORT"]; own {
		return func() error { return nil }, nil
	}
	if err := b.remove(ctx, pipReport); err != nil { // a step before may have left something there
		return nil, err
	}
	c.env["PIP_REPORT"] = pipReport
	return func() error {
		var text bytes.Buffer
		r := sandbox.ReadRequest{PathRequest: b.asRoot(pipReport), Length: maxPackageFile}
		_, err := b.files.Read(ctx, r, func(sandbox.FileInfo) error { return nil }, &text)
		if errs.Is(err, errs.NotFound) {
			return nil
		}
		if err == nil { // else what lies there is nothing of pip's
			b.archives = readReport(text.Bytes())
		}
		return b.remove(ctx, pipReport)
	}, nil
}

// readReport returns the digests of the archives that pip installed from an index, by name and version. What is no
// report of pip's has none.
func readReport(text []byte) map[[2]string]string {
	var r struct {
		Install []struct {
			IsDirect bool `json:"is_direct"`
			Download struct {
				Archive struct {
					Hashes map[string]string
				} `json:"archive_info"`
			} `json:"download_info"`
			Metadata struct{ Name, Version string }
		}
	}
	if json.Unmarshal(text, &r) != nil {
		return nil
	}
	out := map[[2]string]string{}
	for _, i := range r.Install {
		sum, err := hex.DecodeString(i.Download.Archive.Hashes["sha256"])
		if err == nil && len(sum) == sha256.Size && !i.IsDirect {
			out[[2]string{canonicalPython(i.Metadata.Name), i.Metadata.Version}] = "sha256:" + hex.EncodeToString(sum)
		}
	}
	return out
}

// brings returns the packages that a step installed, or gave another version, of those that can be pinned: dpkg's,
// and pip's from an index.
func (x *execution) brings(ctx context.Context, from string, t *rootfs.Tree, changes []sandbox.Change, archives map[[2]string]string) ([]Package, error) {
	f := &finder{t: t}
	for _, c := range changes {
		p, ok := guestwire.Unescape(c.Path)
		switch {
		case !ok || c.Op == "removed":
		case p == "/"+dpkgStatus:
			all, err := x.dpkgBrings(ctx, from, t)
			if err != nil {
				return nil, err
			}
			f.found = append(f.found, all...)
		case strings.HasSuffix(p, ".dist-info/METADATA"):
			dir := strings.TrimPrefix(path.Dir(p), "/")
			// pip notes here that it came from a directory or a URL, and no index has it.
			direct, err := f.readIf(dir+"/direct_url.json", maxMetadata)
			if err != nil {
				return nil, err
			}
			if direct != nil {
				continue
			}
			if err := f.python(dir, dir+"/METADATA"); err != nil {
				return nil, err
			}
		}
	}
	for i, p := range f.found {
		if p.Manager == "pip" {
			f.found[i].Archive = archives[[2]string{p.Name, p.Version}]
		}
	}
	slices.SortFunc(f.found, byName)
	return slices.Compact(f.found), nil
}

func (x *execution) dpkgBrings(ctx context.Context, from string, t *rootfs.Tree) ([]Package, error) {
	before, err := x.b.m.CommitTree(ctx, x.p, from)
	if err != nil {
		return nil, err
	}
	defer before.Close()
	was, is := &finder{t: before}, &finder{t: t}
	for _, f := range []*finder{was, is} {
		if err := f.dpkg(ctx); err != nil {
			return nil, err
		}
	}
	var out []Package
	for _, p := range is.found {
		if !slices.Contains(was.found, p) {
			out = append(out, p)
		}
	}
	return out, nil
}
