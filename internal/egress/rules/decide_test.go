package rules

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func set(t testing.TB, list ...string) *Set {
	t.Helper()
	var out []Rule
	for _, text := range list {
		var r Rule
		if err := r.UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return NewSet(out)
}

func q(name string, port uint16) Query { return Query{Proto: TCP, Name: name, Port: port} }

func at(addr string, port uint16) Query {
	return Query{Proto: TCP, Addr: netip.MustParseAddr(addr), Port: port}
}

func to(name, addr string, port uint16) Query {
	r := at(addr, port)
	r.Name = name
	return r
}

func with(r Query, f func(*Query)) Query { f(&r); return r }

func TestDecide(t *testing.T) {
	const public = "93.184.215.14"
	tls := func(sni string) func(*Query) { return func(r *Query) { r.TLS = &TLS{ServerName: sni} } }
	http := func(host, method, path string) func(*Query) {
		return func(r *Query) { r.HTTP = &HTTP{Host: host, Method: method, Path: path} }
	}
	for name, tt := range map[string]struct {
		rules []string
		query Query
		want  Code
	}{
		"empty list denies":         {nil, q("allowed.test", 443), NoRule},
		"empty list denies DNS":     {nil, Query{Proto: DNS, Name: "allowed.test"}, NoRule},
		"exact":                     {[]string{"allow allowed.test"}, to("allowed.test", public, 443), Allowed},
		"exact, other port":         {[]string{"allow allowed.test"}, q("allowed.test", 22), NoRule},
		"exact, named port":         {[]string{"allow allowed.test:22"}, q("allowed.test", 22), Allowed},
		"suffix":                    {[]string{"allow *.allowed.test"}, q("a.b.allowed.test", 443), Allowed},
		"suffix, not itself":        {[]string{"allow *.allowed.test"}, q("allowed.test", 443), NoRule},
		"suffix, label boundary":    {[]string{"allow *.allowed.test"}, q("evilallowed.test", 443), NoRule},
		"suffix in the middle":      {[]string{"allow *.allowed.test"}, q("a.allowed.test.evil.test", 443), NoRule},
		"address rule, no lookup":   {[]string{"allow 0.0.0.0/0"}, Query{Proto: DNS, Name: "x.evil.test"}, NoRule},
		"order: deny first":         {[]string{"deny bad.allowed.test", "allow *.allowed.test"}, q("bad.allowed.test", 443), Denied},
		"an address opens no name":  {[]string{"allow 8.8.8.8"}, to("dns.test", "8.8.8.8", 443), NoRule},
		"order: allow first":        {[]string{"allow 8.8.8.8", "deny 8.0.0.0/8", "allow *"}, to("dns.test", "8.8.8.8", 443), Allowed},
		"denied whole, its lookup":  {[]string{"deny bad.test", "allow *"}, Query{Proto: DNS, Name: "bad.test"}, Denied},
		"denied whole, other port":  {[]string{"deny bad.test", "allow *:*"}, q("bad.test", 25), Denied},
		"denied address by name":    {[]string{"deny " + public, "allow *"}, to("allowed.test", public, 443), Denied},
		"UDP needs its own rule":    {[]string{"allow *:*"}, with(at(public, 443), func(r *Query) { r.Proto = UDP }), NoRule},
		"UDP":                       {[]string{"allow udp://" + public + ":123"}, with(at(public, 123), func(r *Query) { r.Proto = UDP }), Allowed},
		"star is public":            {[]string{"allow *"}, at(public, 443), Allowed},
		"private by star":           {[]string{"allow *:*"}, at("10.0.0.1", 80), SpecialAddress},
		"private by everything":     {[]string{"allow 0.0.0.0/0"}, at("10.0.0.1", 80), SpecialAddress},
		"private by its rule":       {[]string{"allow 10.0.0.0/8:*"}, at("10.0.0.1", 5432), Allowed},
		"name leads to private":     {[]string{"allow allowed.test"}, to("allowed.test", "10.0.0.1", 443), SpecialAddress},
		"name leads to named":       {[]string{"allow allowed.test", "allow 10.0.0.1:443"}, to("allowed.test", "10.0.0.1", 443), Allowed},
		"link-local is no metadata": {[]string{"allow 169.254.0.0/16"}, at("169.254.169.254", 80), SpecialAddress},
		"metadata named":            {[]string{"allow 169.254.169.254"}, at("169.254.169.254", 80), Allowed},
		"metadata by NAT64":         {[]string{"allow *"}, at("64:ff9b::a9fe:a9fe", 80), SpecialAddress},
		"metadata by 6to4":          {[]string{"allow *"}, at("2002:a9fe:a9fe::1", 80), SpecialAddress},
		"metadata of Azure":         {[]string{"allow *"}, at("168.63.129.16", 80), SpecialAddress},
		"own address":               {[]string{"allow *"}, with(at(public, 80), func(r *Query) { r.Own = true }), SpecialAddress},
		"own address named":         {[]string{"allow " + public}, with(at(public, 80), func(r *Query) { r.Own = true }), Allowed},
		"denied in other dress":     {[]string{"deny 169.254.169.254", "allow 64:ff9b::/96"}, at("64:ff9b::a9fe:a9fe", 80), Denied},
		"SNI agrees":                {[]string{"allow allowed.test"}, with(to("allowed.test", public, 443), tls("allowed.test")), Allowed},
		"SNI fronts":                {[]string{"allow *"}, with(to("allowed.test", public, 443), tls("denied.test")), NameMismatch},
		"no SNI":                    {[]string{"allow *"}, with(to("allowed.test", public, 443), tls("")), NoServerName},
		"ECH":                       {[]string{"allow *"}, with(to("a.test", public, 443), func(r *Query) { r.TLS = &TLS{ServerName: "a.test", ECH: true} }), NoServerName},
		"Host fronts":               {[]string{"allow *"}, with(to("allowed.test", public, 80), http("denied.test", "GET", "/")), NameMismatch},
		"Host names another port":   {[]string{"allow *"}, with(to("a.test", public, 80), func(r *Query) { r.HTTP = &HTTP{Host: "a.test", Port: 81, Method: "GET", Path: "/"} }), NameMismatch},
		"denied name by address":    {[]string{"deny bad.test", "allow *"}, with(at(public, 443), tls("bad.test")), Denied},
		"denied Host by address":    {[]string{"deny *.bad.test", "allow *"}, with(at(public, 80), http("a.bad.test", "GET", "/")), Denied},
		"other name by address":     {[]string{"deny bad.test", "allow *"}, with(at(public, 443), tls("good.test")), Allowed},
		"not web":                   {[]string{"allow allowed.test"}, with(to("allowed.test", public, 443), func(r *Query) { r.Plain = true }), NotWeb},
		"whatever on a named port":  {[]string{"allow allowed.test:443"}, with(to("allowed.test", public, 443), func(r *Query) { r.Plain = true }), Allowed},
		"path":                      {[]string{"allow https://a.test/v1/*"}, with(q("a.test", 443), http("a.test", "GET", "/v1/x")), Allowed},
		"other path":                {[]string{"allow https://a.test/v1/*"}, with(q("a.test", 443), http("a.test", "GET", "/v2/x")), NoRule},
		"path that climbs":          {[]string{"allow https://a.test/v1/*"}, with(q("a.test", 443), http("a.test", "GET", "/v1/../v2")), NoRule},
		"path that climbs hidden":   {[]string{"allow https://a.test/v1/*"}, with(q("a.test", 443), http("a.test", "GET", "/v1/%2e%2e/v2")), NoRule},
		"denied path, hidden":       {[]string{"deny https://a.test/admin*", "allow a.test"}, with(q("a.test", 443), http("a.test", "GET", "//admin")), Denied},
		"method":                    {[]string{"allow GET,HEAD https://a.test"}, with(q("a.test", 443), http("a.test", "HEAD", "/x")), Allowed},
		"other method":              {[]string{"allow GET https://a.test"}, with(q("a.test", 443), http("a.test", "POST", "/x")), NoRule},
		"plain where HTTP is asked": {[]string{"allow GET https://a.test"}, with(q("a.test", 443), func(r *Query) { r.Plain = true }), NoRule},
	} {
		t.Run(name, func(t *testing.T) {
			v := set(t, tt.rules...).Decide(tt.query)
			if v.Code != tt.want || v.Allow != (tt.want == Allowed) || v.Reason == "" {
				t.Errorf("got %+v, want %s", v, tt.want)
			}
		})
	}
}

func TestInspect(t *testing.T) {
	s := set(t, "deny POST https://a.test", "allow a.test", "allow GET https://b.test/x")
	if v := s.Decide(q("a.test", 443)); !v.Allow || !v.Inspect {
		t.Errorf("a.test: %+v", v)
	}
	if v := s.Decide(q("a.test", 80)); !v.Allow || v.Inspect {
		t.Errorf("a.test by HTTP: %+v", v)
	}
	if v := s.Decide(q("b.test", 443)); !v.Allow || !v.Inspect {
		t.Errorf("b.test: %+v", v)
	}
	if v := s.Decide(q("c.test", 443)); v.Allow {
		t.Errorf("c.test: %+v", v)
	}
}

// A refusal's hint, given as a rule, allows what was refused.
func TestHintAllows(t *testing.T) {
	for _, query := range []Query{
		q("a.test", 443), q("a.test", 25), at("93.184.215.14", 443), at("93.184.215.14", 8080), at("10.0.0.1", 22), at("169.254.169.254", 80),
		at("2606:2800:21f::1", 443), at("fe80::1", 5),
		{Proto: DNS, Name: "a.test"},
		with(at("10.1.1.1", 53), func(r *Query) { r.Proto = UDP }),
		with(at("93.184.215.14", 80), func(r *Query) { r.Own = true }),
		with(q("a.test", 443), func(r *Query) {
			r.TLS, r.HTTP = &TLS{ServerName: "a.test"}, &HTTP{Host: "a.test", Method: "GET", Path: "/v1/x"}
		}),
	} {
		list := []string{}
		for range 3 { // a name and an address may both be missing
			v := set(t, list...).Decide(query)
			if v.Allow {
				break
			}
			if v.Hint == "" {
				t.Fatalf("%+v: no hint: %+v", query, v)
			}
			list = append(list, "allow "+v.Hint)
		}
		if v := set(t, list...).Decide(query); !v.Allow {
			t.Errorf("%+v with %v: %+v", query, list, v)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, text := range []string{
		"", "a..b", "*.*.b", "a*.b", "*.1.2.3.4", "ftp://a.test", "a.test:0", "a.test:70000", "a.test:9-8", "tcp://a.test", "10.0.0.1/8",
		"::ffff:10.0.0.0/104", "get a.test", "udp://a.test:5/x", "https://10.0.0.0/8/x", "a.test/x?y", "a.test/x#y", "fe80::1%eth0", "a.test:x",
		strings.Repeat("a", 3000),
	} {
		if r, err := Parse(text, false); err == nil {
			t.Errorf("%q: %+v", text, r)
		}
	}
}

func TestRuleText(t *testing.T) {
	for _, text := range []string{"allow a.test", "deny GET,POST https://*.a.test:8443/x/*", "allow [fd00::/8]:443", "allow 10.0.0.0/8", "allow *:*"} {
		var r Rule
		if err := r.UnmarshalText([]byte(text)); err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal([]Rule{r})
		var again []Rule
		if err != nil || json.Unmarshal(b, &again) != nil || again[0].String() != text {
			t.Errorf("%s: %s %v", text, b, err)
		}
	}
}

// The parts that the property below puts together.
var (
	names = []string{"a.test", "b.a.test", "evila.test", "c.example"}
	addrs = []string{"93.184.215.14", "10.0.0.1", "10.9.9.9", "169.254.169.254", "2606:2800::1", "fe80::1", "64:ff9b::a00:1"}
	ports = []uint16{22, 80, 443, 8080}
	paths = []string{"/", "/v1/x", "/v2", "/v1/../v2"}
	verbs = []string{"GET", "POST"}
	hosts = []string{
		"*", "*:*", "a.test", "*.a.test", "*.test:22", "a.test:8080", "10.0.0.0/8", "10.0.0.1:22", "0.0.0.0/0:*", "93.184.0.0/16:80", "169.254.169.254:80",
		"fe80::/10", "[64:ff9b::/96]:*", "https://a.test/v1/*", "GET http://a.test", "GET,POST https://*.test/", "udp://*:22", "tcp://c.example:20-90",
	}
)

func anyRules(t *rapid.T) []Rule {
	var out []Rule
	for _, text := range rapid.SliceOfN(rapid.SampledFrom(hosts), 0, 6).Draw(t, "rules") {
		r, err := Parse(text, rapid.Bool().Draw(t, "deny"))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, r)
	}
	return out
}

func anyQuery(t *rapid.T) Query {
	r := Query{Proto: TCP, Port: rapid.SampledFrom(ports).Draw(t, "port"), Addr: netip.MustParseAddr(rapid.SampledFrom(addrs).Draw(t, "addr"))}
	if rapid.Bool().Draw(t, "named") {
		r.Name = rapid.SampledFrom(names).Draw(t, "name")
	}
	if rapid.IntRange(0, 5).Draw(t, "udp") == 0 {
		r.Proto = UDP
		return r
	}
	switch rapid.IntRange(0, 2).Draw(t, "spoken") {
	case 0:
		r.Plain = true
	default:
		host := r.Name
		if host == "" || rapid.IntRange(0, 9).Draw(t, "front") == 0 {
			host = "c.example"
		}
		r.HTTP = &HTTP{Host: host, Method: rapid.SampledFrom(verbs).Draw(t, "method"), Path: rapid.SampledFrom(paths).Draw(t, "path")}
	}
	return r
}

// oracle decides on a query of which everything is known, the slow and obvious way: by the texts of the
// rules, one question after the other.
func oracle(list []Rule, r Query) bool {
	if r.Name != "" && r.HTTP != nil && r.HTTP.Host != r.Name {
		return false
	}
	if r.Name != "" { // names are open by names
		named := slices.DeleteFunc(slices.Clone(list), func(x Rule) bool { return x.host.prefix.IsValid() || !covers(x, r) })
		if len(named) == 0 || named[0].deny {
			return false
		}
	}
	decided := -1
	for i, rule := range list {
		if covers(rule, r) {
			decided = i
			break
		}
	}
	if decided < 0 || list[decided].deny {
		return false
	}
	text := list[decided].text
	web := !strings.Contains(text, "]:") && !strings.Contains(strings.TrimPrefix(strings.TrimPrefix(text, "GET "), "GET,POST "), ":") || strings.Contains(text, "http")
	if strings.HasPrefix(text, "fe80::") {
		web = true
	}
	if web && r.Plain {
		return false
	}
	var narrow string
	switch a := r.Addr.String(); {
	case strings.HasPrefix(a, "10."):
		narrow = "10.0.0.0/8"
	case a == "169.254.169.254":
		narrow = a + "/32"
	case strings.HasPrefix(a, "fe80"):
		narrow = "fe80::/10"
	case strings.HasPrefix(a, "64:ff9b"):
		narrow = "64:ff9b::/96"
	default:
		return true
	}
	within := netip.MustParsePrefix(narrow)
	for _, rule := range list {
		if !rule.host.prefix.IsValid() || !covers(rule, r) {
			continue
		}
		if rule.deny {
			return false
		}
		if within.Contains(rule.host.prefix.Addr()) && rule.host.prefix.Bits() >= within.Bits() {
			return true
		}
	}
	return false
}

// covers reports whether a rule is about a query, by its text.
func covers(rule Rule, r Query) bool {
	text := rule.text
	methods := ""
	if m, rest, ok := strings.Cut(text, " "); ok {
		methods, text = m, rest
	}
	scheme, rest, ok := strings.Cut(text, "://")
	if ok {
		text = rest
	} else {
		scheme = ""
	}
	path := ""
	if scheme == "https" || scheme == "http" {
		if i := strings.IndexByte(text, '/'); i >= 0 {
			text, path = text[:i], text[i:]
		}
	}
	host, port := text, ""
	if i := strings.LastIndexByte(text, ':'); i >= 0 && (strings.Count(text, ":") == 1 || strings.Contains(text, "]:")) {
		host, port = text[:i], text[i+1:]
	}
	host = strings.Trim(host, "[]")
	whole := rule.deny && scheme == "" && port == "" && methods == ""
	if !whole {
		if (scheme == "udp") != (r.Proto == UDP) {
			return false
		}
		allowed := map[string][]uint16{"": {80, 443}, "*": ports, "22": {22}, "80": {80}, "8080": {8080}, "20-90": {22, 80}}[port]
		if scheme == "https" {
			allowed = []uint16{443}
		}
		if scheme == "http" {
			allowed = []uint16{80}
		}
		if !slices.Contains(allowed, r.Port) {
			return false
		}
	}
	said := r.Name
	if said == "" && rule.deny && r.HTTP != nil {
		said = r.HTTP.Host
	}
	switch {
	case host == "*":
	case strings.HasPrefix(host, "*."):
		if !strings.HasSuffix(said, host[1:]) {
			return false
		}
	case strings.ContainsAny(host, "/") || netipOK(host):
		if !strings.Contains(host, "/") {
			host += "/32"
		}
		p := netip.MustParsePrefix(host)
		in := p.Contains(r.Addr)
		if rule.deny && strings.HasPrefix(r.Addr.String(), "64:ff9b::") {
			in = in || p.Contains(netip.MustParseAddr("10.0.0.1"))
		}
		if !in {
			return false
		}
	case host != said:
		return false
	}
	if methods == "" && path == "" {
		return true
	}
	if r.HTTP == nil {
		return false
	}
	if path != "" && strings.Contains(r.HTTP.Path, "..") {
		return rule.deny
	}
	if methods != "" && !slices.Contains(strings.Split(methods, ","), r.HTTP.Method) {
		return false
	}
	switch path {
	case "/v1/*":
		return strings.HasPrefix(r.HTTP.Path, "/v1/")
	case "/":
		return r.HTTP.Path == "/"
	}
	return true
}

func netipOK(s string) bool { _, err := netip.ParseAddr(s); return err == nil }

func TestDecideAgreesWithOracle(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list, r := anyRules(t), anyQuery(t)
		if got, want := NewSet(list).Decide(r), oracle(list, r); got.Allow != want {
			t.Fatalf("rules %v\nquery %+v http %+v\ngot %+v, oracle says %v", list, r, r.HTTP, got, want)
		}
	})
}

