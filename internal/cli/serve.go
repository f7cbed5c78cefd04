package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/lmittmann/tint"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
	"casemate.dev/internal/server"
	"casemate.dev/internal/trace"
)

// serveFlags say how a server runs; serve and up share them.
type serveFlags struct {
	cfg        server.Config
	store      size
	state      size
	journal    size
	image      size
	aliases    []string
	verbose    bool
	proxyNames string
	traces     string
}

// The values of --proxy-names.
const (
	proxyNamesHere  = "gateway"
	proxyNamesThere = "proxy"
)

func (f *serveFlags) register(fl *pflag.FlagSet) {
	fl.StringVar(&f.cfg.DataDir, "data-dir", server.DefaultDataDir, "what must survive: database, layers, templates")
	fl.StringVar(&f.cfg.RunDir, "run-dir", server.DefaultRunDir, "what lives while the machine is up: sockets, log")
	fl.StringVar(&f.cfg.KeysDir, "keys-dir", server.DefaultKeysDir, "secrets that do not lie beside the data: the first API key")
	fl.StringArrayVar(&f.cfg.Listen, "listen", []string{server.DefaultListen}, "TCP address `HOST:PORT`; port 0 takes a free one, none listens on no address (repeatable)")
	fl.StringVar(&f.cfg.MetricsListen, "metrics-listen", "", "TCP address `HOST:PORT` with the server's figures for Prometheus at /metrics, which asks for no key (default none)")
	fl.StringVar(&f.traces, "traces", "", "`URL` of a collector that gets spans of the server's calls, as OTLP over HTTP (default OTEL_EXPORTER_OTLP_ENDPOINT, else none)")
	fl.StringVar(&f.cfg.UnixSocket, "socket", "", "Unix socket that asks for no key (default casemate.sock in the run directory)")
	fl.StringVar(&f.cfg.TLSCert, "tls-cert", "", "certificate `FILE` for the TCP addresses (default the server makes its own; see casemate ca)")
	fl.StringVar(&f.cfg.TLSKey, "tls-key", "", "key `FILE` of the certificate")
	fl.BoolVar(&f.cfg.TLSOnly, "tls-only", false, "no plain HTTP on the TCP addresses (with --tls-cert there is none)")
	fl.StringArrayVar(&f.cfg.AllowHosts, "allow-host", nil, "host `NAME` under which browsers may reach it, beside addresses and localhost (repeatable)")
	fl.StringVar(&f.cfg.Domain, "domain", "", "`NAME[:PORT]` below which PORT-SANDBOX.NAME leads to a port in a sandbox, none for no such names (default "+
		server.LocalDomain+" with the port of the first address that is local)")
	fl.StringArrayVar(&f.cfg.Nameservers, "dns", nil, "name server `ADDRESS[:PORT]` that looks up names for sandboxes (repeatable; default those of this host)")
	fl.StringVar(&f.cfg.NetworkSets, "net-sets", server.DefaultNetworkSets, "directory of named sets of network rules, NAME.rules")
	fl.StringVar(&f.cfg.ProxyURL, "proxy", "", "proxy that sandboxes' connections leave through: http://HOST:PORT, https:// where it speaks TLS itself, or socks5:// (default none)")
	fl.StringVar(&f.cfg.ProxyCredentials, "proxy-credentials", "", "`FILE` with USER:PASSWORD for the proxy")
	fl.StringVar(&f.cfg.ProxySecret, "proxy-secret", "", "the server's secret `NAME` that holds USER:PASSWORD for the proxy; its rotation needs no restart")
	fl.StringArrayVar(&f.cfg.NoProxy, "no-proxy", nil, "`TARGETS` that go past the proxy: HOST with what is below it, *.SUFFIX, ADDRESS or RANGE, with :PORT for that only (repeatable)")
	fl.StringVar(&f.proxyNames, "proxy-names", proxyNamesHere, "who looks names up: gateway, so that every address is judged, or proxy, where only it knows names")
	fl.StringArrayVar(&f.cfg.ExtraCAs, "extra-ca", nil, "`FILE` with authorities that servers may be signed by, beside those that this host trusts (repeatable)")
	fl.StringArrayVar(&f.cfg.InsecureRegistries, "insecure-registry", nil, "image registry `HOST[:PORT]` that needs no valid certificate and may speak plain HTTP (repeatable)")
	fl.StringVar(&f.cfg.DockerConfig, "docker-config", "", "`FILE` with credentials for image registries, as docker login writes it (its helpers are not run)")
	fl.Var(&f.image, "max-image-size", "what a layer of an image may unpack to, and its archives together (default 32g)")
	fl.Int64Var(&f.cfg.ImageLimits.Files, "max-image-files", 0, "files in a layer of an image (default 2000000)")
	fl.Int64Var(&f.cfg.ImageLimits.Ratio, "max-image-ratio", 0, "bytes that one byte of a layer may unpack to, beyond 256 MB (default 200)")
	fl.BoolVar(&f.cfg.E2BDebug, "e2b-debug", false, "serve E2B's debug mode: whoever is on this machine uses one sandbox, at localhost:49983 and 49999, without a key")
	fl.Var(&f.store, "store-size", "disk that all sandboxes share, set aside when the data directory is made (default a quarter of what is free, at most 32g)")
	fl.IntVar(&f.cfg.MaxSandboxes, "max-sandboxes", 0, "limit on sandboxes at once (default none)")
	fl.IntVar(&f.cfg.MaxPerKey, "max-per-key", 0, "limit on sandboxes at once of one key (default none)")
	fl.Var(&f.state, "state-per-key", "limit on what agents' documents of one key hold, old versions included (default 1g)")
	fl.DurationVar(&f.cfg.JournalAge, "journal-keep", 0, "how long the journal keeps content beside its events' hashes, as 168h; negative: for ever (default 720h)")
	fl.Var(&f.journal, "journal-size", "limit on that content; the oldest goes first (default 2g)")
	fl.StringArrayVar(&f.cfg.Anchors, "anchor", nil, "`FILE` that the journal's checkpoints are appended to, or URL that they are posted to (repeatable)")
	fl.DurationVar(&f.cfg.AnchorEvery, "anchor-every", 0, "how often, where there is a new one (default 10m)")
	fl.StringVar(&f.cfg.Defaults.Isolation, "isolation", "", "how sandboxes are kept apart that ask for none, `NAME`: namespace or gvisor; those of E2B's SDKs are such (default namespace)")
	fl.StringVar(&f.cfg.RunscPlatform, "runsc-platform", "", "how gVisor gets at system calls: systrap, `kvm`, or auto, which is kvm where everybody may open /dev/kvm and sandboxes start on it (default auto)")
	fl.StringVar(&f.cfg.Runsc, "runsc", "", "`PATH` of gVisor's runsc, for isolation gvisor (default the one beside this program, or in the PATH)")
	fl.StringArrayVar(&f.aliases, "image-alias", nil, "`IMAGE=NAME`: what stands for an image that a build begins with, a template or an image at a mirror (repeatable)")
	fl.BoolVarP(&f.verbose, "verbose", "v", false, "log more")
}

