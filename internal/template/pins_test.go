package template

import (
	"strings"
	"testing"
)

func TestPinsOf(t *testing.T) {
	pip := func(name, version, place string) Package {
		return Package{Manager: "pip", Name: name, Version: version, Place: place}
	}
	got := pinsOf(LockStep{Brings: []Package{
		{Manager: "dpkg", Name: "libc6", Version: "2.36-9+deb12u13"},
		{Manager: "dpkg", Name: "g++", Version: "4:12.2.0-3~x"},
		pip("two", "1.0", "/a"), pip("one", "1!2.0.post1+local", "/a"), pip("one", "1!2.0.post1+local", "/b"),
		// In two versions, of pip's build environments, from another manager.
		pip("both", "1.0", "/a"), pip("both", "2.0", "/b"), pip("setuptools", "70.0", "/a"), pip("wheel", "0.4", "/a"),
		{Manager: "npm", Name: "left-pad", Version: "1.0"},
		// Lock files are written by anybody: none of it becomes a line of its own, an option or a pattern.
		pip("-r", "1", ""), pip("x --index-url=https://evil.example.com", "1", ""), pip("x", "1\n-r y", ""), pip("x", "*", ""),
		{Manager: "dpkg", Name: "*", Version: "1"},
		{Manager: "dpkg", Name: "evil", Version: "1\nPin-Priority: 1"},
		{Manager: "dpkg", Name: "evil", Version: "*"},
		{Manager: "dpkg", Name: "a b", Version: "1"},
	}})
	if want := "one==1!2.0.post1+local\ntwo==1.0\n"; got.pip != want {
		t.Errorf("pip gets %q, want %q", got.pip, want)
	}
	want := "Package: libc6\nPin: version 2.36-9+deb12u13\nPin-Priority: 1001\n\nPackage: g++\nPin: version 4:12.2.0-3~x\nPin-Priority: 1001\n\n"
	if got.apt != want {
		t.Errorf("apt gets %q, want %q", got.apt, want)
	}
	if !pinsOf(LockStep{}).none() {
		t.Error("a step that brings nothing has pins")
	}
}

func TestLockText(t *testing.T) {
	l := &Lock{
		Version: lockVersion, Base: LockBase{Name: "base", Digest: "d"}, Digest: "e",
		Steps: []LockStep{{Text: "RUN a && b", Digest: "1"}, {Text: "RUN c", Digest: "2", Brings: []Package{
			{Manager: "dpkg", Name: "curl", Version: "7"}, {Manager: "pip", Name: "x", Version: "1", Place: "/v", Digest: "3"},
		}}, {Text: "ENV x"}},
		Packages: []Package{{Manager: "dpkg", Name: "curl", Version: "7"}},
	}
	text := l.Text()
	if want := "      {\"manager\":\"dpkg\",\"name\":\"curl\",\"version\":\"7\"},\n"; !strings.Contains(text, want) {
		t.Errorf("a step's packages have no lines of their own:\n%s", text)
	}
	back, err := ParseLock(text)
	if err != nil || back.Text() != text || len(back.Steps[1].Brings) != 2 {
		t.Errorf("%+v, %v of\n%s", back, err, text)
	}
}

// TestDriftNamesPackages: also those of stages that are no part of the result, and those whose version stayed.
func TestDriftNamesPackages(t *testing.T) {
	lock := func(version, digest, record string) *Lock {
		return &Lock{Digest: digest, Steps: []LockStep{{Text: "RUN x", Digest: digest, Brings: []Package{
			{Manager: "pip", Name: "x", Version: version, Digest: record},
		}}}}
	}
	for _, c := range []struct {
		got  *Lock
		want string
	}{
		{lock("1", "a", "r"), ""},
		{lock("2", "b", "s"), "step 1 (RUN x) gave other files: pip x is 2, was 1"},
		{lock("1", "b", "s"), "step 1 (RUN x) gave other files: pip x 1 has other files than it had in this version"},
		{lock("1", "b", "r"), "step 1 (RUN x) gave other files: /etc/x"},
	} {
		err := drift(lock("1", "a", "r"), c.got, func(int) string { return "/etc/x" })
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}