// What is refused while less is known is refused when more is: nothing is refused too early, so that a
// connection that the whole would allow is never cut off.
func TestEarlyRefusalIsFinal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list, r := anyRules(t), anyQuery(t)
		s := NewSet(list)
		if !s.Decide(r).Allow {
			return
		}
		early := r
		early.HTTP, early.TLS, early.Plain = nil, nil, false
		if v := s.Decide(early); !v.Allow {
			t.Fatalf("rules %v allow %+v, and refuse it before the request: %+v", list, r, v)
		}
		// Nor before the name was looked up, and looking it up is allowed: else new rules would leave open what they
		// let nobody open.
		if early.Addr = (netip.Addr{}); r.Name != "" {
			if v := s.Decide(early); !v.Allow {
				t.Fatalf("rules %v allow %+v, and refuse it before the address is known: %+v", list, r, v)
			}
			if v := s.Decide(Query{Proto: DNS, Name: r.Name}); !v.Allow {
				t.Fatalf("rules %v allow %+v, and not to look it up: %+v", list, r, v)
			}
		}
	})
}

// What is given as a hint is a rule, and with it, in front of the others, what was refused is allowed, or refused with the
// next hint.
func TestHintsAllow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list, r := anyRules(t), anyQuery(t)
		if r.HTTP != nil && rapid.Bool().Draw(t, "tls") {
			r.TLS = &TLS{ServerName: r.Name}
		}
		for range 3 {
			v := NewSet(list).Decide(r)
			if v.Allow || v.Hint == "" {
				return
			}
			rule, err := Parse(v.Hint, false)
			if err != nil {
				t.Fatalf("%+v: the hint is no rule: %v", v, err)
			}
			list = append([]Rule{rule}, list...)
		}
		if v := NewSet(list).Decide(r); !v.Allow {
			t.Fatalf("rules %v\nquery %+v http %+v\nis still refused: %+v", list, r, r.HTTP, v)
		}
	})
}

