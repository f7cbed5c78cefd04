package stage

import (
	"archive/zip"
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
)

// Wheel makes a Python package of one module with a text, as an index offers it. requires is what it depends on, as in
// "other>=1"; "": nothing.
func Wheel(t testing.TB, name, version, text, requires string) []byte {
	t.Helper()
	module := strings.ReplaceAll(name, "-", "_")
	info := module + "-" + version + ".dist-info/"
	meta := "Metadata-Version: 2.1\nName: " + name + "\nVersion: " + version + "\n"
	if requires != "" {
		meta += "Requires-Dist: " + requires + "\n"
	}
	var packed bytes.Buffer
	z := zip.NewWriter(&packed)
	record := ""
	for _, f := range [][2]string{
		{module + ".py", text},
		{info + "METADATA", meta},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{info + "RECORD", ""},
	} {
		sum := sha256.Sum256([]byte(f[1]))
		if f[0] != info+"RECORD" {
			record += fmt.Sprintf("%s,sha256=%s,%d\n", f[0], base64.RawURLEncoding.EncodeToString(sum[:]), len(f[1]))
		} else {
			f[1] = record + info + "RECORD,,\n"
		}
		w, err := z.Create(f[0])
		if err == nil {
			_, err = w.Write([]byte(f[1]))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return packed.Bytes()
}
