package template

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/bzip2"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/zstd"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
)

// Uploaded files stay archives: one tar file each, without compression, and an index in memory while a build
// uses it. Nothing of them is ever unpacked on the host, so that no name in them means anything there.

const (
	// maxFilesEntries bounds the entries of an archive, with the directories that are only implied.
	maxFilesEntries = 500_000
	// maxFilesNames bounds the bytes of all their names, which the index holds in memory.
	maxFilesNames = 128 << 20
	// maxUploads is how many uploads of one principal run at once, maxKept how many archives of it are kept, and
	// keptTimes how many times the bound of one archive they may have together: the oldest go.
	maxUploads = 8
	maxKept    = 1000
	keptTimes  = 4
	// maxWindow bounds the memory that unpacking zstd takes: that of level 19, and of all that say no more.
	maxWindow = 8 << 20
	// filesFor is how long uploads are kept that no build uses.
	filesFor = 24 * time.Hour
	tarEnd   = ".tar"
)

// fileStore keeps uploaded archives.
type fileStore struct {
	dir      string
	maxBytes int64
	// indexing holds a token for each upload that is looked through: that takes memory.
	indexing chan struct{}

	// mu guards the field below.
	mu sync.Mutex
	// uploads counts those under way, by principal.
	uploads map[string]int
}

func openFiles(dir string, maxBytes int64) (*fileStore, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	s := &fileStore{dir: dir, maxBytes: maxBytes, indexing: make(chan struct{}, 2), uploads: map[string]int{}}
	return s, s.sweep(time.Now().Add(-filesFor))
}

