package api

import (
	"context"
	"encoding/base64"
	"io"
	"net/http"

	"connectrpc.com/connect"

	"casemate.dev/internal/errs"
	v1 "casemate.dev/proto/casemate/v1"
	"casemate.dev/proto/casemate/v1/casematev1connect"
)

// Proofs proves the record of what happened; *journal.Log implements it.
type Proofs interface {
	// Checkpoint returns a signed checkpoint of all that was recorded before.
	Checkpoint() ([]byte, error)
	// PublicKey is what it is verified with.
	PublicKey() string
	// Export writes a stream of events with its proofs; heads are checkpoints from before.
	Export(ctx context.Context, stream string, heads [][]byte, w io.Writer) error
}

// proofs implements ProofService.
type proofs struct{ *API }

var _ casematev1connect.ProofServiceHandler = (*proofs)(nil)

// maxHeads bounds the checkpoints that one export is held against.
const maxHeads = 10_000

// GetCheckpoint implements ProofServiceHandler.
func (h *proofs) GetCheckpoint(context.Context, *v1.GetCheckpointRequest) (*v1.Checkpoint, error) {
	if h.cfg.Proofs == nil {
		return nil, errNoProofs()
	}
	text, err := h.cfg.Proofs.Checkpoint()
	if err != nil {
		return nil, err
	}
	return &v1.Checkpoint{Note: string(text), Key: h.cfg.Proofs.PublicKey()}, nil
}

func errNoProofs() error {
	return errs.New(errs.Unsupported, "this server keeps its journal without proofs")
}

// ExportBundle implements ProofServiceHandler.
func (h *proofs) ExportBundle(ctx context.Context, req *v1.ExportBundleRequest, stream *connect.ServerStream[v1.ExportBundleResponse]) error {
	heads := make([][]byte, len(req.GetHeads()))
	for i, text := range req.GetHeads() {
		heads[i] = []byte(text)
	}
	return h.exportBundle(ctx, req.GetSandbox(), heads, writerFunc(func(b []byte) error {
		return stream.Send(&v1.ExportBundleResponse{Data: b})
	}))
}

func (a *API) exportBundle(ctx context.Context, sandbox string, heads [][]byte, w io.Writer) error {
	if a.cfg.Proofs == nil {
		return errNoProofs()
	}
	if len(heads) > maxHeads {
		return errs.New(errs.InvalidArgument, "%d checkpoints are given", len(heads)).WithHint("give at most %d", maxHeads)
	}
	name, err := a.cfg.Manager.Recorded(ctx, principalOf(ctx), sandbox)
	if err != nil {
		return err
	}
	a.cfg.Manager.Settle(ctx, name)
	return a.cfg.Proofs.Export(ctx, name, heads, w)
}

// serveBundle is the twin of ProofService.ExportBundle.
func (a *API) serveBundle(w http.ResponseWriter, r *http.Request) error {
	var heads [][]byte
	for _, text := range r.URL.Query()["head"] {
		head, err := base64.StdEncoding.DecodeString(text)
		if err != nil {
			return errs.New(errs.InvalidArgument, "a head is no base64").WithHint("give it as the header %s has it", headerCheckpoint)
		}
		heads = append(heads, head)
	}
	began := false
	err := a.exportBundle(r.Context(), r.PathValue("sandbox"), heads, writerFunc(func(b []byte) error {
		if !began {
			began = true
			w.Header().Set("Content-Type", "application/jsonl")
		}
		_, err := w.Write(b)
		return err
	}))
	if err != nil && began {
		panic(http.ErrAbortHandler) // the status is out: only a cut connection can tell
	}
	return err
}
