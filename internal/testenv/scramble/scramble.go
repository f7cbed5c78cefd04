// Package scramble does random things to trees of files, for tests of what keeps, compares, merges or packs these.
//
// What belongs here: file operations that a program in a sandbox can do. What does not: what a test expects of them.
package scramble

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Program does random things to the files below a directory: everything that a program in a sandbox can do. One
// with the same seeds does the same.
type Program struct {
	*rand.Rand
	root string
	// Names are what files are called: few, so that operations meet. Some are hostile.
	Names []string
}

// New returns a program that works below root.
func New(root string, seed, stream uint64) *Program {
	return &Program{
		Rand: rand.New(rand.NewPCG(seed, stream)), root: root,
		Names: []string{"a", "b", "c", "d", "not\xff\xfeutf8", "new\nline", strings.Repeat("n", 255), ".wh.x", "e"},
	}
}

// Do does n things; most fail, as in any program that knows nothing of the files.
func (p *Program) Do(n int) {
	for range n {
		p.do()
	}
}

func (p *Program) name() string { return p.Names[p.IntN(len(p.Names))] }

// path is one to three names below the root.
func (p *Program) path() string {
	path := p.root
	for range 1 + p.IntN(3) {
		path += "/" + p.name()
	}
	return path
}

func (p *Program) do() {
	a, b := p.path(), p.path()
	switch p.IntN(24) {
	case 0, 1, 2, 3:
		p.write(a, os.O_CREATE|os.O_TRUNC, strings.Repeat(p.name(), p.IntN(2000)))
	case 4, 5, 6:
		_ = os.Mkdir(a, os.FileMode(0o700+p.IntN(0o100)))
	case 7:
		removeAll(a)
	case 8:
		_ = os.Remove(a)
	case 9:
		_ = os.Rename(a, b)
	case 10:
		_ = os.Link(a, b)
	case 11:
		_ = os.Symlink(p.name(), a)
	case 12:
		_ = syscall.Chmod(a, uint32(p.IntN(0o10000))) // setuid and sticky, too; follows links, all relative to here
	case 13:
		_ = os.Lchown(a, p.IntN(3000), p.IntN(3000))
	case 14:
		_ = syscall.Setxattr(a, "user.note", []byte(p.name()), 0)
	case 15: // cap_net_raw+ep, as setcap writes it
		_ = syscall.Setxattr(a, "security.capability", []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0)
	case 16:
		p.sparse(a)
	case 17:
		_ = syscall.Mkfifo(a, 0o644)
	case 18:
		p.write(a, os.O_APPEND, "more")
	case 19:
		_ = syscall.Truncate(a, int64(p.IntN(100)))
	case 20: // a directory in the place of another
		removeAll(a)
		_ = os.Mkdir(a, 0o755)
	case 21:
		_ = syscall.Removexattr(a, "user.note")
	case 22: // what is made in such a directory inherits it
		_ = syscall.Setxattr(a, "system.posix_acl_default", accessList(p.IntN(3000)), 0)
	case 23:
		_ = syscall.Setxattr(a, "system.posix_acl_access", accessList(p.IntN(3000)), 0)
	}
}

// removeAll is os.RemoveAll, which waits where the directory above is a FIFO.
func removeAll(path string) {
	if st, err := os.Lstat(filepath.Dir(path)); err == nil && st.IsDir() {
		_ = os.RemoveAll(path)
	}
}

// write does not wait where the file is a FIFO.
func (p *Program) write(path string, flags int, text string) {
	f, err := os.OpenFile(path, os.O_WRONLY|flags|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, os.FileMode(0o600+p.IntN(0o100)))
	if err != nil {
		return
	}
	_, _ = f.WriteString(text)
	_ = f.Close()
}

func (p *Program) sparse(path string) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o644)
	if err != nil {
		return
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt([]byte("end"), 1<<20); err == nil {
		_, _ = f.WriteAt([]byte("begin"), 4096)
	}
}

// accessList is a list of access (acl(5)) that lets a user read, as its attribute has it
// (linux/posix_acl_xattr.h).
func accessList(user int) []byte {
	const nobody = ^uint32(0)
	list := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{0x01, 6, nobody}, {0x02, 4, uint32(user)}, {0x04, 4, nobody}, {0x10, 4, nobody}, {0x20, 0, nobody}} {
		list = binary.LittleEndian.AppendUint16(list, e.tag)
		list = binary.LittleEndian.AppendUint16(list, e.perm)
		list = binary.LittleEndian.AppendUint32(list, e.id)
	}
	return list
}
