package drivers

import (
	"encoding/base64"
	"encoding/json"
	"sort"
	"strings"
	"testing"
)

func keys(m message) string {
	var all []string
	for k := range m.Data {
		all = append(all, k)
	}
	sort.Strings(all)
	return strings.Join(all, " ")
}

// Objects that know how to show themselves are shown in all those ways.
func TestPythonReprs(t *testing.T) {
	code := `class A:
    def __repr__(self): return 'text'
    def _repr_html_(self): return '<b>h</b>'
    def _repr_markdown_(self): return '**m**'
    def _repr_svg_(self): return '<svg/>'
    def _repr_png_(self): return b'\x89PNG'
    def _repr_jpeg_(self): return b'\xff\xd8'
    def _repr_pdf_(self): return b'%PDF'
    def _repr_latex_(self): return '$x$'
    def _repr_json_(self): return {'a': 1}
    def _repr_javascript_(self): return 'alert(1)'
A()`
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		o := c.run(code)
		if len(o.results) != 1 {
			t.Fatal(o.order(), o.stderr)
		}
		r := o.results[0]
		want := "application/javascript application/json application/pdf image/jpeg image/png image/svg+xml text/html text/latex text/markdown text/plain"
		if keys(r) != want || !r.Main {
			t.Errorf("%s", keys(r))
		}
		if b, _ := base64.StdEncoding.DecodeString(r.text("image/png")); string(b) != "\x89PNG" {
			t.Errorf("png %q", b)
		}
		if string(r.Data["application/json"]) != `{"a":1}` {
			t.Errorf("json %s", r.Data["application/json"])
		}
		o = c.run("class M:\n    def _repr_mimebundle_(self, include=None, exclude=None): return {'x/y': [1, float('nan')]}, {'x/y': {'k': 1}}\nM()")
		if string(o.results[0].Data["x/y"]) != "[1,null]" || !strings.Contains(string(o.results[0].Metadata), `"k":1`) {
			t.Errorf("%s %s", o.results[0].Data, o.results[0].Metadata)
		}
		o = c.run("display({'text/latex': 'L'}, raw=True)")
		if keys(o.results[0]) != "text/latex" || o.results[0].Main {
			t.Errorf("%s", keys(o.results[0]))
		}
		if o = c.run("{'a': [1, 2.0]}"); string(o.results[0].Data["application/json"]) != `{"a":[1,2.0]}` {
			t.Errorf("%s", o.results[0].Data)
		}
		if o = c.run("{'a': object()}"); keys(o.results[0]) != "text/plain" {
			t.Errorf("%s", keys(o.results[0]))
		}
		if o = c.run("'é漢😀\\udcff' * 2"); o.main() != "'é漢😀\\udcffé漢😀\\udcff'" {
			t.Errorf("%q", o.main())
		}
	})
}

// A result that no message can hold is replaced by a text that says so, and nothing breaks.
func TestPythonHugeResults(t *testing.T) {
	eachPython(t, func(t *testing.T, _ interpreter, c *context) {
		o := c.run("class H:\n    def __repr__(self): return 'small'\n    def _repr_html_(self): return 'x' * (20 << 20)\nH()")
		if got := o.main(); !strings.HasPrefix(got, "small\n[not shown: text/html (20480 KB)") {
			t.Errorf("%.200q", got)
		}
		o = c.run("raise ValueError('y' * (20 << 20))")
		if o.err == nil || len(o.err.Value) > MessageLimit/2 || !strings.Contains(o.err.Value, "KB in all") {
			t.Errorf("%v", o.err != nil)
		}
		if got := c.run("1+1").main(); got != "2" {
			t.Errorf("%q", got)
		}
	})
}

