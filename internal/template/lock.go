package template

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
	"casemate.dev/internal/store"
)

// lockVersion is the version of lock files that this package writes.
const lockVersion = 1

// maxLock bounds a lock file's text.
const maxLock = 32 << 20

// Lock says what a build is made of: casemate.lock. It is JSON that is meant to be read and to be compared line
// by line.
type Lock struct {
	Version int      `json:"version"`
	Base    LockBase `json:"base"`
	// Digest is of everything that the build adds to its base.
	Digest string     `json:"digest"`
	Steps  []LockStep `json:"steps"`
	// Packages are those of the whole result, the base's included.
	Packages []Package `json:"packages"`
}

// LockBase is what a build begins with.
type LockBase struct {
	Name string `json:"name"`
	// Digest identifies it: an image's own; of a template that comes with the server, whose files are made anew on
	// each machine, the digest of its packages; of one that was built, that of its own lock file; of any other
	// commit, that of all its files.
	Digest string `json:"digest"`
}

// LockStep is a step, with the digest of what it changed.
type LockStep struct {
	Text   string `json:"text"`
	Digest string `json:"digest,omitempty"`
	// Brings are the packages of dpkg, and those of pip that are from an index, which the step installed, or gave
	// another version. They are pinned.
	Brings []Package `json:"brings,omitempty"`
}

// Text is the lock as the file holds it: each step and each package on a line of its own.
func (l *Lock) Text() string {
	var b strings.Builder
	line := func(v any) string {
		var out bytes.Buffer
		e := json.NewEncoder(&out)
		e.SetEscapeHTML(false)
		if err := e.Encode(v); err != nil {
			panic(err) // of strings and numbers alone
		}
		return strings.TrimSpace(out.String())
	}
	list := func(name string, n int, at func(i int) string, end string) {
		fmt.Fprintf(&b, "  %q: [", name)
		for i := range n {
			sep := ",\n"
			if i == 0 {
				sep = "\n"
			}
			fmt.Fprintf(&b, "%s    %s", sep, at(i))
		}
		if n > 0 {
			b.WriteString("\n  ")
		}
		b.WriteString("]" + end + "\n")
	}
	fmt.Fprintf(&b, "{\n  \"version\": %d,\n  \"base\": %s,\n  \"digest\": %s,\n", l.Version, line(l.Base), line(l.Digest))
	list("steps", len(l.Steps), func(i int) string { return l.Steps[i].line(line) }, ",")
	list("packages", len(l.Packages), func(i int) string { return line(l.Packages[i]) }, "")
	b.WriteString("}\n")
	return b.String()
}

// line is a step as the file holds it, with each package that it brings on a line of its own.
func (s LockStep) line(of func(any) string) string {
	brings := s.Brings
	s.Brings = nil
	if len(brings) == 0 {
		return of(s)
	}
	lines := make([]string, len(brings))
	for i, p := range brings {
		lines[i] = "\n      " + of(p)
	}
	return strings.TrimSuffix(of(s), "}") + `,"brings":[` + strings.Join(lines, ",") + "\n    ]}"
}

// ParseLock reads a lock file.
func ParseLock(text string) (*Lock, error) {
	if len(text) > maxLock {
		return nil, errs.New(errs.InvalidArgument, "the lock file is longer than %d MiB", maxLock>>20)
	}
	var l Lock
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&l); err != nil {
		return nil, errs.Wrap(err, errs.InvalidArgument, "the lock file can't be read: %v", err).
			WithHint("write it anew: build without --locked")
	}
	if l.Version != lockVersion {
		return nil, errs.New(errs.InvalidArgument, "the lock file has version %d; this server knows %d", l.Version, lockVersion).
			WithHint("write it anew: build without --locked")
	}
	return &l, nil
}

// lockBase finds out what identifies what a stage begins with.
func (x *execution) lockBase(ctx context.Context, s *state) error {
	if s.lock.Digest != "" {
		return nil
	}
	if s.template != "" {
		all, err := x.packagesOf(ctx, s.commit)
		if err != nil {
			return err
		}
		text, err := json.Marshal(all)
		s.lock.Digest = "packages:" + digest(string(text))
		return err
	}
	rows, err := x.b.db.Builds(ctx, store.BuildQuery{Target: s.commit, Limit: 1})
	if err != nil {
		return err
	}
	if len(rows) > 0 {
		build, err := ofBuildRow(rows[0])
		if err == nil && build.Lock != nil {
			s.lock.Digest = "lock:" + digest(build.Lock.Base.Digest, build.Lock.Digest)
		}
		return err
	}
	s.lock.Digest, err = x.treeDigest(ctx, s.commit)
	return err
}