// config completes and checks the flags.
func (f *serveFlags) config(a *app) (server.Config, error) {
	cfg := f.cfg
	cfg.Version = a.version
	for _, a := range f.aliases {
		image, name, ok := strings.Cut(a, "=")
		if !ok || image == "" || name == "" {
			return cfg, usageError("--image-alias %s is not of the form IMAGE=NAME", clean(a))
		}
		if cfg.ImageAliases == nil {
			cfg.ImageAliases = make(map[string]string)
		}
		cfg.ImageAliases[image] = name
	}
	cfg.StoreBytes, cfg.StatePerKey, cfg.JournalBytes = int64(f.store), int64(f.state), int64(f.journal)
	cfg.ImageLimits.Bytes = int64(f.image)
	if cfg.ImageLimits.Files < 0 || cfg.ImageLimits.Ratio < 0 {
		return cfg, usageError("--max-image-files and --max-image-ratio are above 0")
	}
	if slices.Contains(cfg.Listen, "none") {
		cfg.Listen = []string{}
	}
	for i, ns := range cfg.Nameservers {
		a, err := nameserver(ns)
		if err != nil {
			return cfg, err
		}
		cfg.Nameservers[i] = a
	}
	switch f.proxyNames {
	case proxyNamesThere:
		cfg.ProxyNames = true
	case proxyNamesHere:
	default:
		return cfg, usageError("--proxy-names %s is neither gateway nor proxy", f.proxyNames)
	}
	var err error
	if cfg.Trace, err = trace.FromEnv(a.getenv, f.traces); err != nil {
		return cfg, err
	}
	if l := cfg.MetricsListen; l != "" {
		if _, _, err := net.SplitHostPort(l); err != nil {
			return cfg, usageError("--metrics-listen %s is no HOST:PORT", l)
		}
	}
	for _, l := range cfg.Listen {
		if _, _, err := net.SplitHostPort(l); err != nil {
			return cfg, usageError("--listen %s is no HOST:PORT", l)
		}
	}
	// Relative to where the person stands; the server stands elsewhere.
	paths := []*string{&cfg.DataDir, &cfg.RunDir, &cfg.KeysDir, &cfg.UnixSocket, &cfg.TLSCert, &cfg.TLSKey, &cfg.NetworkSets, &cfg.ProxyCredentials, &cfg.DockerConfig}
	for i := range cfg.ExtraCAs {
		paths = append(paths, &cfg.ExtraCAs[i])
	}
	for i, place := range cfg.Anchors {
		if !strings.Contains(place, "://") {
			paths = append(paths, &cfg.Anchors[i])
		}
	}
	for _, p := range paths {
		if *p == "" {
			continue
		}
		abs, err := filepath.Abs(*p)
		if err != nil {
			return cfg, err
		}
		*p = abs
	}
	if cfg.UnixSocket == "" {
		cfg.UnixSocket = filepath.Join(cfg.RunDir, "casemate.sock")
	}
	if len(cfg.UnixSocket) > maxSocketPath {
		return cfg, errs.New(errs.InvalidArgument, "the path of the socket is too long: %s", cfg.UnixSocket).
			WithHint("Unix sockets take %d bytes; choose a shorter --run-dir or --socket", maxSocketPath)
	}
	return cfg, nil
}

