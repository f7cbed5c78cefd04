package drivers

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// chart runs code that draws and returns the data of the one figure that it shows.
func chart(t *testing.T, c *context, code string) map[string]any {
	t.Helper()
	o := c.run("import numpy as np, matplotlib.pyplot as plt, datetime\n" + code)
	if o.err != nil {
		t.Fatal(o.err.Traceback)
	}
	var figures []message
	for _, r := range o.results {
		if !r.Main {
			figures = append(figures, r)
		}
	}
	if len(figures) != 1 {
		t.Fatalf("%d figures: %s %s", len(figures), o.order(), o.stderr)
	}
	f := figures[0]
	png, err := base64.StdEncoding.DecodeString(f.text("image/png"))
	if err != nil || !strings.HasPrefix(string(png), "\x89PNG\r\n") || !strings.HasPrefix(f.text("text/plain"), "<Figure size ") {
		t.Errorf("figure %s %.20q", f.text("text/plain"), png)
	}
	if f.Data["chart"] == nil {
		return nil
	}
	var m map[string]any
	d := json.NewDecoder(strings.NewReader(string(f.Data["chart"])))
	d.UseNumber() // 1.0 stays 1.0
	must(t, d.Decode(&m))
	return m
}

func show(v any) string { b, _ := json.Marshal(v); return string(b) }

// Charts come as data in the shapes that E2B's clients read.
func TestCharts(t *testing.T) {
	c := full(t)
	for _, s := range []struct {
		name, code string
		want       map[string]string // parts of the chart, as JSON
	}{
		{
			"line", "days = [datetime.date(2023, 9, i) for i in (1, 2, 3)]\nplt.plot(days, [1, 2, 4], label='a')\nplt.plot(days, [0.5, 1, np.nan])\nplt.axhline(2)\n" +
				"plt.xlabel('Time (s)'); plt.ylabel('Level [Hz]'); plt.title('T')\nplt.show()",
			map[string]string{
				"type": `"line"`, "title": `"T"`, "x_label": `"Time (s)"`, "x_unit": `"s"`, "y_unit": `"Hz"`, "x_scale": `"datetime"`, "y_scale": `"linear"`,
				"elements": `[{"label":"a","points":[["2023-09-01",1.0],["2023-09-02",2.0],["2023-09-03",4.0]]},` +
					`{"label":"Line 1","points":[["2023-09-01",0.5],["2023-09-02",1.0],["2023-09-03",null]]}]`,
			},
		},
		{"log", "plt.plot([1, 10], [1, 100]); plt.yscale('log'); plt.grid(True); plt.legend()", map[string]string{"type": `"line"`, "y_scale": `"log"`, "x_scale": `"linear"`, "title": "null", "x_label": "null", "y_unit": "null"}},
		{"categories", "plt.plot([1, 2, 3], ['A', 'B', 'C'])", map[string]string{"y_scale": `"categorical"`, "x_scale": `"linear"`, "y_ticks": `[0.0,1.0,2.0]`, "y_tick_labels": `["A","B","C"]`}},
		{
			"scatter", "plt.scatter([1, 2], [3, 4.5], label='D')",
			map[string]string{"type": `"scatter"`, "elements": `[{"label":"D","points":[[1.0,3.0],[2.0,4.5]]}]`},
		},
		{"colorbar", "plt.scatter([1, 2], [3, 4], c=[1, 2]); plt.colorbar()", map[string]string{"type": `"scatter"`}},
		{
			"bar", "plt.bar(['a', 'b'], [5, 5], label='S'); plt.xlabel('X')",
			map[string]string{"type": `"bar"`, "x_label": `"X"`, "elements": `[{"group":"S","label":"a","value":5.0},{"group":"S","label":"b","value":5.0}]`},
		},
		{
			"barh", "plt.barh(['a', 'b'], [1, 2]); plt.xlabel('X')",
			map[string]string{"type": `"bar"`, "y_label": `"X"`, "x_label": `null`, "elements": `[{"group":"Group 0","label":"a","value":1.0},{"group":"Group 0","label":"b","value":2.0}]`},
		},
		{
			"grouped bars", "x = np.arange(2)\nplt.bar(x - .2, [1, 2], .4, label='p'); plt.bar(x + .2, [3, 4], .4, label='q'); plt.xticks(x, ['m', 'n'])",
			map[string]string{"elements": `[{"group":"p","label":"m","value":1.0},{"group":"p","label":"n","value":2.0},{"group":"q","label":"m","value":3.0},{"group":"q","label":"n","value":4.0}]`},
		},
		{
			"pie", "fig, ax = plt.subplots()\nax.pie([90, 10], labels=['No', 'Yes'], autopct='%1.1f%%', startangle=90); ax.axis('equal')",
			map[string]string{"type": `"pie"`, "elements": `[{"angle":324.0,"label":"No","radius":1.0},{"angle":36.0,"label":"Yes","radius":1.0}]`},
		},
		{"unknown", "fig, ax = plt.subplots()\nax.add_artist(plt.Circle((0, 0), 1)); plt.title('C')", map[string]string{"type": `"unknown"`, "title": `"C"`, "elements": `[]`}},
		{
			"super", "fig, axs = plt.subplots(1, 2)\nfig.suptitle('Two')\naxs[0].plot([1, 2, 3], [1, 4, 9], 'r'); axs[0].set_title('L')\naxs[1].scatter([1], [2]); axs[1].set_xlabel('X')",
			map[string]string{"type": `"superchart"`, "title": `"Two"`},
		},
	} {
		t.Run(s.name, func(t *testing.T) {
			got := chart(t, c, s.code)
			for key, want := range s.want {
				if show(got[key]) != want {
					t.Errorf("%s: %s, want %s", key, show(got[key]), want)
				}
			}
			if _, ok := got["elements"].([]any); !ok {
				t.Errorf("no elements: %s", show(got))
			}
		})
	}
}

