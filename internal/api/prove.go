package api

import (
	"encoding/base64"
	"errors"
	"net/http"

	"connectrpc.com/connect"
)

// headerCheckpoint carries the journal's checkpoint, in base64, with every answer, and as a trailer with the
// end of a stream. It covers every event that was recorded before: whoever keeps it can show later whether
// the record was changed.
const headerCheckpoint = "Casemate-Checkpoint"

// prove sets the checkpoint as it is now. Where none can be made, for a disk that fails, there is none: the
// answer is true all the same.
func (a *API) prove(h http.Header) {
	if a.cfg.Proofs == nil {
		return
	}
	text, err := a.cfg.Proofs.Checkpoint()
	if err != nil {
		a.log.Warn("cannot sign the journal's checkpoint", "error", err)
		return
	}
	h.Set(headerCheckpoint, base64.StdEncoding.EncodeToString(text))
}

// proveError is prove for an error.
func (a *API) proveError(err error) error {
	var e *connect.Error
	if errors.As(err, &e) {
		a.prove(e.Meta())
	}
	return err
}

// provingWriter sets the checkpoint when an answer begins.
type provingWriter struct {
	http.ResponseWriter
	api   *API
	begun bool
}

// WriteHeader implements http.ResponseWriter.
func (w *provingWriter) WriteHeader(status int) {
	if status >= http.StatusOK && !w.begun {
		w.begun = true
		w.api.prove(w.Header())
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *provingWriter) Write(p []byte) (int, error) {
	if !w.begun {
		w.WriteHeader(http.StatusOK)
	}
	return w.ResponseWriter.Write(p)
}

// end sends the checkpoint once more behind a stream, as a trailer. (An answer whose length is known has none.)
func (w *provingWriter) end() {
	if !w.begun {
		return
	}
	h := make(http.Header)
	w.api.prove(h)
	if text := h.Get(headerCheckpoint); text != "" {
		w.Header().Set(http.TrailerPrefix+headerCheckpoint, text)
	}
}

// Unwrap is for http.ResponseController.
func (w *provingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
