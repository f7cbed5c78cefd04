package account

import (
	"slices"
	"testing"
)

const passwd = `root:x:0:0:root:/root:/bin/bash
user:x:1000:1000:U:/home/user:/bin/sh
1000:x:7:7::/odd:
again:x:1000:1::/:
huge:x:4294967295:0::/:/bin/sh
short:x:5
:x:6:6::/:/x
`

func TestFind(t *testing.T) {
	tests := map[string]struct {
		uid uint32
		ok  bool
	}{
		"root": {0, true}, "0": {0, true}, "user": {1000, true}, "again": {1000, true},
		"1000": {7, true}, // a name that looks like a number is a name, as everywhere in Unix
		"huge": {0, false}, "short": {0, false}, "": {0, false}, "nobody": {0, false},
	}
	for who, want := range tests {
		u, ok := find([]byte(passwd), who)
		if ok != want.ok || u.UID != want.uid {
			t.Errorf("%q: %+v, %v", who, u, ok)
		}
	}
}

func TestGroupsOf(t *testing.T) {
	const group = "root:x:0:user\nuser:x:1000:user\nextra:x:2000:a,user,b\nno:x:3:users\nbad:x:y:user\nshort:x:4\n"
	u := User{Name: "user", GID: 1000}
	if got := groupsOf([]byte(group), u); !slices.Equal(got, []uint32{1000, 0, 2000}) {
		t.Errorf("%v", got)
	}
	if got := groupsOf([]byte(group), User{GID: 5}); !slices.Equal(got, []uint32{5}) {
		t.Errorf("%v", got)
	}
}

func TestLookupOnTheHost(t *testing.T) {
	var b Book
	for range 2 { // the second time from the cache
		if u, err := b.Lookup("root"); err != nil || u.UID != 0 || u.Home != "/root" {
			t.Fatalf("%+v, %v", u, err)
		}
	}
	if owner, group := b.Names(0, 0); owner != "root" || group != "root" {
		t.Errorf("%s, %s", owner, group)
	}
	if owner, group := b.Names(4242, 4242); owner != "" || group != "" {
		t.Errorf("%s, %s", owner, group)
	}
}

func FuzzFind(f *testing.F) {
	f.Add([]byte(passwd), "user")
	f.Add([]byte(":::::::\n\n:"), "")
	f.Fuzz(func(t *testing.T, text []byte, who string) {
		u, ok := find(text, who)
		if ok && (u.UID > maxID || u.GID > maxID) {
			t.Fatalf("%+v", u)
		}
		if groups := groupsOf(text, u); len(groups) > maxGroups {
			t.Fatalf("%d groups", len(groups))
		}
	})
}

func TestFindGroup(t *testing.T) {
	const group = "root:x:0:\nstaff:x:50:\n7:x:70:\nbad:x:y:\n"
	for who, want := range map[string]struct {
		gid uint32
		ok  bool
	}{
		"staff": {50, true}, "0": {0, true}, "7": {70, true}, "99": {99, true}, "none": {0, false}, "bad": {0, false}, "": {0, false},
	} {
		if gid, ok := findGroup([]byte(group), who); gid != want.gid || ok != want.ok {
			t.Errorf("%q: %d, %v", who, gid, ok)
		}
	}
}

func TestLookupWithGroup(t *testing.T) {
	var b Book
	u, err := b.Lookup("root:4242")
	if err != nil || u.UID != 0 || u.GID != 4242 || !slices.Equal(u.Groups, []uint32{4242}) {
		t.Errorf("%+v, %v", u, err)
	}
	if _, err := b.Lookup("root:nosuchgroup"); err == nil {
		t.Error("a group that is not there")
	}
}
