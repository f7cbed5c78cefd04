package secret

import (
	"net/netip"
	"strconv"
	"strings"
)

// Host is where a secret may be sent: a name, or all names below one, at one port.
type Host struct {
	// Name is canonical: lower case, no dot at the end. With Below it stands for the names below it.
	Name  string
	Below bool
	Port  uint16
}

// ParseHost reads "api.example.com", "*.example.com" or one of them with ":PORT"; the port is 443
// where none is named. InvalidArgument: addresses, single-label names but localhost, and anything
// that is not a host name by RFC 1123; a secret is bound to a name that a certificate can prove.
func ParseHost(s string) (Host, error) {
	h := Host{Name: s, Port: 443}
	if name, port, ok := strings.Cut(s, ":"); ok {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return Host{}, invalid("host %.80q: its port is no number from 1 to 65535", s)
		}
		h.Name, h.Port = name, uint16(n)
	}
	if rest, ok := strings.CutPrefix(h.Name, "*."); ok {
		h.Name, h.Below = rest, true
	}
	h.Name = strings.ToLower(strings.TrimSuffix(h.Name, "."))
	if _, err := netip.ParseAddr(h.Name); err == nil {
		return Host{}, invalid("host %.80q is an address: bind the secret to a name, which a certificate can prove", s)
	}
	if !validName(h.Name) {
		return Host{}, invalid("host %.80q is no host name", s).WithHint("use api.example.com, *.example.com, or one with :PORT")
	}
	// *.com would hand the secret to whoever registers a name.
	if labels := strings.Count(h.Name, ".") + 1; labels < 2 && h.Name != "localhost" {
		return Host{}, invalid("host %.80q has only one label", s).WithHint("write the whole name, as in api.example.com")
	}
	return h, nil
}

// validName follows RFC 1123, with the underscore that some names have.
func validName(s string) bool {
	if len(s) == 0 || len(s) > 253 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if len(label) == 0 || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for i := range len(label) {
			c := label[i]
			if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return false
			}
		}
	}
	return true
}

// Matches reports whether name, which is canonical, and port are what h stands for. Names match on
// label boundaries only, and *.example.com is not example.com.
func (h Host) Matches(name string, port uint16) bool {
	if port != h.Port {
		return false
	}
	if !h.Below {
		return name == h.Name
	}
	head, ok := strings.CutSuffix(name, "."+h.Name)
	return ok && head != ""
}

// String is what ParseHost reads.
func (h Host) String() string {
	s := h.Name
	if h.Below {
		s = "*." + s
	}
	if h.Port != 443 {
		s += ":" + strconv.Itoa(int(h.Port))
	}
	return s
}
