package keys

import (
	"crypto/rand"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"casemate.dev/internal/testenv/world"
	"casemate.dev/test/stage"
)

func TestMain(m *testing.M) { os.Exit(stage.Main(m)) }

// The names of the fake internet.
const (
	api   = "api.example.com"
	other = "other.example.net"
	model = "models.example.org"
)

// play is a server with the sites that attacks are about.
type play struct {
	*stage.Stage
	api, other *stage.Site
	spent      string // a sandbox that has used up its budget
}

// answer answers as the request's path says.
func answer(w http.ResponseWriter, r *http.Request) {
	switch {
	case strings.HasPrefix(r.URL.Path, "/echo"):
		w.Header().Set("X-Echo", r.Header.Get("Authorization"))
		fmt.Fprintf(w, "you sent %v", r.Header)
	case strings.HasPrefix(r.URL.Path, "/error"):
		http.Error(w, "denied: "+r.Header.Get("Authorization"), http.StatusForbidden)
	case strings.HasPrefix(r.URL.Path, "/away"):
		http.Redirect(w, r, "https://"+other+"/landed", http.StatusFound)
	case strings.HasPrefix(r.URL.Path, "/v1/"):
		fmt.Fprint(w, `{"content":[{"type":"text","text":"hi"}],"usage":{"input_tokens":7,"output_tokens":3}}`)
	default:
		fmt.Fprint(w, "ok")
	}
}

// canary is a value that stands nowhere else, not even in another run of this test on the same machine.
func canary(n int) string { return fmt.Sprintf("canary%d-%s", n, once()) }

var once = sync.OnceValue(rand.Text)

func start(t *testing.T) *play {
	s := &play{Stage: stage.Start(t), api: &stage.Site{Answer: answer}, other: &stage.Site{Answer: answer}}
	s.Serve(world.Web, s.api, api, model)
	s.Serve(world.Other, s.other, other)
	return s
}
