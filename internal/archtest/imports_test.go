package archtest

import (
	"slices"
	"strings"
	"testing"
)

// layers is the import law's list: a package may import what stands below it, never what stands
// above. Packages on one line are equals and do not import each other. "x/" names everything below
// x, and the longest match decides.
var layers = [...][]string{
	{"cmd/casemate/"},
	{"test/", "examples/"},
	{"internal/cli/"},
	{"internal/server/"},
	{"internal/api/", "internal/e2b/", "internal/mcp/"},
	{"internal/portproxy/", "internal/tlscert/", "internal/beat/", "internal/origin/", "internal/httpfile/"},
	{"bench/", "internal/selftest/"},
	{"client/"},
	{"proto/"},
	{"internal/policy/", "internal/usage/"},
	{"internal/job/"},
	{"internal/agent/"},
	{"internal/template/"},
	{"internal/oci/"},
	{"internal/state/"},
	{"internal/sandbox/"},
	{"internal/isolation/conformance/"},
	{"internal/isolation/namespace/", "internal/isolation/gvisor/", "internal/isolation/wasm/", "internal/isolation/fake/"},
	{"internal/isolation/keeper/"},
	{"internal/isolation/"},
	{"internal/guestbin/"},
	{"cmd/casemate-guest/"},
	{"internal/guest/"},
	{"internal/guestwire/"},
	{"internal/rootfs/"},
	{"internal/codecontext/drivers/"},
	{"internal/egress/"},
	{"internal/secret/"},
	{"internal/journal/"},
	{"internal/journal/trajectory/"},
	{"internal/replay/"},
	{"internal/journal/anchor/"},
	{"internal/journal/content/"},
	{"internal/journal/bundle/"},
	{"internal/journal/check/", "internal/journal/meter/"},
	{"internal/journal/tree/"},
	{"internal/store/"},
	{"internal/testenv/"},
	{"internal/fakenet/"},
	{"internal/linux/"},
	{"internal/observe/"},
	{"internal/trace/"},
	{"internal/otlp/"},
	{"internal/errs/", "internal/durable/", "internal/cleanup/", "internal/clock/", "internal/id/", "internal/metrics/", "docs/"},
}

// layer returns the place of a package in the list and the entry that it falls under.
func layer(pkg string) (int, string) {
	at, best := -1, ""
	for i, names := range layers {
		for _, n := range names {
			if strings.HasPrefix(pkg+"/", n) && len(n) > len(best) {
				at, best = i, n
			}
		}
	}
	return at, best
}

// law is a rule about one part of the repository beside the list.
type law struct {
	from   []string // prefixes of packages that it binds; "" is all
	except []string
	deny   []string // prefixes of imports
	allow  []string // where set, the only imports of ours that are allowed
	why    string
}

var laws = [...]law{
	{
		from:  []string{"internal/errs/", "internal/durable/", "internal/cleanup/", "internal/clock/", "internal/id/", "internal/metrics/"},
		allow: []string{},
		why:   "leaves are imported by everyone, so they import nothing of ours",
	},
	{
		from:  []string{"internal/linux/"},
		allow: []string{"internal/linux/", "internal/errs/", "internal/cleanup/"},
		why:   "packages of linux hold one kernel topic each and know no policy",
	},
	{
		from:   []string{"internal/isolation/"},
		except: []string{"internal/isolation/conformance/"},
		allow: []string{
			"internal/isolation/", "internal/guestwire/", "internal/guestbin/", "internal/linux/", "internal/rootfs/",
			"internal/errs/", "internal/cleanup/", "internal/clock/", "internal/durable/", "internal/id/",
		},
		why: "backends do not know the domain",
	},
	{
		from:  []string{"internal/guest/", "cmd/casemate-guest/"},
		allow: []string{"internal/guest/", "internal/guestwire/", "internal/linux/", "internal/errs/", "internal/cleanup/"},
		why:   "the guest is small and trusted by nobody",
	},
	{
		from:  []string{"internal/guestwire/"},
		allow: []string{"internal/errs/"},
		why:   "the guest links its protocol, and starts as fast as it is small",
	},
	{
		from:  []string{"internal/journal/"},
		allow: []string{"internal/journal/", "internal/store/", "internal/otlp/", "internal/errs/", "internal/clock/", "internal/id/", "internal/cleanup/", "internal/durable/"},
		why:   "the record knows neither the domain nor a backend",
	},
	{
		from:  []string{"internal/store/"},
		allow: []string{"internal/errs/", "internal/clock/", "internal/id/", "internal/cleanup/", "internal/durable/"},
		why:   "the store keeps what it is given",
	},
	{
		from: []string{"internal/sandbox/"},
		deny: []string{
			"net/http", "connectrpc.com/", "google.golang.org/protobuf/", module + "proto/", module + "client/",
			module + "internal/isolation/", module + "internal/linux/", module + "internal/guest/",
		},
		why: "the domain knows no wire protocol, and reaches the kernel only through isolation.Backend",
	},
	{
		from: []string{"internal/api/", "internal/e2b/", "internal/mcp/", "internal/cli/"},
		deny: []string{module + "internal/isolation/", module + "internal/store/", module + "internal/linux/", "database/sql"},
		why:  "edges translate, nothing else",
	},
	{
		from:  []string{"internal/cli/"},
		allow: []string{"client/", "proto/", "bench/", "internal/selftest/", "internal/fakenet/", "internal/server/", "internal/mcp/", "internal/journal/anchor/", "internal/journal/bundle/", "internal/journal/check/", "internal/journal/meter/", "internal/journal/trajectory/", "internal/otlp/", "internal/replay/", "internal/trace/", "internal/errs/", "internal/id/"},
		why:   "the command line talks to the client, as any program does, and to the server only to run it",
	},
	{
		from:  []string{"client/"},
		allow: []string{"proto/"},
		why:   "the client is public and stands alone",
	},
	{
		from: []string{""},
		except: []string{
			"internal/linux/", "internal/isolation/", "internal/guest/", "internal/egress/", "cmd/casemate-guest/", "internal/testenv/",
		},
		deny: []string{"golang.org/x/sys/unix"},
		why:  "there is one door to the kernel: linux, the backends and the guest",
	},
}

