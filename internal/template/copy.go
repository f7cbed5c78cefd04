package template

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"path"
	"strconv"
	"strings"

	"github.com/moby/patternmatcher"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
)

// copyAction copies files.
type copyAction struct {
	sources []string
	dest    string
	// contents are files that stand in the Dockerfile.
	contents []inlineFile
	owner    string // as in guestwire.UnpackRequest
	mode     string // octal, of everything; "": as in the source
	exclude  []string
	// optional lets a pattern match nothing.
	optional bool
	// parents keeps the directories of sources below the destination.
	parents bool
	// extract unpacks sources that are archives, as ADD does.
	extract bool
	// Where from: hash an archive, stage a stage, image a reference; none of them: the build's context.
	hash  string
	stage *stage
	image string
	// ownByUser gives everything to the user that steps run as, unless owner says otherwise.
	ownByUser bool
}

type inlineFile struct{ name, data string }

// source is what is copied from.
type source struct {
	tree
	// key stands for the contents of a tree that are not looked at; "": they are.
	key   string
	close func()
}

// open opens what is copied from.
func (a *copyAction) open(ctx context.Context, x *execution) (*source, error) {
	nothing := func() {}
	commit := ""
	key := ""
	switch {
	case a.hash != "":
		return &source{tree: x.files.byHash[a.hash], close: nothing}, nil
	case a.stage != nil:
		s := x.done[a.stage]
		commit, key = s.commit, s.key
	case a.image != "":
		s, err := x.base(ctx, a.image, Credentials{})
		if err == nil {
			s, err = x.committed(ctx, s)
		}
		if err != nil {
			return nil, err
		}
		commit, key = s.commit, s.key
	case x.files.context == nil:
		return nil, errs.New(errs.InvalidArgument, "the build has no files to copy from").
			WithHint("name the directory that holds them: casemate template build DIR")
	default:
		return &source{tree: x.files.context, close: nothing}, nil
	}
	t, err := x.b.m.CommitTree(ctx, x.p, commit)
	if err != nil {
		return nil, err
	}
	return &source{tree: layerTree{t}, key: key, close: t.Close}, nil
}

// committed makes a commit of a template that nothing was done to, so that all that is compared is one.
func (x *execution) committed(ctx context.Context, s *state) (*state, error) {
	if s.commit != "" {
		return s, nil
	}
	forced := x.forced
	defer func() { x.forced = forced }()
	x.forced = false // there is nothing to do again
	c := s.clone()
	_, err := x.perform(ctx, c, &work{parts: []string{"nothing"}, run: func(context.Context, *box) error { return nil }}, StepResult{})
	return c, err
}

func (a *copyAction) prepare(ctx context.Context, x *execution, s *state) (*work, error) {
	if a.dest == "" {
		return nil, errs.New(errs.InvalidArgument, "the destination is empty")
	}
	c := *a
	if c.owner == "" && c.ownByUser {
		c.owner = s.runUser()
	}
	dir := strings.HasSuffix(c.dest, "/") || c.dest == "." || strings.HasSuffix(c.dest, "/.")
	c.dest = s.resolve(c.dest)
	mode, err := c.parseMode()
	if err != nil {
		return nil, err
	}
	src, err := c.open(ctx, x)
	if err != nil {
		return nil, err
	}
	defer src.close()
	j := &copyJob{a: &c, mode: mode, epoch: x.epoch().UnixNano(), toDir: dir}
	if err := j.match(ctx, src); err != nil {
		return nil, err
	}
	for _, pattern := range j.unmatched {
		x.say(Warning, "%s matches no file", pattern)
	}
	if len(j.sources)+len(c.contents) == 0 {
		return nil, nil
	}
	content := src.key
	if content == "" {
		if content, err = j.digest(ctx, src); err != nil {
			return nil, err
		}
	}
	parts := []string{"copy", c.dest, strconv.FormatBool(j.toDir), c.owner, c.mode, strconv.FormatBool(c.extract), strconv.FormatBool(c.parents), content}
	parts = append(append(parts, c.exclude...), "from")
	for _, f := range c.contents {
		parts = append(parts, f.name, f.data)
	}
	parts = append(parts, j.sources...)
	return &work{parts: parts, run: func(ctx context.Context, b *box) error {
		src, err := c.open(ctx, x)
		if err != nil {
			return err
		}
		defer src.close()
		return j.run(ctx, src, b)
	}}, nil
}