// Box plots: boxes that are patches or lines, upright or lying.
func TestBoxCharts(t *testing.T) {
	c := full(t)
	for _, how := range []string{"patch_artist=True", "patch_artist=False", "patch_artist=True, vert=False", "patch_artist=False, vert=False"} {
		m := chart(t, c, fmt.Sprintf(`
data = {'Class A': [85, 90, 78, 92, 88], 'Class B': [95, 89, 76, 91, 84, 87], 'Class C': [75, 82, 88, 79, 86]}
fig, ax = plt.subplots(figsize=(10, 6))
ax.boxplot(data.values(), tick_labels=data.keys(), %s)
`, how))
		want := `[{"first_quartile":85.0,"label":"Class A","max":92.0,"median":88.0,"min":78.0,"outliers":[],"third_quartile":90.0},` +
			`{"first_quartile":84.75,"label":"Class B","max":95.0,"median":88.0,"min":84.0,"outliers":[76.0],"third_quartile":90.5},` +
			`{"first_quartile":79.0,"label":"Class C","max":88.0,"median":82.0,"min":75.0,"outliers":[],"third_quartile":86.0}]`
		if m["type"] != "box_and_whisker" || show(m["elements"]) != want {
			t.Errorf("%s: %s %s", how, m["type"], show(m["elements"]))
		}
	}
}

// Figures are shown once, at show or at the end of the run, whatever else the run does.
func TestFiguresAreShownOnce(t *testing.T) {
	c := full(t)
	c.run("import matplotlib.pyplot as plt")
	for _, s := range []struct {
		code    string
		figures int
	}{
		{"plt.plot([1])", 1},
		{"plt.plot([1]); plt.show()", 1},
		{"plt.plot([1]); plt.show(); plt.plot([2]); plt.show()", 2},
		{"plt.figure(); plt.plot([1]); plt.figure(); plt.plot([2])", 2},
		{"fig = plt.figure(); plt.plot([1]); plt.close(fig)", 0},
		{"fig, ax = plt.subplots(); ax.plot([1])\nfig", 1},
		{"plt.plot([1])\n1/0", 1},
		{"display(fig)", 1},
		{"plt.plot([1]); plt.savefig('f.png')", 1},
		{"%matplotlib inline", 0},
		{"plt.plot([1]); plt.show()", 1},
		{"plt.plot([1])", 1},
		{"plt.switch_backend('agg'); plt.plot([1])", 0},
	} {
		o := c.run(s.code)
		n := 0
		for _, r := range o.results {
			if r.Data["image/png"] != nil {
				n++
				if r.Data["chart"] == nil {
					t.Errorf("%q: no chart", s.code)
				}
			}
		}
		if n != s.figures {
			t.Errorf("%q: %d figures: %s %s", s.code, n, o.order(), o.stderr)
		}
	}
	if got := c.run("import subprocess, sys; subprocess.run([sys.executable, '-c', 'import matplotlib.pyplot as p; p.plot([1]); print(p.get_backend())'], capture_output=True, text=True).stdout").main(); got != `'agg\n'` {
		t.Errorf("a program that the code starts has backend %s", got)
	}
}
