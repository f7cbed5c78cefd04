package stage

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
)

// Image returns an image's archive, as docker save writes it, with Python, a shell and programs of this machine: enough for
// profile standard, which sandboxes of the host's own programs may not have.
func Image(t testing.TB, programs ...string) []byte {
	t.Helper()
	layer := tarOf(t, func(add func(name string, mode int64, data []byte)) {
		add("etc/passwd", 0o644, []byte("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"))
		add("etc/group", 0o644, []byte("root:x:0:\nuser:x:1000:\n"))
		addPrograms(t, programs, add)
	})
	sum := sha256.Sum256(layer)
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + hex.EncodeToString(sum[:])}},
		"config": map[string]any{"Env": []string{"PATH=/usr/bin:/bin"}, "User": "user"},
	})
	if err != nil {
		t.Fatal(err)
	}
	manifest := []byte(`[{"Config": "config.json", "RepoTags": ["small:1"], "Layers": ["layer.tar"]}]`)
	return tarOf(t, func(add func(name string, mode int64, data []byte)) {
		add("config.json", 0o644, config)
		add("layer.tar", 0o644, layer)
		add("manifest.json", 0o644, manifest)
	})
}

func tarOf(t testing.TB, fill func(add func(name string, mode int64, data []byte))) []byte {
	t.Helper()
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	fill(func(name string, mode int64, data []byte) {
		err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(data))})
		if err == nil {
			_, err = w.Write(data)
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// addPrograms adds a shell, what the battery's scripts use, and Python with its library, each with the libraries that it
// is linked with.
func addPrograms(t testing.TB, more []string, add func(name string, mode int64, data []byte)) {
	t.Helper()
	done := map[string]bool{}
	put := func(path, as string, mode int64) {
		if done[as] {
			return
		}
		done[as] = true
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		add(strings.TrimPrefix(as, "/"), mode, data)
	}
	linked := regexp.MustCompile(`(/\S+) \(0x`)
	program := func(path string) {
		put(path, path, 0o755)
		out, err := exec.Command("ldd", path).Output()
		if err != nil {
			t.Fatalf("ldd %s: %v", path, err)
		}
		for _, m := range linked.FindAllStringSubmatch(string(out), -1) {
			put(m[1], m[1], 0o755)
		}
	}
	usual := []string{"/bin/sh", "/usr/bin/python3", "/usr/bin/env", "/usr/bin/cat", "/usr/bin/tr", "/usr/bin/sed", "/usr/bin/grep", "/usr/bin/head"}
	for _, name := range append(usual, more...) {
		program(name)
	}
	out, err := exec.Command("/usr/bin/python3", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))").Output()
	if err != nil {
		t.Fatal(err)
	}
	lib := strings.TrimSpace(string(out))
	err = filepath.WalkDir(lib, func(path string, e fs.DirEntry, err error) error {
		switch base := filepath.Base(path); {
		case err != nil:
			return err
		case e.IsDir() && (base == "test" || base == "__pycache__" || base == "ensurepip" || base == "dist-packages" || strings.HasPrefix(base, "config-")):
			return fs.SkipDir
		case strings.HasSuffix(base, ".so"):
			program(path)
		case e.Type().IsRegular():
			put(path, path, 0o644)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
