package drivers

import (
	_ "embed" // the drivers' texts
	"strings"
	"sync"

	"casemate.dev/internal/errs"
)

// MessageLimit is the greatest length of one message in bytes, its newline included, either way.
const MessageLimit = 16 << 20

// ShowSavedImages, set to "1" in a Python driver's environment, shows pictures that code saves under a
// file name as results too. The driver takes it out of the environment that code sees.
const ShowSavedImages = "CASEMATE_SHOW_SAVED_IMAGES"

// Driver is how a language's driver is started.
type Driver struct {
	// Language is the language's name, in its one spelling.
	Language string
	// Argv starts the driver; Argv[0] is looked for in the sandbox's PATH.
	Argv []string
	// Needs is the program that Argv[0] is, for people: what a template must have.
	Needs string
	// Source is the driver's text, for descriptor 4. Nobody may change it.
	Source []byte
	// CodeFile says that it wants long code in a file, on descriptor 5.
	CodeFile bool
}

// pythonBootstrap starts the driver's text. The text runs in a module of its own, so that __main__ belongs to the code.
const pythonBootstrap = `import sys,os
m=type(sys)("_casemate")
sys.modules["_casemate"]=m
t=b""
while True:
    p=os.pread(4,1<<20,len(t))
    if not p: break
    t+=p
exec(compile(t,"<casemate>","exec"),m.__dict__)`

// bashBootstrap starts the driver's text.
const bashBootstrap = `. /dev/fd/4`

// nodeBootstrap starts the driver's text. import() works in this script only, in a Node.js before 20.
const nodeBootstrap = `globalThis[Symbol.for("casemate.start.import")] = (s) => import(s);
{
  const fs = require("fs"), parts = [], b = Buffer.alloc(1 << 20);
  for (let at = 0, n; (n = fs.readSync(4, b, 0, b.length, at)) > 0; at += n) parts.push(Buffer.from(b.subarray(0, n)));
  fs.closeSync(4);
  const script = new (require("vm").Script)(Buffer.concat(parts).toString(), { filename: "<casemate>" });
  script.runInThisContext()(require, process.argv[1]);
}`

var (
	//go:embed bash/driver.sh
	bashDriver []byte
	//go:embed node/driver.cjs
	nodeDriver []byte
	//go:embed python/driver.py
	pythonDriver string
	//go:embed python/ipython.py
	pythonIPython string
	//go:embed python/figures.py
	pythonFigures string
	//go:embed python/zygote.py
	pythonZygote string
)

// Find returns the driver of a language by any of its names, in any case. Kind: InvalidArgument.
func Find(name string) (Driver, error) {
	switch strings.ToLower(name) {
	case "python", "python3", "py":
		return Driver{
			Language: "python", Needs: "python3", Argv: []string{"python3", "-c", pythonBootstrap}, Source: pythonSource(),
		}, nil
	case "javascript", "js", "node", "nodejs":
		return node("javascript"), nil
	case "typescript", "ts":
		return node("typescript"), nil
	case "bash", "sh", "shell":
		return Driver{
			Language: "bash", Needs: "bash", Argv: []string{"bash", "--noprofile", "--norc", "-c", bashBootstrap}, Source: bashDriver,
			CodeFile: true,
		}, nil
	}
	return Driver{}, errs.New(errs.InvalidArgument, "there is no driver for language %q", name).
		WithHint("use python, javascript, typescript or bash")
}

// node returns the driver of a language that Node.js runs. --expose-internals gives it Node's own parser;
// without the other, an interrupt that strikes inside Node's bookkeeping would abort the process.
func node(language string) Driver {
	return Driver{
		Language: language, Needs: "node", Argv: []string{"node", "--expose-internals", "--no-force-async-hooks-checks", "-e", nodeBootstrap, language},
		Source: nodeDriver,
	}
}

// pythonSource joins the driver and the parts that it compiles only when they are needed: compiling all
// would cost every context some ten milliseconds.
var pythonSource = sync.OnceValue(func() []byte {
	var b strings.Builder
	b.WriteString("LAZY = {")
	for _, part := range [][2]string{{"ipython", pythonIPython}, {"figures", pythonFigures}, {"zygote", pythonZygote}} {
		b.WriteString(quotePython(part[0]) + ": " + quotePython(part[1]) + ", ")
	}
	b.WriteString("}\n" + pythonDriver)
	return []byte(b.String())
})

// quotePython returns an ASCII text as a Python string.
func quotePython(text string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`, "\r", `\r`).Replace(text) + `"`
}