// treeDigest is of all files of a commit.
func (x *execution) treeDigest(ctx context.Context, commit string) (string, error) {
	t, err := x.b.m.CommitTree(ctx, x.p, commit)
	if err != nil {
		return "", err
	}
	defer t.Close()
	h := sha256.New()
	err = t.Walk(ctx, "", func(f rootfs.File) error {
		if uncompared("/" + f.Path) {
			return nil
		}
		return digestFile(h, t, f.Path)
	})
	return "sha256:" + hex.EncodeToString(h.Sum(nil)), err
}

// makeLock finds out what a build came to.
func (x *execution) makeLock(ctx context.Context, s *state) (*Lock, error) {
	if err := x.lockBase(ctx, x.begun); err != nil {
		return nil, err
	}
	l := &Lock{Version: lockVersion, Base: x.begun.lock}
	x.run.mu.Lock()
	for _, st := range x.run.build.Steps {
		l.Steps = append(l.Steps, LockStep{Text: st.Text, Digest: st.Digest, Brings: st.Brings})
	}
	x.run.mu.Unlock()
	all, err := x.changed(ctx, x.begun.commit, s.commit, nil)
	if err != nil {
		return nil, err
	}
	l.Digest = all.Digest
	l.Packages, err = x.packagesOf(ctx, s.commit)
	return l, err
}

// packagesOf returns the packages of a commit, which are looked for once.
func (x *execution) packagesOf(ctx context.Context, commit string) ([]Package, error) {
	key := digest("packages", commit)
	kept, ok, err := x.b.db.GetBuildStep(ctx, key)
	if err != nil {
		return nil, err
	}
	var all []Package
	if ok && json.Unmarshal(kept.Body, &all) == nil {
		return all, x.b.db.Write(store.BuildStepUsed(key, x.b.now().UnixNano()))
	}
	if all, err = x.findPackages(ctx, commit); err != nil {
		return nil, err
	}
	body, err := json.Marshal(all)
	if err != nil {
		return nil, err
	}
	return all, x.b.db.Write(store.PutBuildStep(store.BuildStep{Key: key, Target: commit, Used: x.b.now().UnixNano(), Body: body}))
}

func (x *execution) findPackages(ctx context.Context, commit string) ([]Package, error) {
	t, err := x.b.m.CommitTree(ctx, x.p, commit)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	return readPackages(ctx, t)
}

// PackageChange is a package that one of two sides has in another version, with other files, or alone.
type PackageChange struct {
	Package
	// From and To are the versions; "": it is not there. Package.Version is the same as To, or From. They are
	// equal where only its files are others.
	From, To string
}

// String tells the change in a few words.
func (c PackageChange) String() string {
	name := c.Manager + " " + c.Name
	switch {
	case c.From == "":
		return fmt.Sprintf("%s %s is new", name, c.To)
	case c.To == "":
		return fmt.Sprintf("%s %s is gone", name, c.From)
	case c.From == c.To:
		return fmt.Sprintf("%s %s has other files than it had in this version", name, c.To)
	}
	return fmt.Sprintf("%s is %s, was %s", name, c.To, c.From)
}

// comparePackages tells which packages differ. Several versions of one in one place are one entry.
func comparePackages(from, to []Package) []PackageChange {
	index := func(all []Package) map[[3]string]Package {
		out := map[[3]string]Package{}
		for _, p := range all {
			if old, ok := out[p.id()]; ok {
				p.Version, p.Digest = old.Version+", "+p.Version, ""
			}
			out[p.id()] = p
		}
		return out
	}
	before, after := index(from), index(to)
	var out []PackageChange
	for id, p := range before {
		if q := after[id]; q.Version != p.Version || q.Digest != p.Digest && q.Digest != "" && p.Digest != "" {
			out = append(out, PackageChange{Package: p, From: p.Version, To: q.Version})
		}
	}
	for id, q := range after {
		if _, was := before[id]; !was {
			out = append(out, PackageChange{Package: q, To: q.Version})
		}
	}
	slices.SortFunc(out, func(a, b PackageChange) int {
		return cmp.Or(cmp.Compare(a.Manager, b.Manager), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Place, b.Place))
	})
	return out
}