// sweep removes what was last used before a time, and halves of uploads.
func (s *fileStore) sweep(before time.Time) error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue // another removed it
		}
		if strings.HasSuffix(e.Name(), tarEnd) && info.ModTime().After(before) {
			continue
		}
		if !strings.HasSuffix(e.Name(), tarEnd) && info.ModTime().After(time.Now().Add(-time.Hour)) {
			continue // on its way
		}
		if err := os.Remove(filepath.Join(s.dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// path is where a principal's archive lies. Nothing of a name given from outside becomes part of it.
func (s *fileStore) path(owner, name string) string {
	return filepath.Join(s.dir, ownerPart(owner)+digest("files", owner, name)+tarEnd)
}

// ownerPart begins the names of a principal's archives.
func ownerPart(owner string) string { return digest("owner", owner)[:32] + "-" }

// begin counts an upload; the caller calls end.
func (s *fileStore) begin(owner string) (end func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.uploads[owner] >= maxUploads {
		return nil, errs.New(errs.ResourceExhausted, "%d uploads are under way", maxUploads).WithHint("wait until one of them is over")
	}
	s.uploads[owner]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.uploads[owner]--; s.uploads[owner] == 0 {
			delete(s.uploads, owner)
		}
	}, nil
}

// trim removes a principal's oldest archives, as long as there are too many or they are too large together. Builds
// that use one have it open.
func (s *fileStore) trim(owner string) error {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return err
	}
	var own []fs.FileInfo
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ownerPart(owner)) {
			continue
		}
		if info, err := e.Info(); err == nil { // else another removed it
			own = append(own, info)
		}
	}
	slices.SortFunc(own, func(a, b fs.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	left := keptTimes * s.maxBytes
	for i, info := range own {
		left -= info.Size()
		if i < maxKept && left >= 0 {
			continue
		}
		if err := os.Remove(filepath.Join(s.dir, info.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// put keeps an archive: tar, perhaps compressed.
func (s *fileStore) put(ctx context.Context, owner, name string, in io.Reader) (err error) {
	end, err := s.begin(owner)
	if err != nil {
		return err
	}
	defer end()
	if err := s.sweep(time.Now().Add(-filesFor)); err != nil {
		return err
	}
	f, err := os.CreateTemp(s.dir, "upload-*")
	if err != nil {
		return err
	}
	defer func() {
		err = errors.Join(err, f.Close())
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}()
	plain, err := decompress(in)
	if err != nil {
		return err
	}
	defer plain.Close()
	n, err := io.Copy(f, &contextReader{ctx: ctx, r: io.LimitReader(plain, s.maxBytes+1)})
	if err != nil {
		return errs.Wrap(err, errs.InvalidArgument, "the archive could not be read: %v", err)
	}
	if n > s.maxBytes {
		return errs.New(errs.TooLarge, "the files have more than %d MiB", s.maxBytes>>20).
			WithHint("leave out what the build does not need: .dockerignore")
	}
	if err := s.check(ctx, f); err != nil { // a broken one is refused while its sender is there
		return err
	}
	now := time.Now()
	if err := os.Chtimes(f.Name(), now, now); err != nil { // the newest, however long it took
		return err
	}
	if err := os.Rename(f.Name(), s.path(owner, name)); err != nil {
		return err
	}
	return s.trim(owner)
}

// check reads an archive to its end.
func (s *fileStore) check(ctx context.Context, f *os.File) error {
	select {
	case s.indexing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-s.indexing }()
	return (&archive{file: f, room: newRoom()}).index(ctx)
}

// contextReader ends with its context.
type contextReader struct {
	ctx context.Context //nolint:containedctx // of the one copy
	r   io.Reader
}

// Read implements io.Reader.
func (c *contextReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// open opens an archive, which stays from then on; its index is still to be read. NotFound: there is none.
func (s *fileStore) open(owner, name string) (*archive, error) {
	p := s.path(owner, name)
	f, err := os.Open(p)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errs.New(errs.NotFound, "there are no files %q", name).WithHint("upload them first; uploads are kept for a day")
	}
	if err != nil {
		return nil, err
	}
	now := time.Now()
	_ = os.Chtimes(p, now, now) // it is in use; where that can't be noted it goes early, and is uploaded again
	return &archive{file: f}, nil
}

// decompress returns the bytes of a stream that may be compressed, told by how it begins.
func decompress(in io.Reader) (io.ReadCloser, error) {
	r := bufio.NewReaderSize(in, 64<<10)
	head, err := r.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, errs.Wrap(err, errs.InvalidArgument, "the archive could not be read: %v", err)
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(r)
		if err != nil {
			return nil, errs.Wrap(err, errs.InvalidArgument, "the archive is no whole gzip file: %v", err)
		}
		return z, nil
	case bytes.HasPrefix(head, []byte("BZh")):
		return io.NopCloser(bzip2.NewReader(r)), nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, err
		}
		return z.IOReadCloser(), nil
	case bytes.HasPrefix(head, []byte{0xfd, '7', 'z', 'X', 'Z', 0}):
		return nil, errs.New(errs.Unsupported, "archives compressed by xz are not unpacked").
			WithHint("unpack it in a RUN step, or compress it by gzip or zstd")
	}
	return io.NopCloser(r), nil
}

// archive is a tar file with its index. Nobody changes it while it is used.
type archive struct {
	file    *os.File
	entries map[string]*archived
	room    *room
}

// room is what the indexes of one build's archives may take.
type room struct {
	entries int
	names   int64 // bytes of names and targets
}

func newRoom() *room { return &room{entries: maxFilesEntries, names: maxFilesNames} }

type archived struct {
	node
	offset   int64
	children map[string]bool
}

// index reads where everything in a tar file lies, and what it holds.
func (a *archive) index(ctx context.Context) error {
	a.entries = map[string]*archived{"": newDir("")}
	if _, err := a.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	counted := &position{r: bufio.NewReaderSize(a.file, 1<<20)}
	r := tar.NewReader(counted)
	for n := 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "the files are no tar archive: %v", err)
		}
		if n >= maxFilesEntries {
			return tooMany()
		}
		if sparse(h) {
			return errs.New(errs.InvalidArgument, "%q in the archive is stored as a sparse file", h.Name).
				WithHint("pack it without --sparse")
		}
		e, err := entryOf(h)
		if err != nil {
			return err
		}
		if e.Path == "" {
			continue
		}
		it := &archived{node: node{Entry: e}, offset: counted.n}
		if e.Type == guestwire.TypeFile && e.Hard == "" {
			if it.sum, err = sumOf(&contextReader{ctx: ctx, r: r}); err != nil {
				return errs.Wrap(err, errs.InvalidArgument, "the archive is cut off in %q", e.Path)
			}
		}
		if err := a.add(it); err != nil {
			return err
		}
	}
}