// nameserver completes ADDRESS[:PORT].
func nameserver(s string) (string, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.AddrPortFrom(a, 53).String(), nil
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		return "", usageError("--dns %s is no ADDRESS[:PORT]", s)
	}
	return a.String(), nil
}

// maxSocketPath is what a sockaddr_un holds, less the final zero (unix(7)).
const maxSocketPath = 107

func (a *app) serveCmd() *cobra.Command {
	var f serveFlags
	cmd := &cobra.Command{
		Use:   "serve [flags]",
		Short: "Run the server in the foreground",
		Long: `Run the server in the foreground, as systemd and containers want it; "casemate up" starts one in the
background. Needs root.

It listens on a Unix socket, where only root may connect and no key is asked for, and on TCP, where every
call needs an API key; the first one is written to admin.key in the keys directory. TCP addresses speak
HTTP and HTTPS, the latter by certificates of the server's own making; "casemate ca" tells how to trust
them. Several servers share a host where each has its own three directories.

SIGTERM ends it. Sandboxes go on meanwhile, and the next server on the same directories takes them up again.

Exit codes: 0 after SIGTERM or SIGINT, 125 when it could not start or failed.`,
		Example: "  casemate serve --data-dir /srv/casemate --listen 127.0.0.1:7433",
		Args:    exactly(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			// First of all: this starts the program again inside a mount namespace of its own.
			if err := server.Prepare(); err != nil {
				return cannot(err, "prepare a server")
			}
			cfg, err := f.config(a)
			if err != nil {
				return err
			}
			cfg.Log = a.logger(f.verbose)
			ctx, stop := interruptible(cmd.Context())
			defer stop()
			return a.serve(ctx, cfg)
		},
	}
	f.register(cmd.Flags())
	return cmd
}