// drift returns what is wrong with a result that a lock file does not allow; nil: nothing. files names the files that a
// step, counted from 0, gave otherwise; "": nobody knows.
func drift(want, got *Lock, files func(step int) string) error {
	var what []string
	if want.Base.Digest != got.Base.Digest {
		what = append(what, fmt.Sprintf("the base %s is %s, was %s %s", got.Base.Name, short(got.Base.Digest), want.Base.Name, short(want.Base.Digest)))
	}
	moved := comparePackages(want.Packages, got.Packages)
	for _, c := range moved {
		what = append(what, c.String())
	}
	if len(moved) == 0 && want.Digest != got.Digest {
		what = append(what, stepDrift(want.Steps, got.Steps, files)...)
		if len(what) == 0 {
			what = append(what, fmt.Sprintf("its files have digest %s, were %s", short(got.Digest), short(want.Digest)))
		}
	}
	if len(what) == 0 {
		return nil
	}
	return errs.New(errs.FailedPrecondition, "the result is not what the lock file says: %s", listed(what)).
		WithHint("build without --locked to take it, and write the lock file anew")
}

// listed joins what there is to say, up to a length that can be read.
func listed(what []string) string {
	const most = 20
	text := strings.Join(what[:min(len(what), most)], "; ")
	if len(what) > most {
		text += fmt.Sprintf("; and %d more", len(what)-most)
	}
	return text
}

// stepDrift tells which steps give other files.
func stepDrift(want, got []LockStep, files func(step int) string) []string {
	for i, s := range got {
		if i >= len(want) {
			return []string{fmt.Sprintf("step %d (%s) is new", i+1, s.Text)}
		}
		if s.Text != want[i].Text {
			return []string{fmt.Sprintf("step %d is %q, was %q", i+1, s.Text, want[i].Text)}
		}
	}
	if len(want) > len(got) {
		return []string{fmt.Sprintf("step %d (%s) is gone", len(got)+1, want[len(got)].Text)}
	}
	var out []string
	for i, s := range got {
		if s.Digest != want[i].Digest {
			text := fmt.Sprintf("step %d (%s) gave other files", i+1, s.Text)
			moved := comparePackages(want[i].Brings, s.Brings)
			for j, c := range moved {
				text += []string{": ", ", "}[min(j, 1)] + c.String()
			}
			if named := files(i); named != "" && len(moved) == 0 && len(out) == 0 { // those after it have the same, too
				text += ": " + named
			}
			out = append(out, text)
		}
	}
	return out
}

// otherFiles names the files that a step gave otherwise than the lock file says, where an earlier build of the template
// has what it says.
func (x *execution) otherFiles(ctx context.Context, step int) string {
	want, got := x.req.Locked.Steps[step], x.run.snapshot().Steps[step]
	earlier, err := x.b.List(ctx, x.p, Query{Name: x.req.Name})
	if err != nil {
		return ""
	}
	for _, b := range earlier {
		if step >= len(b.Steps) || b.Steps[step].Text != want.Text || b.Steps[step].Digest != want.Digest || b.Steps[step].Commit == "" {
			continue
		}
		changes, err := x.b.m.Compare(ctx, x.p, b.Steps[step].Commit, got.Commit)
		if err != nil {
			continue // what is kept of steps goes some day
		}
		const most = 5
		var names []string
		for _, c := range changes {
			if !uncompared(c.Path) {
				names = append(names, c.Path)
			}
		}
		text := strings.Join(names[:min(len(names), most)], ", ")
		if len(names) > most {
			text += fmt.Sprintf(" and %d more", len(names)-most)
		}
		return text
	}
	return ""
}

func short(digest string) string {
	const most = len("sha256:") + 12
	if len(digest) > most {
		return digest[:most]
	}
	return or(digest, "unknown")
}
