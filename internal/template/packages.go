package template

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
)

// Package is a package that was found in a tree, by what its manager has written there. Nothing of the tree is
// run to find it out.
type Package struct {
	// Manager is dpkg, apk, pip or npm.
	Manager string `json:"manager"`
	Name    string `json:"name"`
	Version string `json:"version"`
	// Place is the directory that it lies in, for pip and npm; "": the whole system's.
	Place string `json:"place,omitempty"`
	// Digest is of what its manager has noted of its files: pip's record, dpkg's list of checksums with the scripts of
	// the package, npm's and apk's checksum of the archive; "": there is none.
	Digest string `json:"digest,omitempty"`
	// Archive is the digest of the archive that pip installed it from, as pip reports it; "": it reported none.
	Archive string `json:"archive,omitempty"`
}

// id is what a package is the same by.
func (p Package) id() [3]string { return [3]string{p.Manager, p.Name, p.Place} }

// Bounds of what is read: whoever made the tree chose how much there is.
const (
	maxPackageFile = 64 << 20 // dpkg's status of a large system has 5 MB
	maxMetadata    = 4 << 20
	maxPackages    = 200_000
	maxVersion     = 256
)

// readPackages finds the packages of a tree.
func readPackages(ctx context.Context, t *rootfs.Tree) ([]Package, error) {
	f := &finder{t: t}
	for _, read := range []func(context.Context) error{f.dpkg, f.apk, f.languages} {
		if err := read(ctx); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(f.found, byName)
	return slices.Compact(f.found), nil
}

// byName orders packages.
func byName(a, b Package) int {
	return cmp.Or(cmp.Compare(a.Manager, b.Manager), cmp.Compare(a.Name, b.Name), cmp.Compare(a.Place, b.Place),
		cmp.Compare(a.Version, b.Version), cmp.Compare(a.Digest, b.Digest), cmp.Compare(a.Archive, b.Archive))
}

type finder struct {
	t     *rootfs.Tree
	found []Package
	sums  map[string]map[string]string // see integrity
}

func (f *finder) add(p Package) error {
	if p.Name == "" || p.Version == "" || len(p.Name) > maxVersion || len(p.Version) > maxVersion {
		return nil // a file that only looks like a package's
	}
	if len(f.found) >= maxPackages {
		return errs.New(errs.ResourceExhausted, "the result has more than %d packages", maxPackages)
	}
	f.found = append(f.found, p)
	return nil
}

// stanzas reads a file of fields in paragraphs, as dpkg and Python's metadata have them.
func stanzas(data []byte, each func(field map[string]string) error) error {
	lines := bufio.NewScanner(bytes.NewReader(data))
	lines.Buffer(nil, maxPackageFile)
	field := map[string]string{}
	flush := func() error {
		if len(field) == 0 {
			return nil
		}
		err := each(field)
		field = map[string]string{}
		return err
	}
	for lines.Scan() {
		line := lines.Text()
		if strings.TrimSpace(line) == "" {
			if err := flush(); err != nil {
				return err
			}
			continue
		}
		if line[0] == ' ' || line[0] == '\t' {
			continue // more of the field above
		}
		if name, value, ok := strings.Cut(line, ":"); ok {
			field[name] = strings.TrimSpace(value)
		}
	}
	return flush()
}

// readIf returns a file's bytes; nil where there is none, or no plain one.
func (f *finder) readIf(p string, limit int64) ([]byte, error) {
	info, err := f.t.Lstat(p)
	if notThere(err) || err == nil && info.Type != "file" {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return f.t.ReadFile(p, limit)
}

// dpkgStatus is where dpkg keeps what is installed, and dpkgInfo where it keeps each package's checksums and scripts.
const (
	dpkgStatus = "var/lib/dpkg/status"
	dpkgInfo   = "var/lib/dpkg/info"
)

// dpkg reads Debian's packages: one file for all, or as distroless images have it one for each.
func (f *finder) dpkg(ctx context.Context) error {
	notes, err := f.dpkgNotes()
	if err != nil {
		return err
	}
	files := []string{dpkgStatus}
	if names, err := f.t.Names("var/lib/dpkg/status.d"); err == nil {
		for _, n := range names {
			if !strings.HasSuffix(n, ".md5sums") {
				files = append(files, "var/lib/dpkg/status.d/"+n)
			}
		}
	}
	for _, p := range files {
		data, err := f.readIf(p, maxPackageFile)
		if err != nil {
			return err
		}
		err = stanzas(data, func(field map[string]string) error {
			if s := field["Status"]; s != "" && !strings.HasSuffix(s, " installed") {
				return nil
			}
			if err := ctx.Err(); err != nil {
				return err
			}
			sum, err := f.sumOfFiles(dpkgInfo, notes[field["Package"]])
			if err != nil {
				return err
			}
			return f.add(Package{Manager: "dpkg", Name: field["Package"], Version: field["Version"], Digest: sum})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// dpkgNotes returns the names of the files that dpkg keeps of each package, by the package's name.
func (f *finder) dpkgNotes() (map[string][]string, error) {
	names, err := f.t.Names(dpkgInfo)
	if err != nil && !notThere(err) {
		return nil, err
	}
	notes := map[string][]string{}
	for _, n := range names {
		if dot := strings.LastIndexByte(n, '.'); dot > 0 {
			name, _, _ := strings.Cut(n[:dot], ":") // behind it stands the architecture
			notes[name] = append(notes[name], n)
		}
	}
	return notes, nil
}

// sumOfFiles is the digest of some files of a directory; "": there are none.
func (f *finder) sumOfFiles(dir string, names []string) (string, error) {
	if len(names) == 0 {
		return "", nil
	}
	h := sha256.New()
	for _, n := range names {
		data, err := f.readIf(dir+"/"+n, maxPackageFile)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(h, "%q %d\n", n, len(data))
		_, _ = h.Write(data) // a hash takes everything
	}
	return fmt.Sprintf("sha256:%x", h.Sum(nil)), nil
}

// apk reads Alpine's packages.
func (f *finder) apk(context.Context) error {
	data, err := f.readIf("lib/apk/db/installed", maxPackageFile)
	if err != nil {
		return err
	}
	return stanzas(data, func(field map[string]string) error {
		return f.add(Package{Manager: "apk", Name: field["P"], Version: field["V"], Digest: field["C"]})
	})
}

// skipped are directories that hold many files and never packages of languages.
func skipped(p string) bool {
	switch p {
	case "proc", "sys", "dev", "run", "tmp", "boot", "etc", "var/lib/dpkg", "var/lib/apt", "var/cache", "var/log", "lib", "lib64", "bin",
		"sbin", "usr/bin", "usr/sbin", "usr/include", "usr/share/doc", "usr/share/locale", "usr/share/man", "usr/share/zoneinfo",
		"usr/share/perl", "usr/share/perl5", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib/git-core", "usr/src":
		return true
	}
	return false
}

// languages finds packages of Python and Node.js, wherever they lie.
func (f *finder) languages(ctx context.Context) error {
	return f.t.Walk(ctx, "", func(file rootfs.File) error {
		if file.Type != "dir" {
			return nil
		}
		name := path.Base(file.Path)
		switch {
		case skipped(file.Path), name == "__pycache__", name == ".git":
			return fs.SkipDir
		case strings.HasSuffix(name, ".dist-info"):
			return or(f.python(file.Path, file.Path+"/METADATA"), error(fs.SkipDir))
		case strings.HasSuffix(name, ".egg-info"):
			return or(f.python(file.Path, file.Path+"/PKG-INFO"), error(fs.SkipDir))
		case inModules(file.Path):
			return f.node(file.Path)
		}
		return nil
	})
}

// inModules reports whether a directory is a package of Node.js: in node_modules, or in a scope there.
func inModules(p string) bool {
	dir := path.Dir(p)
	return path.Base(dir) == "node_modules" && !strings.HasPrefix(path.Base(p), "@") && !strings.HasPrefix(path.Base(p), ".") ||
		strings.HasPrefix(path.Base(dir), "@") && path.Base(path.Dir(dir)) == "node_modules"
}

func (f *finder) python(dir, file string) error {
	data, err := f.readIf(file, maxMetadata)
	if err != nil {
		return err
	}
	record, err := f.readIf(dir+"/RECORD", maxPackageFile)
	if err != nil {
		return err
	}
	sum := ""
	if record != nil {
		sum = fmt.Sprintf("sha256:%x", sha256.Sum256(record))
	}
	head, _, _ := bytes.Cut(data, []byte("\n\n"))
	return stanzas(head, func(field map[string]string) error {
		return f.add(Package{
			Manager: "pip", Name: canonicalPython(field["Name"]), Version: field["Version"], Place: "/" + path.Dir(dir), Digest: sum,
		})
	})
}

// canonicalPython is a Python project's name as indexes compare it (PEP 503).
func canonicalPython(name string) string {
	var b strings.Builder
	dash := false
	for _, c := range strings.ToLower(name) {
		if c == '-' || c == '_' || c == '.' {
			dash = true
			continue
		}
		if dash && b.Len() > 0 {
			b.WriteByte('-')
		}
		dash = false
		b.WriteRune(c)
	}
	return b.String()
}

func (f *finder) node(dir string) error {
	data, err := f.readIf(dir+"/package.json", maxMetadata)
	if err != nil || data == nil {
		return err
	}
	var p struct{ Name, Version string }
	if json.Unmarshal(data, &p) != nil {
		return nil // somebody's test data
	}
	place := dir
	for path.Base(place) != "node_modules" {
		place = path.Dir(place)
	}
	top := place
	if before, _, nested := strings.Cut("/"+place, "/node_modules/"); nested {
		top = strings.TrimPrefix(before+"/node_modules", "/")
	}
	sums, err := f.integrity(top)
	if err != nil {
		return err
	}
	return f.add(Package{
		Manager: "npm", Name: p.Name, Version: p.Version, Place: "/" + place, Digest: sums[strings.TrimPrefix(dir, top+"/")],
	})
}

// integrity returns the checksums of archives that npm has noted in a node_modules directory that lies in no other, by
// the package's path below it. It is read once for each.
func (f *finder) integrity(place string) (map[string]string, error) {
	if sums, ok := f.sums[place]; ok {
		return sums, nil
	}
	data, err := f.readIf(place+"/.package-lock.json", maxPackageFile)
	if err != nil {
		return nil, err
	}
	var note struct {
		Packages map[string]struct{ Integrity string }
	}
	sums := map[string]string{}
	if json.Unmarshal(data, &note) == nil { // else it is not npm's
		for p, of := range note.Packages {
			if len(of.Integrity) <= maxVersion {
				sums[strings.TrimPrefix(p, "node_modules/")] = of.Integrity
			}
		}
	}
	if f.sums == nil {
		f.sums = map[string]map[string]string{}
	}
	f.sums[place] = sums
	return sums, nil
}
