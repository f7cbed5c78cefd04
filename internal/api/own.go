package api

import (
	"log/slog"
	"net/http"

	"casemate.dev/internal/errs"
)

const levelError = slog.LevelError

func attr(key, value string) slog.Attr { return slog.String(key, value) }

// serveOwn serves the server's own paths. Health is for anyone; numbers need a key.
func (a *API) serveOwn(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		a.writeError(w, r, errs.New(errs.InvalidArgument, "%s takes GET only", r.URL.Path))
		return
	}
	switch r.URL.Path {
	case "/-/health":
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if a.draining.Err() != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = w.Write([]byte(`{"status":"draining"}` + "\n"))
			return
		}
		_, _ = w.Write([]byte(`{"status":"ok"}` + "\n"))
	case "/-/metrics":
		if err := mayMeasure(a.identify(w, r)); err != nil {
			a.writeError(w, r, err)
			return
		}
		a.ServeMetrics(w, r)
	default:
		a.writeError(w, r, errNoRoute(r))
	}
}

// serveReflection serves gRPC's reflection to whoever has a key.
func (a *API) serveReflection(w http.ResponseWriter, r *http.Request) {
	if err := callerOf(r.Context()).err; err != nil {
		a.writeError(w, r, err)
		return
	}
	a.reflect.ServeHTTP(w, r)
}
