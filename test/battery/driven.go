package main

import (
	"casemate.dev/internal/selftest"
)

// driven is an attack of sections A to E that takes a hand on the host, on the API or in an image: tests and scripts, no
// selftest.Case.
type driven struct {
	id    string
	class selftest.Class
	title string
	// tests are where it is tried, as "path/of/file_test.go TestName" from the module's root, with the subtest where it is
	// one of several, or a script's path.
	tests []string
	// gvisor are where it is tried on gVisor too. Empty: same says why what was tried serves for it.
	gvisor []string
	same   string
	// not says why there is nothing to try.
	not string
}

// before is why one test serves for every backend.
const before = "what is attacked stands before any backend"

// drivenCases are the cases that are not in selftest.Cases, in their order.
func drivenCases() []driven {
	return append(drivenFiles(), drivenAPI()...)
}

func drivenFiles() []driven {
	const namespace, sentry = "internal/isolation/namespace/attack_test.go ", "internal/isolation/gvisor/attack_test.go "
	return []driven{
		{
			id: "A04", class: selftest.Escape, title: "ids of the host",
			tests: []string{namespace + "TestNoProcessHasAHostID"}, gvisor: []string{"internal/isolation/gvisor/posture_test.go TestHostProcesses"},
		},
		{
			id: "B18", class: selftest.InternalEsc, title: "commands that rules forbid, by the loader or a memory file",
			not: "no rule about commands is a wall here: whoever can run one program can run every program, as this page says",
		},
		{
			id: "B25", class: selftest.Escape, title: "an image with links in the place of devices (CVE-2025-31133)",
			tests: []string{"internal/isolation/namespace/devices_test.go TestLinksInThePlaceOfDevices"}, gvisor: []string{sentry + "TestLinkedDevInAnImage/devices"},
		},
		{
			id: "B26", class: selftest.Escape, title: "a terminal in an image that has links for it (CVE-2025-52565)",
			tests: []string{"internal/isolation/namespace/devices_test.go TestLinksInThePlaceOfDevices"}, gvisor: []string{sentry + "TestLinkedDevInAnImage/devices"},
		},
		{
			id: "B27", class: selftest.Escape, title: "two sandboxes race over a mount that they share (CVE-2025-52881)",
			not: "no two sandboxes share a mount that one of them may write",
		},
		{
			id: "B28", class: selftest.Escape, title: "an image whose /dev, /proc or /sys is a link (CVE-2026-41579)",
			tests: []string{namespace + "TestLinkedMountTargetsAreRefused"}, gvisor: []string{sentry + "TestLinkedDevInAnImage"},
		},
		{
			id: "B29", class: selftest.Escape, title: "links planted at mount targets, then started or restored again (CVE-2026-119101)",
			tests: []string{namespace + "TestLinkedMountTargetsAreRefused"}, gvisor: []string{"internal/isolation/gvisor/image_test.go TestLinksPlantedUnderAnImage"},
		},
		{
			id: "B31", class: selftest.Escape, title: "layers with names that climb, devices, links, whiteouts",
			tests: []string{"internal/oci/layer/attack_test.go TestAttacksStayInside", "test/script/testdata/real/attack-image.txtar"}, same: before,
		},
	}
}

func drivenAPI() []driven {
	all := []string{"test/driven/driven_test.go TestDriven"}
	return []driven{
		{id: "E01", class: selftest.Escape, title: "file names that climb", tests: all, gvisor: all},
		{id: "E02", class: selftest.Escape, title: "file names through links", tests: all, gvisor: all},
		{id: "E03", class: selftest.Escape, title: "a directory that becomes a link meanwhile", tests: all, gvisor: all},
		{
			id: "E05", class: selftest.Escape, title: "archives with names that climb, links, devices, too much",
			tests: []string{"internal/guest/unpack_test.go TestUnpackHostileTrees", "internal/e2b/signed_attack_test.go TestAttackUploads", "test/script/testdata/real/attack-cp.txtar"},
			same:  "the guest's worker is the same program on both",
		},
		{id: "E06", class: selftest.HostDoS, title: "zip archives", not: "no interface takes one"},
		{id: "E07", class: selftest.Integrity, title: "uploads that are cut off", tests: all, gvisor: all},
		{
			id: "E10", class: selftest.Lateral, title: "another key's sandboxes",
			tests: []string{"test/script/testdata/any/attack-other-key.txtar"}, same: before,
		},
		{
			id: "E11", class: selftest.Lateral, title: "web pages that rebind a name",
			tests: []string{"internal/origin/origin_test.go TestListStopsRebinding", "test/script/testdata/any/attack-rebind.txtar", "internal/mcp/session_test.go TestHTTPGuard"}, same: before,
		},
		{
			id: "E12", class: selftest.Integrity, title: "one idempotency key, many creates",
			tests: []string{"internal/sandbox/idempotency_test.go TestOneKeyMakesOneSandbox", "internal/sandbox/idempotency_test.go TestCallerThatDiesAndAsksAgain"}, same: before,
		},
		{
			id: "E13", class: selftest.Integrity, title: "many claims of few spares",
			tests: []string{"internal/isolation/namespace/spares_test.go TestSparesInABurst"}, same: "its cells are such spares",
		},
		{
			id: "E14", class: selftest.Integrity, title: "a renewal in the moment of expiry",
			tests: []string{"internal/sandbox/timers_test.go TestRenewalAgainstExpiry"}, same: before,
		},
		{
			id: "E15", class: selftest.Integrity, title: "a server that is killed",
			tests:  []string{"internal/sandbox/recover_test.go TestRecoverAdoptsWhatRuns", "test/script/testdata/real/crash.txtar"},
			gvisor: []string{"internal/isolation/gvisor/conformance_test.go TestGvisorConformance"},
		},
		{
			id: "E17", class: selftest.Escape, title: "git's settings in a workspace",
			tests: []string{"test/script/testdata/real/attack-apply-git.txtar", "internal/rootfs/compare_test.go TestHostileTreesAreKept"}, same: before,
		},
		{
			id: "E18", class: selftest.HostLeak, title: "images and builds that name the host's own services",
			tests: []string{"internal/oci/fault_test.go TestRedirects", "internal/oci/fault_test.go TestHostileRegistry", "internal/oci/registry/client_test.go TestTrusts"}, same: before,
		},
		{
			id: "E19", class: selftest.Integrity, title: "output that steers terminals",
			tests: []string{"internal/cli/text_test.go TestCleanEscapesWhatSteersATerminal", "test/script/testdata/any/attack-terminal.txtar"}, same: before,
		},
		{
			id: "E20", class: selftest.Lateral, title: "ports by others' names and keys",
			tests: []string{"internal/portproxy/credentials_test.go TestStripCredentials", "internal/server/tls_test.go TestPortsByNameOverTLS", "internal/server/tls_test.go TestHostsThatAreNoNames", "internal/e2b/data_test.go TestTrafficToken"}, same: before,
		},
		{id: "E21", class: selftest.InternalEsc, title: "programs planted for the server's helpers", tests: all, gvisor: all},
		{
			id: "E24", class: selftest.Integrity, title: "a stream that is cut while a process runs",
			tests: []string{"internal/api/twins_test.go TestOutputResumesAsServerSentEvents", "client/client_test.go TestRunResumesAtTheByteReached"}, same: before,
		},
	}
}
