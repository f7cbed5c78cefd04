package rules

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"golang.org/x/net/idna"
)

// The bounds of RFC 1035, section 2.3.4.
const (
	maxName  = 253
	maxLabel = 63
)

// Host brings a host to its one form: either an address (name is "") or a name in lower case, in ASCII,
// without a dot at its end. Anything that some program would read as an address is one: 127.1, 0x7f000001,
// 017700000001, [::ffff:127.0.0.1]. What programs could read differently is an error.
func Host(s string) (name string, addr netip.Addr, err error) {
	if len(s) > 4*maxName {
		return "", addr, errors.New("the host name is too long")
	}
	for _, c := range []byte(s) {
		// A NUL ends the name for some readers and not for others; the rest are delimiters of URLs.
		if c <= ' ' || c == 0x7f || strings.IndexByte(`"#%/<>?@\^|`+"`{}", c) >= 0 {
			return "", addr, fmt.Errorf("the host name holds the character %q", rune(c))
		}
	}
	if inner, ok := strings.CutPrefix(s, "["); ok {
		inner, ok = strings.CutSuffix(inner, "]")
		if !ok || !strings.Contains(inner, ":") {
			return "", addr, errors.New("brackets hold an IPv6 address")
		}
		addr, err = Address(inner)
		return "", addr, err
	}
	if strings.Contains(s, ":") {
		addr, err = Address(s)
		return "", addr, err
	}
	if !ascii(s) {
		if s, err = idna.Lookup.ToASCII(s); err != nil {
			return "", addr, errors.New("the host name is no valid international name")
		}
	}
	s = strings.ToLower(strings.TrimSuffix(s, "."))
	if numeric(s) {
		addr, err = ipv4(s)
		return "", addr, err
	}
	if err := checkName(s); err != nil {
		return "", addr, err
	}
	return s, addr, nil
}

// Address parses an address into its one form: IPv4 in IPv6 form becomes IPv4. A zone is an error.
func Address(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		return a, errors.New("no valid address")
	}
	if a.Zone() != "" {
		return netip.Addr{}, errors.New("addresses with a zone mean nothing outside their host")
	}
	return a.Unmap(), nil
}

func ascii(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}

func checkName(s string) error {
	if s == "" {
		return errors.New("the host name is empty")
	}
	if len(s) > maxName {
		return errors.New("the host name is too long")
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > maxLabel {
			return errors.New("a part of the host name is empty or too long")
		}
		if label[0] == '-' || label[len(label)-1] == '-' {
			return errors.New("a part of the host name begins or ends with a hyphen")
		}
		for _, c := range []byte(label) {
			// The underscore is in no host name by the letter, and in many by use.
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return fmt.Errorf("the host name holds the character %q", rune(c))
			}
		}
		if strings.HasPrefix(label, "xn--") {
			if _, err := idna.Lookup.ToUnicode(label); err != nil {
				return errors.New("the host name is no valid international name")
			}
		}
	}
	return nil
}

// numeric reports whether a name's last part is a number, which makes programs read it as an IPv4 address
// (URL standard, "ends in a number").
func numeric(s string) bool {
	last := s[strings.LastIndexByte(s, '.')+1:]
	if last == "" {
		return false
	}
	if _, err := number(last); err == nil {
		return true
	}
	return strings.Trim(last, "0123456789") == ""
}

func number(s string) (uint64, error) {
	base := 10
	switch {
	case strings.HasPrefix(s, "0x"):
		s, base = s[2:], 16
		if s == "" {
			return 0, nil
		}
	case len(s) > 1 && s[0] == '0':
		s, base = s[1:], 8
	}
	if strings.ContainsAny(s, "_+-") {
		return 0, strconv.ErrSyntax
	}
	return strconv.ParseUint(s, base, 64)
}

// ipv4 reads an address as inet_aton(3) does: one to four numbers, decimal, octal or hexadecimal, the
// last of which fills what is left.
func ipv4(s string) (netip.Addr, error) {
	bad := fmt.Errorf("%q is no valid IPv4 address", s)
	parts := strings.Split(s, ".")
	if len(parts) > 4 {
		return netip.Addr{}, bad
	}
	var value uint64
	for i, p := range parts {
		n, err := number(p)
		if err != nil {
			return netip.Addr{}, bad
		}
		if i < len(parts)-1 {
			if n > 0xff {
				return netip.Addr{}, bad
			}
			value |= n << (8 * (3 - i))
			continue
		}
		if n >= 1<<(8*(5-len(parts))) {
			return netip.Addr{}, bad
		}
		value |= n
	}
	return netip.AddrFrom4([4]byte{byte(value >> 24), byte(value >> 16), byte(value >> 8), byte(value)}), nil
}
