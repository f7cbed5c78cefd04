package server

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	rtmetrics "runtime/metrics"
	"strconv"
	"strings"
	"syscall"
	"time"

	"casemate.dev/internal/metrics"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/trace"
)

// metricsPath is where the separate listener has the figures: where Prometheus looks unless it is told otherwise.
const metricsPath = "/metrics"

// scrapeTimeout bounds how long an answer takes there. Prometheus waits for 10 s unless it is told otherwise.
const scrapeTimeout = 30 * time.Second

// listenMetrics opens the listener that serves the server's figures, and nothing else, without a key.
func (s *Server) listenMetrics(ctx context.Context) error {
	if s.cfg.MetricsListen == "" {
		return nil
	}
	l, err := listenAt(ctx, s.cfg.MetricsListen, "--metrics-listen")
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+metricsPath, func(w http.ResponseWriter, r *http.Request) { s.api.ServeMetrics(w, r) })
	s.listeners = append(s.listeners, listener{Listener: l, metrics: true, http: &http.Server{
		Handler: mux, ReadHeaderTimeout: headerTimeout, ReadTimeout: headerTimeout, WriteTimeout: scrapeTimeout, IdleTimeout: idleTimeout,
		MaxHeaderBytes: maxHeader, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}})
	s.undo.Add(func() { _ = l.Close() })
	return nil
}

// openTracer returns what tells a collector of calls, where there is one.
func (s *Server) openTracer() *trace.Tracer {
	cfg := s.cfg.Trace
	cfg.Version, cfg.Instance, cfg.Log = s.cfg.Version, s.id, s.log
	s.tracer = trace.New(cfg)
	s.undo.Add(s.tracer.Close)
	return s.tracer
}

// MetricsAddr returns the address of the separate listener for figures; nil: there is none.
func (s *Server) MetricsAddr() net.Addr {
	for _, l := range s.listeners {
		if l.metrics {
			return l.Addr()
		}
	}
	return nil
}

// writeMetrics writes what the parts of the server count.
func (s *Server) writeMetrics(p *metrics.Page) {
	p.Gauge("casemate_build_info", "What runs: always 1.", metrics.Of(1, "version", s.cfg.Version, "go_version", runtime.Version()))
	s.sandboxMetrics(p)
	s.storeMetrics(p)
	s.gatewayMetrics(p)
	if s.tracer != nil {
		sent, lost := s.tracer.Counts()
		p.Counter("casemate_trace_spans_total", "Spans that the collector took, and those that were lost.",
			metrics.Of(float64(sent), "outcome", "sent"), metrics.Of(float64(lost), "outcome", "lost"))
	}
	p.Gauge("process_start_time_seconds", "When the server started, in seconds since 1970.", metrics.Of(float64(s.began.UnixMilli())/1000))
	processMetrics(p)
}

func (s *Server) sandboxMetrics(p *metrics.Page) {
	st := s.manager.Stats()
	var states []metrics.Sample
	for state, n := range st.States {
		states = append(states, metrics.Of(float64(n), "state", string(state)))
	}
	p.Gauge("casemate_sandboxes", "Sandboxes that have not stopped, by state.", states...)
	var starts []metrics.Series
	for name, took := range st.Starts {
		starts = append(starts, metrics.OfDurations(took, "isolation", name))
	}
	p.Histogram("casemate_sandbox_start_duration_seconds", "How long creates took that came to run, by isolation.", starts...)
	p.Counter("casemate_sandboxes_ended_total", "Sandboxes that stopped, by reason.",
		st.Ended.Samples(func(r sandbox.EndReason) []string { return []string{"reason", string(r)} })...)
	p.Gauge("casemate_processes", "Processes that run, as started through the API.", metrics.Of(float64(st.Processes)))
	p.Counter("casemate_processes_ended_total", "Processes that ended, by how.",
		st.ProcessesEnded.Samples(func(e sandbox.End) []string { return []string{"end", string(e)} })...)
	p.Gauge("casemate_contexts", "Interpreters that keep variables between runs.", metrics.Of(float64(st.Contexts)))
	var ready, wanted []metrics.Sample
	for name, b := range s.backends {
		if pool, ok := b.(interface{ Spares() (ready, wanted int) }); ok {
			is, want := pool.Spares()
			ready = append(ready, metrics.Of(float64(is), "isolation", name))
			wanted = append(wanted, metrics.Of(float64(want), "isolation", name))
		}
	}
	p.Gauge("casemate_spares", "Guests that wait for a sandbox to start in them.", ready...)
	p.Gauge("casemate_spares_wanted", "How many are to wait.", wanted...)
	p.Counter("casemate_network_events_total", "Events of the gateway that were recorded, by type and code of the verdict.",
		st.Network.Samples(func(k [2]string) []string { return []string{"event", k[0], "code", k[1]} })...)
}