// testsOnly are packages that no program may link.
var testsOnly = [...]string{
	module + "internal/testenv/", module + "internal/archtest/", module + "internal/isolation/fake/",
	module + "internal/isolation/conformance/", module + "test/stage/", "testing/",
}

func matches(p string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(p+"/", prefix) })
}

// TestImportsPointDown checks the list. A test file may import what is above it only as an external
// test, and the test-only packages may be imported by every test.
func TestImportsPointDown(t *testing.T) {
	for _, f := range source(t) {
		from, entry := layer(f.dir)
		if from < 0 {
			if !testOnlyPackage(f.dir) {
				t.Errorf("%s: package %s has no place in the import law; add it to the list in archtest and to docs/architecture.md", f.path, f.dir)
			}
			continue
		}
		for _, imported := range f.imports() {
			own, ok := strings.CutPrefix(imported, module)
			if !ok || f.test && (testOnlyPackage(own) || strings.HasSuffix(f.ast.Name.Name, "_test")) {
				continue
			}
			to, toEntry := layer(own)
			if to < from || to == from && toEntry != entry {
				t.Errorf("%s imports %s: imports point down the list of docs/architecture.md, so that each layer can be understood without those above", f.path, own)
			}
		}
	}
}

func testOnlyPackage(pkg string) bool { return matches(module+pkg, testsOnly[:]) }

func TestImportLaws(t *testing.T) {
	for _, f := range source(t) {
		if f.test {
			continue
		}
		for _, imported := range f.imports() {
			for _, l := range laws {
				if broken := l.breach(f.dir, imported); broken {
					t.Errorf("%s imports %s: %s", f.path, imported, l.why)
				}
			}
			if matches(imported, testsOnly[:]) && !testOnlyPackage(f.dir) {
				t.Errorf("%s imports %s: programs link no test code", f.path, imported)
			}
		}
	}
}

func (l law) breach(pkg, imported string) bool {
	if !matches(pkg, l.from) || matches(pkg, l.except) {
		return false
	}
	if matches(imported, l.deny) && !(strings.HasPrefix(imported+"/", module+"internal/isolation/") && imported == module+"internal/isolation") {
		return true
	}
	own, ours := strings.CutPrefix(imported, module)
	return ours && l.allow != nil && !matches(own, l.allow)
}

// TestLawsCatch shows that the rules can fail: each row is a breach or, with ok, none.
func TestLawsCatch(t *testing.T) {
	for _, tt := range []struct {
		pkg, imported string
		ok            bool
	}{
		{"internal/errs", module + "internal/id", false},
		{"internal/linux/mount", module + "internal/rootfs", false},
		{"internal/linux/mount", module + "internal/errs", true},
		{"internal/isolation/namespace", module + "internal/sandbox", false},
		{"internal/isolation/namespace", module + "internal/linux/mount", true},
		{"internal/guest", module + "internal/isolation", false},
		{"internal/sandbox", "net/http", false},
		{"internal/sandbox", module + "internal/isolation", true},
		{"internal/sandbox", module + "internal/isolation/namespace", false},
		{"internal/api", module + "internal/store", false},
		{"internal/cli", module + "internal/sandbox", false},
		{"client", module + "internal/errs", false},
		{"internal/server", "golang.org/x/sys/unix", false},
		{"internal/guest/spawn", "golang.org/x/sys/unix", true},
	} {
		caught := slices.ContainsFunc(laws[:], func(l law) bool { return l.breach(tt.pkg, tt.imported) })
		if caught == tt.ok {
			t.Errorf("%s importing %s: caught %v, want %v", tt.pkg, tt.imported, caught, !tt.ok)
		}
	}
	up, _ := layer("internal/cli")
	down, _ := layer("internal/errs")
	if up >= down {
		t.Errorf("the list puts cli at %d and errs at %d", up, down)
	}
}