func FuzzDecide(f *testing.F) {
	f.Add("allow a.test\ndeny 10.0.0.0/8", "a.test", "10.0.0.1", uint16(443), "a.test", "GET", "/")
	f.Fuzz(func(t *testing.T, list, host, addr string, port uint16, sni, method, path string) {
		var rs []Rule
		for line := range strings.Lines(list) {
			var r Rule
			if r.UnmarshalText([]byte(strings.TrimSuffix(line, "\n"))) != nil {
				return
			}
			// A rule's text is a rule.
			if again, err := Parse(r.Text(), r.Deny()); err != nil || again.String() != r.String() {
				t.Fatalf("%q: %v", r, err)
			}
			rs = append(rs, r)
		}
		name, literal, err := Host(host)
		if err != nil {
			return
		}
		a, err := Address(addr)
		if literal.IsValid() {
			a, err = literal, nil
		}
		if err != nil {
			return
		}
		r := Query{Proto: TCP, Name: name, Addr: a, Port: port, TLS: &TLS{ServerName: sni}, HTTP: &HTTP{Host: name, Method: method, Path: path}}
		v := NewSet(rs).Decide(r)
		if v.Allow && (len(rs) == 0 || name != "" && sni != name) {
			t.Fatalf("%v allow %+v: %+v", rs, r, v)
		}
	})
}
