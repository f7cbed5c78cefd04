package cli

import (
	"os"
	"strings"
	"testing"
)

func TestIncomplete(t *testing.T) {
	for _, tt := range []struct {
		language, code string
		want           bool
	}{
		{"python", "x = 1\n", false},
		{"python", "def f():\n", true},
		{"python", "def f():\n  return 1\n", true},
		{"python", "def f():\n  return 1\n\n", false},
		{"python", "if x: # why\n", true},
		{"python", "x = {'a': 1}\n", false},
		{"python", "f(1,\n", true},
		{"python", "f(1,\n2)\n", false},
		{"python", "s = '''a\n", true},
		{"python", "s = '''a\nb'''\n", false},
		{"python", "s = '(('\n", false},
		{"python", "x = 1 + \\\n", true},
		{"python", "# if this:\n", false},
		{"python", "f(\n\n\n", false},
		{"python", "@cached\n", true},
		{"python", "print('it\\'s')\n", false},
		{"javascript", "function f() {\n", true},
		{"javascript", "function f() {\n}\n", false},
		{"javascript", "x = `a\n", true},
		{"javascript", "// {\n", false},
		{"bash", "if true\n", true},
		{"bash", "if true; then echo; fi\n", false},
		{"bash", "for i in 1 2; do\n", true},
		{"bash", "echo 'a\n", true},
		{"bash", "echo \"a\" # 'it\n", false},
		{"bash", "case x in\na) echo;;\nesac\n", false},
		{"bash", "echo $#\n", false},
	} {
		if got := incomplete(tt.language, tt.code); got != tt.want {
			t.Errorf("incomplete(%s, %q) = %v", tt.language, tt.code, got)
		}
	}
}

func TestPicturesAreSaved(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	var p pictures
	if path, err := p.save(map[string]string{"text/plain": "x"}); err != nil || path != "" {
		t.Errorf("no picture: %q, %v", path, err)
	}
	path, err := p.save(map[string]string{"image/png": "aGVs\nbG8="})
	if err != nil || !strings.HasSuffix(path, "1.png") {
		t.Fatalf("%q, %v", path, err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := p.save(map[string]string{"image/png": "%%%"}); err == nil {
		t.Error("what is no base64 was saved")
	}
}

func FuzzIncomplete(f *testing.F) {
	f.Add("python", "def f(:\n'''")
	f.Add("bash", "\\")
	f.Fuzz(func(_ *testing.T, language, code string) { incomplete(language, code) })
}