// parseMode reads the mode that everything gets; nil: what it has.
func (a *copyAction) parseMode() (*uint32, error) {
	if a.mode == "" {
		return nil, nil
	}
	n, err := strconv.ParseUint(a.mode, 8, 32)
	if err != nil || n > 0o7777 {
		return nil, errs.New(errs.InvalidArgument, "%q is no mode", a.mode).WithHint("write it in octal, as 0644 or 755")
	}
	m := uint32(n)
	return &m, nil
}

// copyJob is one COPY under way.
type copyJob struct {
	a     *copyAction
	mode  *uint32
	epoch int64
	// toDir says that the destination is a directory, whatever is there.
	toDir bool
	// sources are the paths that are copied, links resolved; names what they are called at the destination.
	sources []string
	names   []string
	// unmatched are patterns that match nothing.
	unmatched []string
	// nobodies counts files of archives whose owner no sandbox has.
	nobodies int
}

// match finds the sources.
func (j *copyJob) match(ctx context.Context, t tree) error {
	for _, pattern := range j.a.sources {
		if err := refuseURL(pattern); err != nil {
			return err
		}
		clean := strings.TrimPrefix(path.Clean("/"+pattern), "/")
		matches := []string{clean}
		if hasGlob(clean) {
			var err error
			if matches, err = glob(ctx, t, clean); err != nil {
				return err
			}
		}
		found := 0
		for _, m := range matches {
			at, err := resolve(t, m)
			if notThere(err) {
				continue
			}
			if err != nil {
				return err
			}
			found++
			j.sources, j.names = append(j.sources, at), append(j.names, j.name(pattern, m))
		}
		if found == 0 && j.a.optional && hasGlob(clean) {
			j.unmatched = append(j.unmatched, pattern)
			continue
		}
		if found == 0 {
			return errs.New(errs.NotFound, "%s is not among the files to copy from", pattern).
				WithHint("paths are relative to the build's directory; does .dockerignore leave it out?")
		}
	}
	return nil
}

// name is what a source is called at the destination.
func (j *copyJob) name(pattern, match string) string {
	if !j.a.parents {
		return path.Base("/" + match)
	}
	if before, after, ok := strings.Cut(pattern, "/./"); ok { // what stands before the dot is left out
		depth := len(strings.Split(strings.TrimPrefix(path.Clean("/"+before), "/"), "/"))
		_ = after
		parts := strings.Split(match, "/")
		return path.Join(parts[min(depth, len(parts)):]...)
	}
	return match
}

// remote reports whether a source is a URL or a repository.
func remote(s string) bool {
	for _, prefix := range []string{"http://", "https://", "git@", "git://", "ssh://"} {
		if strings.HasPrefix(s, prefix) {
			return true
		}
	}
	return false
}

func refuseURL(s string) error {
	if !remote(s) {
		return nil
	}
	return errs.New(errs.Unsupported, "%s is not downloaded by the builder", s).
		WithHint("download it in a RUN step, under the build's network rules, or put it among the build's files")
}

// each visits everything below a source: rel is "" for itself.
func (j *copyJob) each(ctx context.Context, t tree, from string, visit func(rel string, n node) error) error {
	var skip *patternmatcher.PatternMatcher
	if len(j.a.exclude) > 0 {
		var err error
		if skip, err = patternmatcher.New(j.a.exclude); err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "--exclude: %v", err)
		}
	}
	var walk func(rel string) error
	walk = func(rel string) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		at := path.Join(from, rel)
		n, err := t.lstat(at)
		if err != nil {
			return err
		}
		if skip != nil && rel != "" {
			if out, err := skip.MatchesOrParentMatches(rel); err != nil || out {
				return err
			}
		}
		if n.Type == guestwire.TypeOther {
			return errs.New(errs.InvalidArgument, "%s is a device, a pipe or a socket", at)
		}
		if err := visit(rel, n); err != nil || n.Type != guestwire.TypeDir {
			return err
		}
		names, err := t.names(at)
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := walk(path.Join(rel, name)); err != nil {
				return err
			}
		}
		return nil
	}
	return walk("")
}

