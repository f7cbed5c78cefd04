package script

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
)

// witness keeps what is posted to it, and gives all of it back, one behind the other.
type witness struct {
	mu   sync.Mutex
	held []byte
}

func newWitness() *httptest.Server { return httptest.NewServer(&witness{}) }

// ServeHTTP implements http.Handler.
func (n *witness) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/" {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	b, err := io.ReadAll(r.Body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if r.Method == http.MethodPost {
		n.held = append(n.held, b...)
		return
	}
	_, _ = w.Write(n.held)
}
