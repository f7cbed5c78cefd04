package clients

import (
	"archive/tar"
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"casemate.dev/client"
	"casemate.dev/internal/testenv"
	"casemate.dev/internal/testenv/world"
	"casemate.dev/test/stage"
)

const modelHost = "models.example.org"

// packed returns the files with some extensions that `make test-clients` has put below a directory, as a tar file.
func packed(t *testing.T, dir string, exts ...string) []byte {
	t.Helper()
	root, err := filepath.EvalSymlinks(filepath.Join(testenv.Module(t), dir))
	if err != nil {
		t.Fatalf("%v: make test-clients", err)
	}
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || !slices.Contains(exts, filepath.Ext(path)) {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		if err := tw.WriteHeader(&tar.Header{Name: rel, Mode: 0o644, Size: int64(len(b))}); err != nil {
			return err
		}
		_, err = tw.Write(b)
		return err
	})
	if err == nil {
		err = tw.Close()
	}
	if err != nil {
		t.Fatalf("%v: make test-clients", err)
	}
	return out.Bytes()
}

// TestModels asks models with their providers' official SDKs, through model routes: the key is put on outside, streams
// stream, usage is counted, and who has spent what it may is told so in a way that no SDK tries again.
func TestModels(t *testing.T) {
	p := &play{Stage: stage.Start(t)}
	asked := &stage.Site{Answer: provider().ServeHTTP}
	p.Serve(world.Other, asked, modelHost)
	ctx := t.Context()
	if _, err := p.Secrets.Set(ctx, &client.SetSecretRequest{Name: "models", Class: "model", Value: value}); err != nil {
		t.Fatal(err)
	}
	for _, r := range []*client.ModelRoute{
		{Provider: "anthropic", Family: "anthropic", BaseUrl: "https://" + modelHost, Secret: "models", For: &client.SandboxSelector{All: true}, MaxTokens: 130},
		{Provider: "openai", Family: "openai", BaseUrl: "https://" + modelHost + "/v1", Secret: "models", For: &client.SandboxSelector{All: true}, MaxTokens: 100_000},
	} {
		if _, err := p.Secrets.SetModelRoute(ctx, r); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct{ setup, run, denied string }{
		"ask.py": {
			// As an installer puts them there, which TestClients sees at work.
			`mkdir lib && tar xf packages.tar && for w in *.whl; do python3 -m zipfile -e $w lib; done`,
			`PYTHONPATH=lib python3 ask.py`, "anthropic PermissionDeniedError",
		},
		"ask.mjs": {`tar xf packages.tar`, `node ask.mjs`, "anthropic PermissionDeniedError"},
	} {
		t.Run(name, func(t *testing.T) {
			p.T = t
			p.box = p.Box()
			script, err := os.ReadFile("models/" + name)
			if err != nil {
				t.Fatal(err)
			}
			p.upload(name, script)
			if name == "ask.mjs" {
				p.upload("packages.tar", packed(t, ".cache/npm", ".js", ".mjs", ".cjs", ".json"))
			} else {
				p.upload("packages.tar", packed(t, ".cache/wheels/all", ".whl"))
			}
			if out, end := p.Run(p.box, c.setup); end.GetCode() != 0 {
				t.Fatal(out)
			}
			before := len(asked.All())
			said, end := p.Run(p.box, c.run)
			if end.GetCode() != 0 {
				t.Fatal(said)
			}
			lines := strings.ReplaceAll(strings.TrimSpace(said), "'", `"`)
			const want = "message hi there\nstream hi there 3\ncount 7\nchat hi there\nchat stream hi there\nresponses hi there\nembedding [0.5,0.25]\nmodels [\"m-1\"]"
			if strings.ReplaceAll(lines, ", ", ",") != want {
				t.Errorf("it says\n%s", lines)
			}
			for out, n := "", 0; out != c.denied; n++ {
				if out = p.ok(c.run + " spent"); n > 20 {
					t.Fatalf("after %d more: %s", n, out)
				}
			}
			if n := len(asked.All()); n < before+8 || n > before+8+21 {
				t.Errorf("the provider was asked %d times", n-before)
			}
			p.usage(t)
		})
	}
}

// usage looks at what the journal tells of a box's use of models: at least what the SDKs asked for, with the tokens
// that the provider told.
func (p *play) usage(t *testing.T) {
	t.Helper()
	found := map[string]int{}
	testenv.Eventually(t, time.Minute, "the use of both providers is recorded", func() bool {
		events, err := p.Journal.Events(t.Context(), p.box, 0, 1000)
		if err != nil {
			t.Fatal(err)
		}
		clear(found)
		for _, e := range events {
			text := e.String()
			if strings.Contains(text, value) {
				t.Errorf("the journal holds the key: %s", text)
			}
			if e.GetType() != "model.used" || strings.Contains(text, "estimated") {
				continue
			}
			for _, provider := range []string{"anthropic", "openai"} {
				if strings.Contains(text, provider) && strings.Contains(text, "tokens_out") {
					found[provider]++
				}
			}
		}
		return found["anthropic"] >= 2 && found["openai"] >= 3
	})
}
