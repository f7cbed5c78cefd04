package rules

import (
	"net/netip"
	"strings"
	"testing"
)

// Every way to write an address that some program reads as one, and every way to write a name, has one form.
func TestHost(t *testing.T) {
	for _, tt := range []struct{ in, name, addr string }{
		{"example.com", "example.com", ""},
		{"EXAMPLE.com.", "example.com", ""},
		{"bücher.example", "xn--bcher-kva.example", ""},
		{"XN--BCHER-KVA.example", "xn--bcher-kva.example", ""},
		{"exa_mple.com", "exa_mple.com", ""},
		{"localhost", "localhost", ""},
		{"ａllowed。test", "allowed.test", ""},
		{"169.254.169.254", "", "169.254.169.254"},
		{"2852039166", "", "169.254.169.254"},
		{"0xA9FEA9FE", "", "169.254.169.254"},
		{"0251.0376.0251.0376", "", "169.254.169.254"},
		{"0xa9.0xfe.43518", "", "169.254.169.254"},
		{"127.1", "", "127.0.0.1"},
		{"0", "", "0.0.0.0"},
		{"127.0.0.1.", "", "127.0.0.1"},
		{"１２７.0.0.1", "", "127.0.0.1"},
		{"[::ffff:a9fe:a9fe]", "", "169.254.169.254"},
		{"::ffff:169.254.169.254", "", "169.254.169.254"},
		{"[fd00:ec2::254]", "", "fd00:ec2::254"},
		{"[64:ff9b::a9fe:a9fe]", "", "64:ff9b::a9fe:a9fe"},
	} {
		name, addr, err := Host(tt.in)
		var want netip.Addr
		if tt.addr != "" {
			want = netip.MustParseAddr(tt.addr)
		}
		if err != nil || name != tt.name || addr != want {
			t.Errorf("%q: %q %v %v, want %q %v", tt.in, name, addr, err, tt.name, want)
		}
	}
}

func TestHostRefuses(t *testing.T) {
	for _, in := range []string{
		"", ".", "..", "a..b", ".a", "-a.com", "a-.com", "a b", "a\x00.allowed.test", "allowed.test@evil.test", "evil.test#allowed.test",
		"evil.test/allowed.test", `evil.test\allowed.test`, "a%2eb", "fe80::1%eth0", "[fe80::1%25eth0]", "[127.0.0.1]", "[::1", "256.1.1.1",
		"1.2.3.4.5", "0x1ffffffff", "1.2.3.08", strings.Repeat("a", 64) + ".com", strings.Repeat("a.", 127) + "com", "xn--\u0000", "xn--zz-", "a\u200d.com", "a,b", "a*b",
	} {
		if name, addr, err := Host(in); err == nil {
			t.Errorf("%q: %q %v", in, name, addr)
		}
	}
}

func FuzzHost(f *testing.F) {
	for _, s := range []string{"example.com", "0x7f.1", "[::1]", "bücher.example", "a\x00b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, addr, err := Host(s)
		if err != nil {
			return
		}
		if (name == "") != addr.IsValid() || addr.Is4In6() || addr.Zone() != "" {
			t.Fatalf("%q: %q %v", s, name, addr)
		}
		form := name
		if addr.IsValid() {
			form = addr.String()
		}
		// The one form is its own form.
		if n2, a2, err := Host(form); err != nil || n2 != name || a2 != addr {
			t.Fatalf("%q → %q → %q %v %v", s, form, n2, a2, err)
		}
	})
}
