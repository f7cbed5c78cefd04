package fake

import (
	"path"
	"strconv"
	"strings"
	"syscall"

	"casemate.dev/internal/guestwire"
	"casemate.dev/internal/isolation/fake/script"
)

// fileCommand returns the programs that work on files.
func fileCommand(name string) script.Command {
	type action func(t *tree, u user, p string, flags string) error
	var do action
	switch name {
	case "ls":
		return runLs
	case "mv", "cp", "ln":
		return runTwoFiles
	case "mkdir":
		do = func(t *tree, u user, p, flags string) error {
			_, err := t.mkdir(u, p, 0, strings.Contains(flags, "p"))
			return err
		}
	case "rm", "rmdir":
		do = func(t *tree, u user, p, flags string) error {
			err := t.remove(u, p, strings.Contains(flags, "r"))
			if err == syscall.ENOENT && strings.Contains(flags, "f") {
				return nil
			}
			return err
		}
	case "touch":
		do = func(t *tree, u user, p, _ string) error {
			_, err := t.write(u, p, nil, writeOptions{appends: true})
			return err
		}
	case "chmod":
		return runChmod
	default:
		return nil
	}
	return func(sh *script.Shell, argv []string) int {
		status, flags := 0, ""
		for _, a := range argv[1:] {
			if strings.HasPrefix(a, "-") {
				flags += a[1:]
				continue
			}
			u := userOf(sh)
			if err := do(taskOf(sh).machine.tree, u, absolute(a, sh.Dir, u), flags); err != nil {
				status = complain(sh, argv[0], "%s: %v", a, err)
			}
		}
		return status
	}
}

func runLs(sh *script.Shell, argv []string) int {
	dir, u := sh.Dir, userOf(sh)
	for _, a := range argv[1:] {
		if !strings.HasPrefix(a, "-") {
			dir = absolute(a, sh.Dir, u)
		}
	}
	tree := taskOf(sh).machine.tree
	if info, err := tree.stat(dir, true); err == nil && info.Type != guestwire.TypeDir {
		return out(sh, "%s\n", path.Base(dir))
	}
	files, err := tree.list(u, dir, 1)
	if err != nil {
		_ = complain(sh, "ls", "cannot access %s: %v", dir, err)
		return 2
	}
	for _, f := range files {
		_ = out(sh, "%s\n", f.Name)
	}
	return 0
}

func runTwoFiles(sh *script.Shell, argv []string) int {
	var names []string
	for _, a := range argv[1:] {
		if !strings.HasPrefix(a, "-") {
			names = append(names, a)
		}
	}
	if len(names) != 2 {
		return complain(sh, argv[0], "two names are needed")
	}
	u, tree := userOf(sh), taskOf(sh).machine.tree
	from, to := absolute(names[0], sh.Dir, u), absolute(names[1], sh.Dir, u)
	var err error
	switch argv[0] {
	case "mv":
		_, err = tree.move(u, from, to, true)
	case "ln":
		err = tree.symlink(u, names[0], to)
	case "cp":
		var data []byte
		var info guestwire.FileInfo
		if data, info, err = tree.read(u, from); err == nil {
			_, err = tree.write(u, to, data, writeOptions{mode: info.Mode})
		}
	}
	if err != nil {
		return complain(sh, argv[0], "%v", err)
	}
	return 0
}

func runChmod(sh *script.Shell, argv []string) int {
	if len(argv) != 3 {
		return complain(sh, "chmod", "a mode and a name are needed")
	}
	mode64, err := strconv.ParseUint(argv[1], 8, 32)
	mode := uint32(mode64)
	if argv[1] == "+x" {
		mode, err = 0o755, nil
	}
	if err == nil {
		u := userOf(sh)
		_, err = taskOf(sh).machine.tree.chmod(u, absolute(argv[2], sh.Dir, u), true, &mode, -1, -1)
	}
	if err != nil {
		return complain(sh, "chmod", "%v", err)
	}
	return 0
}
