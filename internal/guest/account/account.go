// Package account looks up users and groups in the sandbox's own /etc/passwd and /etc/group.
//
// What belongs here: reading those two files, which the sandbox's code may have written. What does
// not: deciding who may act as whom. It asks no name service, since that would run code.
package account

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/guest/resolve"
)

const (
	passwdPath = "/etc/passwd"
	groupPath  = "/etc/group"
	// maxFile bounds the two files, maxGroups a user's groups (the kernel's own bound is 65,536).
	maxFile   = 1 << 20
	maxGroups = 256
)

// User is who a process or a file operation acts as.
type User struct {
	Name   string // "" where only a number is known
	UID    uint32
	GID    uint32
	Groups []uint32
	Home   string
	Shell  string
}

// Book caches the parsed files until they change. The zero value is ready; methods are safe for
// concurrent use.
type Book struct {
	// mu guards the fields below.
	mu     sync.Mutex
	passwd file
	group  file
	last   *User  // what was found last,
	asked  string // and by which word; only while neither file has changed
}

// file is one of the two, as it was last read.
type file struct {
	seen unix.Stat_t
	text []byte
}

// Lookup finds a user by name or number. A number that has no entry is a user without a name, with
// the group of the same number and home "/"; a name without entry is NotFound, but for root, who is 0. After a colon a group, too, has
// a name or a number: it is then the only one.
func (b *Book) Lookup(who string) (User, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	passwd, group := b.filesLocked()
	if b.last != nil && b.asked == who {
		return *b.last, nil
	}
	asked := who
	who, groupName, withGroup := strings.Cut(who, ":")
	u, ok := find(passwd, who)
	if !ok {
		number := who
		if who == rootName { // an image may have no file of users, and root all the same
			number = "0"
		}
		id, err := strconv.ParseUint(number, 10, 32)
		if err != nil || id > maxID {
			return User{}, errs.New(errs.NotFound, "no such user in the sandbox: %s", strconv.Quote(who))
		}
		u = User{UID: uint32(id), GID: uint32(id)}
	}
	if u.Home == "" || u.Home[0] != '/' {
		u.Home = "/"
	}
	if withGroup {
		if u.GID, ok = findGroup(group, groupName); !ok {
			return User{}, errs.New(errs.NotFound, "no such group in the sandbox: %s", strconv.Quote(groupName))
		}
		u.Groups = []uint32{u.GID}
		return u, nil
	}
	u.Groups = groupsOf(group, u)
	b.last, b.asked = &u, asked
	return u, nil
}

// findGroup returns the number of a group's name, or the number that the name is.
func findGroup(group []byte, who string) (gid uint32, ok bool) {
	eachLine(group, func(f [][]byte) bool {
		id, isNumber := number(f, 2)
		if isNumber && string(f[0]) == who {
			gid, ok = id, true
		}
		return !ok
	})
	if ok {
		return gid, true
	}
	id, err := strconv.ParseUint(who, 10, 32)
	return uint32(id), err == nil && id <= maxID
}

const rootName = "root"

// maxID is the last id below the overflow id's double use as "unchanged" (chown(2): -1).
const maxID = 1<<32 - 2

// Group finds a group by name or number; a number need not have an entry, a name without one is NotFound.
func (b *Book) Group(who string) (uint32, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, groups := b.filesLocked()
	gid, ok := findGroup(groups, who)
	if !ok {
		return 0, errs.New(errs.NotFound, "no such group in the sandbox: %s", strconv.Quote(who))
	}
	return gid, nil
}

// filesLocked returns the text of both files. What was found before is forgotten where one has changed.
func (b *Book) filesLocked() (passwd, group []byte) {
	passwd, changed := b.passwd.read(passwdPath)
	group, changed2 := b.group.read(groupPath)
	if changed || changed2 {
		b.last = nil
	}
	return passwd, group
}

// Names returns the names of a uid and a gid, "" where there are none.
func (b *Book) Names(uid, gid uint32) (owner, group string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	passwd, groups := b.filesLocked()
	eachLine(passwd, func(f [][]byte) bool {
		if id, ok := number(f, 2); ok && id == uid {
			owner = string(f[0])
			return false
		}
		return true
	})
	eachLine(groups, func(f [][]byte) bool {
		if id, ok := number(f, 2); ok && id == gid {
			group = string(f[0])
			return false
		}
		return true
	})
	return owner, group
}

// read returns the file's text, from the cache where the file is unchanged, and else says so. A file that
// can't be read is an empty one: then only numbers work, which is what a sandbox without it can have.
func (f *file) read(path string) (text []byte, changed bool) {
	// Whatever way the name leads here by now: only the very file that was read counts as unchanged.
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err == nil && f.seen.Ino != 0 && same(st, f.seen) {
		return f.text, false
	}
	text, st, err := resolve.ReadConfig(path, maxFile)
	if err != nil {
		*f = file{}
		return nil, true
	}
	*f = file{seen: st, text: text}
	return text, true
}

// same tells an unchanged file by its change time, which no process inside can set back.
func same(a, b unix.Stat_t) bool {
	return a.Dev == b.Dev && a.Ino == b.Ino && a.Size == b.Size && a.Ctim == b.Ctim
}

// find returns the first entry of a name or, where who is a number that no name equals, of a uid.
func find(passwd []byte, who string) (User, bool) {
	id, numErr := strconv.ParseUint(who, 10, 32)
	var byName, byID *User
	eachLine(passwd, func(f [][]byte) bool {
		uid, ok := number(f, 2)
		gid, ok2 := number(f, 3)
		if !ok || !ok2 || len(f) < 7 {
			return true
		}
		isName := string(f[0]) == who
		isID := numErr == nil && uint64(uid) == id && byID == nil
		if !isName && !isID {
			return true
		}
		u := &User{Name: string(f[0]), UID: uid, GID: gid, Home: string(f[5]), Shell: string(f[6])}
		if isName {
			byName = u
			return false
		}
		byID = u
		return true
	})
	switch {
	case byName != nil:
		return *byName, true
	case byID != nil:
		return *byID, true
	}
	return User{}, false
}

// groupsOf returns the user's primary group and those that list it.
func groupsOf(group []byte, u User) []uint32 {
	groups := []uint32{u.GID}
	if u.Name == "" {
		return groups
	}
	name := []byte(u.Name)
	eachLine(group, func(f [][]byte) bool {
		gid, ok := number(f, 2)
		if !ok || len(f) < 4 || gid == u.GID {
			return true
		}
		for member := range bytes.SplitSeq(f[3], []byte(",")) {
			if bytes.Equal(member, name) {
				groups = append(groups, gid)
				break
			}
		}
		return len(groups) < maxGroups
	})
	return groups
}

// eachLine calls f with the fields of each line until it returns false.
func eachLine(text []byte, f func(fields [][]byte) bool) {
	var fields [8][]byte
	for line := range bytes.SplitSeq(text, []byte("\n")) {
		n := 0
		for field := range bytes.SplitSeq(line, []byte(":")) {
			if n == len(fields) {
				break
			}
			fields[n] = field
			n++
		}
		if len(fields[0]) > 0 && !f(fields[:n]) {
			return
		}
	}
}

func number(fields [][]byte, i int) (uint32, bool) {
	if i >= len(fields) {
		return 0, false
	}
	n, err := strconv.ParseUint(string(fields[i]), 10, 32)
	return uint32(n), err == nil && n <= maxID
}

// String names the user for messages.
func (u User) String() string {
	if u.Name != "" {
		return u.Name
	}
	return fmt.Sprint(u.UID)
}