func TestPandas(t *testing.T) {
	c := full(t)
	o := c.run(`
import pandas as pd, numpy as np
pd.DataFrame({"a": [1, 2, 3], "t": pd.to_datetime(["2024-01-02", None, "2024-01-03"]), "f": [0.5, np.nan, 1.0], 3: ["x", None, "z"], "d": pd.to_timedelta([1,2,3], "s")})`)
	if len(o.results) != 1 {
		t.Fatal(o.order(), o.stderr, o.err)
	}
	want := `{"a":[1,2,3],"t":["2024-01-02T00:00:00",null,"2024-01-03T00:00:00"],"f":[0.5,null,1.0],"3":["x",null,"z"],` +
		`"d":["P0DT0H0M1S","P0DT0H0M2S","P0DT0H0M3S"]}`
	if got := string(o.results[0].Data["dataframe"]); got != want {
		t.Errorf("%s", got)
	}
	if keys(o.results[0]) != "dataframe text/html text/plain" {
		t.Errorf("%s", keys(o.results[0]))
	}
	if got := string(c.run("pd.Series([1, 2], name='s')").results[0].Data["dataframe"]); got != `{"s":[1,2]}` {
		t.Errorf("%s", got)
	}
	o = c.run("pd.DataFrame({'a': range(300_000), 'b': 1.5})")
	var table map[string][]json.Number
	must(t, json.Unmarshal(o.results[0].Data["dataframe"], &table))
	if len(table["a"]) != 100_000 || !strings.Contains(string(o.results[0].Metadata), `"rows":300000`) {
		t.Errorf("%d %s", len(table["a"]), o.results[0].Metadata)
	}
}

// What IPython adds: shell commands, magics, and its display classes.
func TestIPython(t *testing.T) {
	c := full(t)
	for _, s := range []struct{ code, want string }{
		{"!echo hi", "stdout:hi\n|end"},
		{"print('a', end='')\n!echo b; exit 3\nprint(_exit_code)", "stdout:ab\n3\n|end"},
		{"x = !echo one; echo two\nx", "result:['one', 'two']|end"},
		{"%%bash\necho from bash", "stdout:from bash\n|end"},
		{"%cd -q /\n!pwd", "stdout:/\n|end"},
		{"%env A1=b\n!echo $A1", "stdout:env: A1=b\nb\n|end"},
		{"%pip --version;", ""},
		{"%%time\nprint(1)", ""},
		{"%matplotlib inline", "end"},
		{"from IPython.display import HTML, Markdown, display\ndisplay(HTML('<i>'))", "result:<IPython.core.display.HTML object>|end"},
		{"get_ipython().ast_node_interactivity = 'all'", "end"},
		{"1\n2", "result:1|result:2|end"},
		{"get_ipython().ast_node_interactivity = 'last_expr_or_assign'", "end"},
		{"q = 4", "result:4|end"},
		{"get_ipython().ast_node_interactivity = 'last_expr'", "end"},
		{"5;", "end"},
		{"%precision 2", "result:'%.2f'|end"},
		{"1.23456", "result:1.23|end"},
		{"%nope", "stderr:UsageError"},
		{"%%capture cap\nprint('hidden')\ndisplay(3)", "end"},
		{"len(cap.outputs), cap.stdout", "result:(1, 'hidden\\n')|end"},
		{"In[1], Out[15]", ""},
	} {
		o := c.run(s.code)
		got := o.order()
		if s.want == "stderr:UsageError" {
			if o.err == nil || o.err.Name != "UsageError" {
				t.Errorf("%q: %q", s.code, got)
			}
			continue
		}
		if s.want == "" {
			if o.err != nil && !strings.HasPrefix(s.code, "In") {
				t.Errorf("%q: %q %s", s.code, got, o.err.Traceback)
			}
			continue
		}
		if got != s.want {
			t.Errorf("%q: %q, want %q", s.code, got, s.want)
		}
	}
}

func TestSavedImages(t *testing.T) {
	code := "import numpy\nfrom PIL import Image\nimage = Image.fromarray(numpy.zeros((4, 4, 3), 'uint8'))\nimage.save('t.png')\nimage.save(__import__('io').BytesIO(), 'png')"
	if o := full(t).run(code); len(o.results) != 0 {
		t.Errorf("%s", o.order())
	}
	c := full(t, ShowSavedImages+"=1")
	o := c.run(code)
	if len(o.results) != 1 || !strings.Contains(keys(o.results[0]), "image/png") {
		t.Errorf("%s %+v", o.order(), o.err)
	}
	if got := c.run("image").results[0]; !strings.Contains(keys(got), "image/png") {
		t.Errorf("%s", keys(got))
	}
	if got := c.run("image.show()").results; len(got) != 1 {
		t.Errorf("show: %d results", len(got))
	}
	if got := c.run("import os; os.environ.get('" + ShowSavedImages + "')").order(); got != "end" {
		t.Errorf("%s", got)
	}
}