func tooMany() error {
	return errs.New(errs.TooLarge, "the build's files are more than %d, with directories", maxFilesEntries).
		WithHint("leave out what the build does not need: .dockerignore")
}

// sparse reports whether a header is one of a file whose holes are left out: it may say any size, at no cost.
func sparse(h *tar.Header) bool {
	if h.Typeflag == tar.TypeGNUSparse {
		return true
	}
	for key := range h.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") {
			return true
		}
	}
	return false
}

// position counts what was read.
type position struct {
	r io.Reader
	n int64
}

// Read implements io.Reader.
func (p *position) Read(b []byte) (int, error) {
	n, err := p.r.Read(b)
	p.n += int64(n)
	return n, err
}

func sumOf(r io.Reader) (string, error) {
	h := sha256.New()
	if _, err := io.Copy(h, r); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func newDir(p string) *archived {
	return &archived{node: node{Entry: guestwire.Entry{Path: p, Type: guestwire.TypeDir, Mode: 0o755}}, children: map[string]bool{}}
}

// add puts an entry into the index, with the directories above it. Of two entries of a name the later counts.
func (a *archive) add(it *archived) error {
	if it.Hard != "" {
		first := a.entries[it.Hard]
		if first == nil || first.Type != guestwire.TypeFile {
			return errs.New(errs.InvalidArgument, "%q is a hard link to %q, which is not in the archive", it.Path, it.Hard)
		}
		// Another name of the same file.
		first.inode = [2]uint64{1, uint64(first.offset)}
		again := *first
		again.Path = it.Path
		it = &again
	}
	if old := a.entries[it.Path]; it.Type == guestwire.TypeDir {
		it.children = map[string]bool{}
		if old != nil && old.children != nil {
			it.children = old.children
		}
	}
	if a.room.names -= int64(len(it.Path) + len(it.Target)); a.room.names < 0 {
		return errs.New(errs.TooLarge, "the names of the build's files have more than %d MiB", maxFilesNames>>20)
	}
	if err := a.set(it); err != nil {
		return err
	}
	for p := it.Path; p != ""; {
		dir, name := path.Split(p)
		dir = strings.TrimSuffix(dir, "/")
		above := a.entries[dir]
		known := above != nil && above.children != nil
		if !known {
			above = newDir(dir)
			if err := a.set(above); err != nil {
				return err
			}
		}
		above.children[name] = true
		if known {
			break
		}
		p = dir
	}
	return nil
}

// set gives a path its entry.
func (a *archive) set(it *archived) error {
	if a.entries[it.Path] == nil {
		if a.room.entries--; a.room.entries < 0 {
			return tooMany()
		}
	}
	a.entries[it.Path] = it
	return nil
}

func (a *archive) lstat(p string) (node, error) {
	if it := a.entries[p]; it != nil {
		return it.node, nil
	}
	return node{}, &fs.PathError{Op: "lstat", Path: p, Err: fs.ErrNotExist}
}

func (a *archive) names(p string) ([]string, error) {
	it := a.entries[p]
	if it == nil {
		return nil, &fs.PathError{Op: "list", Path: p, Err: fs.ErrNotExist}
	}
	out := make([]string, 0, len(it.children))
	for name := range it.children {
		out = append(out, name)
	}
	slices.Sort(out)
	return out, nil
}

func (a *archive) open(p string) (io.ReadCloser, error) {
	it := a.entries[p]
	if it == nil || it.Type != guestwire.TypeFile {
		return nil, &fs.PathError{Op: "open", Path: p, Err: fs.ErrNotExist}
	}
	return io.NopCloser(io.NewSectionReader(a.file, it.offset, it.Size)), nil
}

func (a *archive) close() { _ = a.file.Close() }

// entryOf takes over what an archive says of a file. Names that lead out, and what is no file, directory or
// link, are refused. The archive's root has the path "".
func entryOf(h *tar.Header) (guestwire.Entry, error) {
	name, err := inTree(h.Name)
	if err != nil {
		return guestwire.Entry{}, err
	}
	e := guestwire.Entry{Path: name, Mode: uint32(h.Mode) & 0o7777, MTime: h.ModTime.UnixNano()}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		e.Type, e.Size = guestwire.TypeFile, h.Size
	case tar.TypeDir:
		e.Type = guestwire.TypeDir
	case tar.TypeSymlink:
		e.Type, e.Target = guestwire.TypeSymlink, h.Linkname
		if h.Linkname == "" || len(h.Linkname) > 4095 || strings.Contains(h.Linkname, "\x00") {
			return e, errs.New(errs.InvalidArgument, "the symbolic link %q in the archive leads nowhere", name)
		}
	case tar.TypeLink:
		e.Type = guestwire.TypeFile
		if e.Hard, err = inTree(h.Linkname); err != nil {
			return e, err
		}
	case tar.TypeXGlobalHeader:
		return guestwire.Entry{}, nil
	default:
		return e, errs.New(errs.InvalidArgument, "%q in the archive is a device, a pipe or a socket", name).
			WithHint("leave it out: .dockerignore")
	}
	return e, nil
}