func (s *Server) storeMetrics(p *metrics.Page) {
	j := s.events.Stats()
	p.Counter("casemate_journal_events_total", "Events recorded since the server started.", metrics.Of(float64(j.Events)))
	p.Counter("casemate_journal_gaps_total", "Events among them that say that others are missing.", metrics.Of(float64(j.Gaps)))
	p.Gauge("casemate_journal_pending_events", "Events that would not survive the server's death yet.", metrics.Of(float64(j.Pending)))
	p.Gauge("casemate_journal_refused_events", "Events that the disk has refused so far.", metrics.Of(float64(j.Backlog+j.Dropped)))
	p.Gauge("casemate_journal_entries", "Entries of the signed log.", metrics.Of(float64(j.Entries)))
	var files []metrics.Sample
	for _, name := range []string{"casemate.db", "casemate.db-wal"} {
		if info, err := os.Stat(filepath.Join(s.cfg.DataDir, name)); err == nil {
			files = append(files, metrics.Of(float64(info.Size()), "file", name))
		}
	}
	p.Gauge("casemate_database_size_bytes", "Size of the database's files.", files...)
	roots, ok := s.roots.(interface {
		Space() (total, free int64, err error)
	})
	if !ok {
		return
	}
	if total, free, err := roots.Space(); err == nil {
		p.Gauge("casemate_store_size_bytes", "Size of the file system that holds layers.", metrics.Of(float64(total)))
		p.Gauge("casemate_store_free_bytes", "How much of it is free.", metrics.Of(float64(free)))
	}
}

// gatewayMetrics writes what the gateway process says of itself, while it runs.
func (s *Server) gatewayMetrics(p *metrics.Page) {
	g, ok := s.manager.NetworkStats()
	if !ok {
		return
	}
	p.Gauge("casemate_gateway_sandboxes", "Sandboxes with a network.", metrics.Of(float64(g.Sandboxes)))
	p.Gauge("casemate_gateway_connections_open", "Connections of sandboxes that are open.", metrics.Of(float64(g.Open)))
	p.Counter("casemate_gateway_connections_total", "Connections that the gateway process was asked for.", metrics.Of(float64(g.Connections)))
	p.Counter("casemate_gateway_refused_total", "What it refused.", metrics.Of(float64(g.Refused)))
	p.Counter("casemate_gateway_sent_bytes_total", "Bytes out of sandboxes.", metrics.Of(float64(g.Sent)))
	p.Counter("casemate_gateway_received_bytes_total", "Bytes into sandboxes.", metrics.Of(float64(g.Received)))
	p.Gauge("casemate_gateway_heap_bytes", "Memory that the gateway process uses.", metrics.Of(float64(g.HeapBytes)))
}

// processMetrics writes what the kernel and Go's runtime say of the server's process, under the names that Prometheus's
// clients use.
func processMetrics(p *metrics.Page) {
	var ru syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &ru) == nil {
		seconds := float64(ru.Utime.Nano()+ru.Stime.Nano()) / 1e9
		p.Counter("process_cpu_seconds_total", "Processor time of the server, without its sandboxes.", metrics.Of(seconds))
	}
	if b, err := os.ReadFile("/proc/self/statm"); err == nil { // proc_pid_statm(5)
		if fields := strings.Fields(string(b)); len(fields) > 1 {
			if pages, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
				p.Gauge("process_resident_memory_bytes", "Memory of the server that is resident.", metrics.Of(float64(pages*int64(os.Getpagesize()))))
			}
		}
	}
	if names, err := os.ReadDir("/proc/self/fd"); err == nil {
		p.Gauge("process_open_fds", "Open files of the server.", metrics.Of(float64(len(names))))
	}
	p.Gauge("go_goroutines", "Goroutines of the server.", metrics.Of(float64(runtime.NumGoroutine())))
	heap := []rtmetrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	rtmetrics.Read(heap)
	if heap[0].Value.Kind() == rtmetrics.KindUint64 {
		p.Gauge("go_memstats_heap_alloc_bytes", "Memory of objects on the server's heap.", metrics.Of(float64(heap[0].Value.Uint64())))
	}
}
