package script

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"casemate.dev/internal/cli"
	"casemate.dev/internal/testenv"
)

// update rewrites the files that scripts compare with.
var update = flag.Bool("update", false, "rewrite what scripts compare with")

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		// The program as it is, but for the guest: for scripts that need no real server.
		"casemate-plain": func() { os.Exit(cli.Main("test", os.Args[1:])) },
	})
}

// TestFake runs the scripts over a scripted backend. It needs no privilege.
func TestFake(t *testing.T) {
	run(t, startFake(t), "any")
}

// TestReal runs them, and those that need real walls, over the namespace backend.
func TestReal(t *testing.T) {
	testenv.Root(t)
	run(t, startReal(t), "any", "real")
}

// run runs the scripts of dirs against one server; each script has actors of its own.
func run(t *testing.T, s *stage, dirs ...string) {
	for _, dir := range dirs {
		t.Run(dir, func(t *testing.T) {
			testscript.Run(t, testscript.Params{
				Dir:                 filepath.Join("testdata", dir),
				UpdateScripts:       *update,
				RequireExplicitExec: true,
				RequireUniqueNames:  true,
				WorkdirRoot:         t.TempDir(), // else a directory stays behind where not all scripts are run
				Setup:               s.setup,
				Cmds:                commands(),
				Condition: func(cond string) (bool, error) {
					switch cond {
					case "real":
						return s.real, nil
					case "fake":
						return !s.real, nil
					}
					return false, fmt.Errorf("unknown condition %q", cond)
				},
			})
		})
	}
}