// inTree cleans a name of an archive. Absolute ones are taken from the archive's root on, as tar does; those that
// lead out are refused.
func inTree(name string) (string, error) {
	p := path.Clean(strings.TrimLeft(name, "/"))
	if p == "." {
		return "", nil
	}
	if p == ".." || strings.HasPrefix(p, "../") || strings.Contains(p, "\x00") || len(p) > 4095 {
		return "", errs.New(errs.InvalidArgument, "the name %q in the archive leads out of it", name)
	}
	return p, nil
}

// PutFiles keeps an archive of files for builds: tar, or tar compressed by gzip, bzip2 or zstd. name is what it
// is asked for by; "" makes one up, which is returned. It is kept for a day after its last use. Kinds:
// InvalidArgument (no archive, or names in it that lead out), TooLarge, ResourceExhausted (uploads at once).
func (b *Builder) PutFiles(ctx context.Context, p sandbox.Principal, name string, in io.Reader) (string, error) {
	if p.ID == "" || p.Sandbox != "" {
		return "", errs.New(errs.PermissionDenied, "a sandbox builds no templates")
	}
	if len(name) > 256 {
		return "", errs.New(errs.InvalidArgument, "the files' name is longer than 256 bytes")
	}
	name = or(name, id.New(id.Files))
	return name, b.files.put(ctx, p.ID, name, in)
}

// HasFiles reports whether an archive is kept under a name.
func (b *Builder) HasFiles(_ context.Context, p sandbox.Principal, name string) (bool, error) {
	_, err := os.Stat(b.files.path(p.ID, name))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// buildFiles are the archives of one build.
type buildFiles struct {
	context *archive // nil: none
	byHash  map[string]*archive
}

func (f *buildFiles) close() {
	if f.context != nil {
		f.context.close()
	}
	for _, a := range f.byHash {
		a.close()
	}
}

// index reads what all archives hold.
func (f *buildFiles) index(ctx context.Context) error {
	left := newRoom()
	all := slices.Collect(maps.Values(f.byHash))
	if f.context != nil {
		all = append(all, f.context)
	}
	for _, a := range all {
		a.room = left
		if err := a.index(ctx); err != nil {
			return err
		}
	}
	return nil
}

// openBuildFiles opens all archives that a build names, so that none goes while it waits or runs.
func (b *Builder) openBuildFiles(p sandbox.Principal, r Request) (*buildFiles, error) {
	f := &buildFiles{byHash: map[string]*archive{}}
	if r.Context != "" {
		a, err := b.files.open(p.ID, r.Context)
		if err != nil {
			return nil, err
		}
		f.context = a
	}
	for i, s := range r.Steps {
		if s.FilesHash == "" || f.byHash[s.FilesHash] != nil {
			continue
		}
		a, err := b.files.open(p.ID, s.FilesHash)
		if err != nil {
			f.close()
			return nil, atStep(err, fmt.Sprint(i+1), "", stepText(s))
		}
		f.byHash[s.FilesHash] = a
	}
	return f, nil
}
