package fake_test

import (
	"strconv"
	"testing"

	"casemate.dev/internal/id"
	"casemate.dev/internal/isolation"
	"casemate.dev/internal/isolation/conformance"
	"casemate.dev/internal/isolation/fake"
)

func TestConformance(t *testing.T) {
	conformance.Run(t, func(t *testing.T) conformance.Harness {
		host := fake.NewHost()
		t.Cleanup(host.Close)
		return conformance.Harness{
			Backend: fake.New(fake.Config{Host: host}),
			Reopen:  func(*testing.T) isolation.Backend { return fake.New(fake.Config{Host: host}) },
			Spec: func(_ *testing.T, p isolation.Profile) isolation.Spec {
				return isolation.Spec{ID: id.Sandbox(), Profile: p, Limits: isolation.Limits{
					MemoryBytes: 1 << 30, CPUs: 1, Pids: 512, OpenFiles: 1024, DiskBytes: 64 << 20,
				}}
			},
			Kill:      func(_ *testing.T, i isolation.Instance) { host.Kill(i.ID()) },
			Leftovers: func(*testing.T) []string { return append(host.Instances(), host.Leftovers()...) },
			Lacking: func(*testing.T, isolation.Profile) (isolation.Backend, string) {
				return fake.New(fake.Config{Host: host, Capabilities: []isolation.Capability{
					{Name: "walls", Required: true, Detail: "they are down", Remedy: "build them"},
				}}), "walls"
			},
			EchoServer: func(port int) []string { return []string{"echo-server", strconv.Itoa(port)} },
			Allocate:   func(n int64) []string { return []string{"alloc", strconv.FormatInt(n, 10)} },
			Lacks: map[conformance.Feature]string{
				conformance.Kernel:    "processes are goroutines",
				conformance.Proc:      "there is no /proc",
				conformance.OpenFiles: "files in memory have no descriptors",
				conformance.CPUTime:   "goroutines share the test's time",
			},
		}
	})
}