// digest is of all that the sources hold.
func (j *copyJob) digest(ctx context.Context, t tree) (string, error) {
	var parts []string
	for i, from := range j.sources {
		parts = append(parts, "source", j.names[i])
		err := j.each(ctx, t, from, func(rel string, n node) error {
			parts = append(parts, rel, string(n.Type), strconv.FormatUint(uint64(n.Mode), 8), n.sum, n.Target)
			return nil
		})
		if err != nil {
			return "", err
		}
	}
	return digest(parts...), nil
}

// run copies into a sandbox.
func (j *copyJob) run(ctx context.Context, t tree, b *box) error {
	dest, there := j.a.dest, false
	if !j.toDir {
		var err error
		if there, err = b.isDir(ctx, dest); err != nil {
			return err
		}
	}
	top, single := dest, ""
	if !j.toDir && !there {
		one, err := j.oneFile(t)
		if err != nil {
			return err
		}
		if one {
			if dest, err = b.followed(ctx, dest); err != nil {
				return err
			}
			top, single = path.Dir(dest), path.Base(dest)
		}
	}
	if err := j.unpack(ctx, t, b, top, single, false); err != nil || !j.a.extract {
		return err
	}
	err := j.unpack(ctx, t, b, top, single, true)
	if j.nobodies > 0 {
		b.x.say(Warning, "%d files belong to ids above 65535, which no sandbox has; here they belong to nobody (%d)", j.nobodies, nobody)
	}
	return err
}

// unpack gives a sandbox either what archives hold, with the owners that they say, or the other sources.
func (j *copyJob) unpack(ctx context.Context, t tree, b *box, top, single string, archives bool) error {
	owner := j.a.owner
	if archives {
		owner = ""
	}
	return b.unpack(ctx, top, owner, func(w io.Writer) error {
		buffered := bufio.NewWriterSize(w, 256<<10)
		p := guestwire.NewPack(buffered)
		write := func() error { return j.write(ctx, t, p, single) }
		if archives {
			write = func() error { return j.extractAll(ctx, t, p) }
		}
		if err := write(); err != nil {
			return err
		}
		return buffered.Flush()
	})
}

// extractAll gives what all archives among the sources hold.
func (j *copyJob) extractAll(ctx context.Context, t tree, p *guestwire.Pack) error {
	for _, from := range j.sources {
		if is, err := j.extracts(t, from); err != nil {
			return err
		} else if is {
			if err := j.extract(ctx, t, from, p); err != nil {
				return err
			}
		}
	}
	return nil
}

// extracts reports whether a source is an archive that is unpacked.
func (j *copyJob) extracts(t tree, from string) (bool, error) {
	n, err := t.lstat(from)
	if err != nil || !j.a.extract || n.Type != guestwire.TypeFile {
		return false, err
	}
	return isArchive(t, from)
}

// oneFile reports whether all that is copied is one file, and no archive to unpack. Several files need a directory.
func (j *copyJob) oneFile(t tree) (bool, error) {
	files := len(j.a.contents)
	for _, from := range j.sources {
		n, err := t.lstat(from)
		if err != nil {
			return false, err
		}
		is, err := j.extracts(t, from)
		if err != nil {
			return false, err
		}
		if n.Type != guestwire.TypeDir && !is {
			files++
		}
	}
	if files > 1 {
		// Each would replace the one before.
		return false, errs.New(errs.InvalidArgument, "%d files are copied to %s, which is no directory", files, j.a.dest).
			WithHint("end the destination with a slash")
	}
	return files == 1 && !j.a.parents, nil
}

// isArchive reports whether a file is an archive that ADD unpacks.
func isArchive(t tree, p string) (bool, error) {
	in, err := t.open(p)
	if err != nil {
		return false, err
	}
	defer in.Close()
	plain, err := decompress(in)
	if errs.Is(err, errs.Unsupported) {
		return false, err
	}
	if err != nil {
		return false, nil //nolint:nilerr // it only begins like a compressed file: it is copied as it is
	}
	defer plain.Close()
	return isTar(bufio.NewReaderSize(plain, 64<<10)), nil
}

