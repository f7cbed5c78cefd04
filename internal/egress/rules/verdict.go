package rules

import "net/netip"

// Proto is what a query is about.
type Proto string

// The protocols.
const (
	TCP  Proto = "tcp"
	UDP  Proto = "udp"
	ICMP Proto = "icmp"
	// DNS asks whether a name may be looked up at all: whether any connection to it could be allowed.
	DNS Proto = "dns"
)

// Query is what is known about a connection so far. Facts become known one after the other, and Decide
// is asked again with each; what is not known yet is left zero.
type Query struct {
	Proto Proto
	// Name is the canonical host name (Host) that the sandbox connects to, "" where it used an address.
	Name string
	// Addr is the address that is really dialled. The zero Addr: not known yet (a name that is not
	// resolved). Never IPv4 in IPv6 form, never with a zone; see Address.
	Addr netip.Addr
	// Own says that Addr is one of the gateway's own host.
	Own bool
	// Port is the destination's; 0 only for DNS.
	Port uint16
	// TLS is what the client said in its TLS hello; nil: not seen, or not TLS.
	TLS *TLS
	// HTTP is the request's head; nil: not seen.
	HTTP *HTTP
	// Plain says that the client's first bytes were seen, and are neither TLS nor HTTP.
	Plain bool
}

// TLS is what a hello shows.
type TLS struct {
	ServerName string // canonical; "" where the hello names none
	ECH        bool   // it hides another hello behind encryption
}

// HTTP is what a request's head shows.
type HTTP struct {
	Host    string // canonical, without port
	Port    uint16 // of the Host header; 0 where it names none
	Method  string
	Path    string // as sent, without query
	Upgrade bool
}

// Code is the machine word for why.
type Code string

// The codes. Allowed is the only one of a verdict that allows.
const (
	Allowed        Code = "allowed"
	NoRule         Code = "no_rule"         // nothing allows it: default deny
	Denied         Code = "denied"          // a rule denies it
	SpecialAddress Code = "special_address" // private, loopback, link-local, metadata, the host itself: needs a rule that names it
	NameMismatch   Code = "name_mismatch"   // SNI or Host is another name than the one that was connected to
	NoServerName   Code = "no_server_name"  // a TLS hello without a name, or with an encrypted one, to a host allowed by name
	NotWeb         Code = "not_web"         // neither TLS nor HTTP on a port that is open for the web only
	BadName        Code = "bad_name"        // no valid host name or address
	UnknownAddress Code = "unknown_address" // an address of the gateway's own range that stands for no name
	Unresolved     Code = "unresolved"      // the name is allowed and could not be looked up
	Unreachable    Code = "unreachable"     // allowed, and the other side did not answer
	Limit          Code = "limit"           // the sandbox's connections, bytes or rate
	NotInspectable Code = "not_inspectable" // the rule looks into HTTP, and this can't be looked into
	NotRecorded    Code = "not_recorded"    // the sandbox is answered from a record, and this is not in it
)

// Known reports whether c is one of the codes.
func (c Code) Known() bool {
	switch c {
	case Allowed, NoRule, Denied, SpecialAddress, NameMismatch, NoServerName, NotWeb, BadName, UnknownAddress, Unresolved,
		Unreachable, Limit, NotInspectable, NotRecorded:
		return true
	}
	return false
}

// Verdict is the answer to a Query.
type Verdict struct {
	// Allow says that nothing known so far forbids it, and that something may allow it.
	Allow bool `json:"allow"`
	// Inspect says that the answer depends on HTTP requests, which must be looked at one by one: each is
	// a Query of its own.
	Inspect bool `json:"inspect,omitempty"`
	// Web says that the rule is for TLS and HTTP alone, and that each request's Host counts.
	Web  bool `json:"web,omitempty"`
	Code Code `json:"code"`
	// Rule is the text of the rule that decided, "" where none did.
	Rule string `json:"rule,omitempty"`
	// Reason is one sentence for people. It holds nothing but what the query and the rules hold.
	Reason string `json:"reason"`
	// Hint is a rule that would allow it, as for --allow, or "" where a rule would not.
	Hint string `json:"hint,omitempty"`
}
