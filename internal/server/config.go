package server

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"casemate.dev/internal/isolation"
	"casemate.dev/internal/linux/mount"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/trace"
)

// The places that a packaged server uses, and the defaults of Config.
const (
	DefaultDataDir = "/var/lib/casemate"
	DefaultRunDir  = "/run/casemate"
	DefaultKeysDir = "/etc/casemate"
	DefaultListen  = "127.0.0.1:7433"
	// DefaultNetworkSets is where administrators put sets of network rules.
	DefaultNetworkSets = "/etc/casemate/net"
	// LocalDomain and all below it lead to the machine itself wherever they are asked for (RFC 6761). It has
	// two labels since clients take no wildcard right below a top-level name.
	LocalDomain = "casemate.localhost"
	// NoDomain says that sandboxes' ports have no host names.
	NoDomain = "none"
)

// socketFile is the name of the Unix socket in the run directory.
const socketFile = "casemate.sock"

// Config says how a server runs. Zero fields get the defaults named.
type Config struct {
	DataDir string // DefaultDataDir
	RunDir  string // DefaultRunDir
	KeysDir string // DefaultKeysDir
	// Listen holds TCP addresses; nil: DefaultListen; empty: none. Port 0 takes a free one.
	Listen []string
	// UnixSocket is the path of the socket that needs no key; "": casemate.sock in RunDir.
	UnixSocket string
	// MetricsListen is a TCP address that serves the server's figures to whoever reaches it; "": only admin keys and the
	// Unix socket get them.
	MetricsListen string
	// Trace says where spans of the server's calls go; zero: nowhere.
	Trace trace.Config
	// TLSCert and TLSKey are files in PEM; both or none. With them TCP addresses speak TLS only; without,
	// the server's own authority makes certificates, and they speak plain HTTP too.
	TLSCert, TLSKey string
	// TLSOnly refuses plain HTTP on TCP addresses.
	TLSOnly bool
	// AllowHosts are host names, beside addresses and localhost, under which the server answers.
	AllowHosts []string
	// Domain is the name below which PORT-SANDBOX.DOMAIN leads here, perhaps with a port; "": LocalDomain
	// with the port of the first address that this machine itself reaches; NoDomain: none.
	Domain string
	// ExtraCAs are files with authorities, in PEM, that servers may be signed by beside those that the host
	// trusts: companies with a proxy that looks into TLS have one.
	ExtraCAs []string
	// InsecureRegistries are hosts of image registries, HOST or HOST:PORT, whose certificates are not verified, and
	// that may speak plain HTTP. DockerConfig is a file of registries' credentials as docker login writes it; "": none.
	InsecureRegistries []string
	DockerConfig       string
	// ImageLimits bound what an image may unpack to.
	ImageLimits ImageLimits
	// E2BDebug serves the debug mode of E2B's SDKs: one sandbox on fixed ports of localhost, without a key.
	E2BDebug bool
	// MaxSandboxes bounds the sandboxes that exist at once, MaxPerKey those of one key; 0: no bound.
	MaxSandboxes, MaxPerKey int
	// ImageAliases name what stands for an image that a build begins with: a template, a commit, a tag or
	// another image, as at a mirror.
	ImageAliases map[string]string
	// StatePerKey bounds the bytes that one key's documents hold, old versions included; 0: 1 GiB.
	StatePerKey int64
	// JournalAge and JournalBytes bound the content that the journal keeps beside its events' hashes, by age and all
	// together; 0: 30 days, 2 GiB; negative: no bound.
	JournalAge   time.Duration
	JournalBytes int64
	// Anchors are files and URLs that get the journal's checkpoints, every AnchorEvery (0: 10 minutes).
	Anchors     []string
	AnchorEvery time.Duration
	// StoreBytes is the size of the store for writable layers where it is an image of our own; 0: the
	// store's default. An image that exists keeps its size.
	StoreBytes int64
	// Defaults fill what a create leaves open.
	Defaults sandbox.Defaults
	// Spares is how many guests are started ahead of time; 0: the backend's default; negative: none.
	Spares int
	// RunscPlatform is gvisor.Auto, Systrap or KVM; "" is Auto.
	RunscPlatform string
	// Runsc is the path of gVisor's program; "": runsc beside this program, or in the PATH.
	Runsc string
	// Nameservers (address:port) look up the names that sandboxes ask for; none: the host's own.
	Nameservers []string
	// NetworkSets is the directory of named sets of network rules; DefaultNetworkSets.
	NetworkSets string
	// ProxyURL is the proxy through which sandboxes' connections leave, http://HOST:PORT, https://HOST:PORT or
	// socks5://HOST:PORT; "": none. Its credentials are USER:PASSWORD in the file ProxyCredentials, or the value of the server's secret
	// ProxySecret. NoProxy are targets that go past it. ProxyNames lets it look names up.
	ProxyURL, ProxyCredentials, ProxySecret string
	NoProxy                                 []string
	ProxyNames                              bool
	// GatewayProgram becomes the gateway process; this very program.
	GatewayProgram string
	// KeeperProgram becomes the keeper process, which observes system calls; this very program.
	KeeperProgram string
	// StopSandboxes ends the sandboxes with the server; else they go on, and the next server on the
	// same data directory takes them up again.
	StopSandboxes bool
	// DrainTimeout is how long calls under way may take when the server goes down; 10 s.
	DrainTimeout time.Duration
	// Log takes what the server has to say; nil: nowhere.
	Log *slog.Logger
	// Version is what GetVersion tells.
	Version string

	// Backends and Roots replace the real ones, for tests of what lies above them. Both or none.
	Backends map[string]isolation.Backend
	Roots    sandbox.Roots
}

// fill sets the defaults.
func (c *Config) fill() {
	set := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	set(&c.DataDir, DefaultDataDir)
	set(&c.RunDir, DefaultRunDir)
	set(&c.KeysDir, DefaultKeysDir)
	set(&c.UnixSocket, filepath.Join(c.RunDir, socketFile))
	set(&c.Version, "dev")
	set(&c.NetworkSets, DefaultNetworkSets)
	set(&c.GatewayProgram, "/proc/self/exe")
	set(&c.KeeperProgram, "/proc/self/exe")
	if c.Listen == nil {
		c.Listen = []string{DefaultListen}
	}
	if c.JournalAge == 0 {
		c.JournalAge = 30 * 24 * time.Hour
	}
	if c.JournalBytes == 0 {
		c.JournalBytes = 2 << 30
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 10 * time.Second
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
}

// Prepare moves the process into a mount namespace of its own, so that a sandbox's files are mounted
// where no other program of the host sees them. It starts the program again in its own place, once;
// so it is called first thing in `serve`, before anything is opened.
//
// The umask of whoever starts it is set aside: layers are built for sandboxes, whose users are others
// to the host. What must stay private is made with a private mode.
func Prepare() error {
	syscall.Umask(0o022)
	return mount.EnterPrivate()
}

// kernel returns the host's kernel release.
func kernel() string {
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(b))
}