// logger writes for people on a terminal, and key=value lines elsewhere.
func (a *app) logger(verbose bool) *slog.Logger {
	level := slog.LevelInfo
	if verbose {
		level = slog.LevelDebug
	}
	if a.color(a.stderr) {
		return slog.New(tint.NewTextHandler(a.stderr, &tint.Options{Level: level, TimeFormat: "15:04:05.000"}))
	}
	return slog.New(slog.NewTextHandler(a.stderr, &slog.HandlerOptions{Level: level}))
}

// serve runs a server until ctx ends.
func (a *app) serve(ctx context.Context, cfg server.Config) (err error) {
	s, err := server.New(ctx, cfg)
	if err != nil {
		return cannot(err, "start the server")
	}
	defer func() { err = errors.Join(err, cannot(s.Close(), "close the server")) }()
	st := statusOf(s, cfg)
	remove, err := st.write(cfg.RunDir)
	if err != nil {
		return cannot(err, "start the server")
	}
	defer remove()
	cfg.Log.Info("serving", slog.String("version", a.version), slog.String("id", s.ID()), slog.String("socket", s.UnixSocket()),
		slog.Any("urls", st.URLs), slog.String("first_key", s.KeyPath()))
	return cannot(s.Run(ctx), "serve")
}

// status is what a running server tells about itself in its run directory, for up and for people.
type status struct {
	PID     int      `json:"pid"`
	ID      string   `json:"id"`
	Version string   `json:"version"`
	Socket  string   `json:"socket"`
	URLs    []string `json:"urls"`
	Domain  string   `json:"domain,omitempty"`
	DataDir string   `json:"data_dir"`
	KeyFile string   `json:"key_file"`
}

// statusFile is its name in the run directory.
const statusFile = "server.json"

func statusOf(s *server.Server, cfg server.Config) status {
	st := status{
		PID: os.Getpid(), ID: s.ID(), Version: cfg.Version, Socket: "unix://" + s.UnixSocket(),
		DataDir: cfg.DataDir, KeyFile: s.KeyPath(), URLs: []string{}, Domain: s.Domain(),
	}
	scheme := "http"
	if cfg.TLSCert != "" || cfg.TLSOnly {
		scheme = "https"
	}
	for _, addr := range s.Addrs() {
		st.URLs = append(st.URLs, scheme+"://"+addr.String())
	}
	return st
}

// write puts the status into dir at once; remove takes it away.
func (st status) write(dir string) (remove func(), err error) {
	raw, err := json.MarshalIndent(st, "", "  ")
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	temp := statusFile + ".new"
	if err := root.WriteFile(temp, append(raw, '\n'), 0o600); err != nil {
		return nil, err
	}
	if err := root.Rename(temp, statusFile); err != nil {
		return nil, err
	}
	return func() { os.Remove(filepath.Join(dir, statusFile)) }, nil
}

func readStatus(dir string) (status, error) {
	var st status
	raw, err := os.ReadFile(filepath.Join(dir, statusFile))
	if err != nil {
		return st, err
	}
	if err := json.Unmarshal(raw, &st); err != nil {
		return st, fmt.Errorf("read %s: %w", statusFile, err)
	}
	return st, nil
}

// createKeyIn makes a key in a data directory, without a server or beside one that runs.
func (a *app) createKeyIn(ctx context.Context, dataDir string, req *client.CreateKeyRequest) error {
	abs, err := filepath.Abs(dataDir)
	if err != nil {
		return err
	}
	id, secret, err := server.CreateKey(ctx, abs, req.GetName(), req.GetAdmin(), req.GetE2B())
	if err != nil {
		return cannot(err, "create a key in %s", dataDir)
	}
	return a.printKey(&client.Key{Id: id, Name: req.GetName(), Admin: req.GetAdmin()}, secret)
}