// write gives all sources that are no archives to unpack. single is what the only one of them is called; "": its own name.
func (j *copyJob) write(ctx context.Context, t tree, p *guestwire.Pack, single string) error {
	for _, f := range j.a.contents {
		e := guestwire.Entry{Path: or(single, path.Base(f.name)), Type: guestwire.TypeFile, Mode: 0o644, Size: int64(len(f.data))}
		j.dress(&e)
		if err := p.Add(e, strings.NewReader(f.data)); err != nil {
			return err
		}
	}
	links := map[[2]uint64]string{}
	for i, from := range j.sources {
		n, err := t.lstat(from)
		if err != nil {
			return err
		}
		if is, err := j.extracts(t, from); err != nil {
			return err
		} else if is {
			continue
		}
		under := "" // a directory's contents are copied, not itself
		if n.Type != guestwire.TypeDir || j.a.parents {
			under = or(single, j.names[i])
		}
		err = j.each(ctx, t, from, func(rel string, n node) error {
			return j.add(t, p, path.Join(from, rel), path.Join(under, rel), n, links)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// add gives one file.
func (j *copyJob) add(t tree, p *guestwire.Pack, from, to string, n node, links map[[2]uint64]string) error {
	if to == "" {
		return nil
	}
	e := n.Entry
	e.Path = to
	if n.inode != ([2]uint64{}) {
		if first, ok := links[n.inode]; ok {
			e.Hard, e.Size = first, 0
			return p.Add(e, nil)
		}
		links[n.inode] = to
	}
	j.dress(&e)
	if e.Size == 0 {
		return p.Add(e, nil)
	}
	in, err := t.open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	return p.Add(e, in)
}

// dress gives an entry the mode and the time that the build says.
func (j *copyJob) dress(e *guestwire.Entry) {
	if j.mode != nil && e.Type != guestwire.TypeSymlink {
		e.Mode = *j.mode
	}
	e.MTime = j.time(e.MTime)
}

// time is at most what the build says.
func (j *copyJob) time(at int64) int64 {
	if at == 0 || at > j.epoch {
		return j.epoch
	}
	return at
}

// extract gives what an archive holds.
func (j *copyJob) extract(ctx context.Context, t tree, from string, p *guestwire.Pack) error {
	in, err := t.open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	plain, err := decompress(in)
	if err != nil {
		return err
	}
	defer plain.Close()
	return j.unpackTar(ctx, tar.NewReader(bufio.NewReaderSize(plain, 64<<10)), p)
}

// isTar reports whether a stream begins as a tar archive does.
func isTar(r *bufio.Reader) bool {
	const magicAt = 257 // the header's field magic
	head, err := r.Peek(magicAt + 5)
	return err == nil && bytes.Equal(head[magicAt:], []byte("ustar"))
}

func (j *copyJob) unpackTar(ctx context.Context, r *tar.Reader, p *guestwire.Pack) error {
	for n := 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "the archive can't be unpacked: %v", err)
		}
		if n >= maxFilesEntries {
			return errs.New(errs.TooLarge, "the archive has more than %d files", maxFilesEntries)
		}
		e, err := entryOf(h)
		if err != nil {
			return err
		}
		if e.Path == "" {
			continue
		}
		var foreign [2]bool
		e.UID, foreign[0] = clampID(h.Uid)
		e.GID, foreign[1] = clampID(h.Gid)
		if foreign != [2]bool{} {
			j.nobodies++
		}
		e.MTime = j.time(e.MTime)
		if err := p.Add(e, r); err != nil {
			return err
		}
	}
}

// nobody is to whom files belong whose owner no sandbox has.
const nobody = 65534

// clampID takes over an id that a sandbox can have; others are nobody's.
func clampID(n int) (id uint32, foreign bool) {
	if n < 0 || n >= 1<<16 {
		return nobody, true
	}
	return uint32(n), false
}
