package cli

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
	"casemate.dev/internal/errs"
)

// sandboxFlags say what sandbox to make; create and run share them.
type sandboxFlags struct {
	template, isolation, profile string
	name, user, dir              string
	memory, disk                 size
	cpus                         float64
	pids, openFiles              int32
	inodes                       int64
	env, labels, workspaces      []string
	lifetime, idle               time.Duration
	allowMissing                 []string
	record                       string
	fileChanges                  string
	calls                        callFlags
	network                      netFlags
}

// register adds the flags to cmd.
func (f *sandboxFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.template, "template", "", "what it starts from (default the server's, host)")
	fl.StringVar(&f.isolation, "isolation", "", "how it is kept apart (default the server's, namespace)")
	fl.StringVar(&f.profile, "profile", "", "locked: for code nobody read; standard: root inside, sudo works (default the template's)")
	fl.StringVar(&f.name, "name", "", "a name to call it by, also its host name inside")
	fl.StringVar(&f.user, "user", "", "who processes run as (default the template's user)")
	fl.StringVarP(&f.dir, "workdir", "w", "", "where processes start (default the template's)")
	fl.Var(&f.memory, "memory", "memory limit, as 512m or 2g")
	fl.Float64Var(&f.cpus, "cpus", 0, "CPU limit in cores, as 0.5 or 2")
	fl.Var(&f.disk, "disk", "limit on what it writes, as 500m or 10g")
	fl.Int32Var(&f.pids, "pids", 0, "limit on processes and threads")
	fl.Int32Var(&f.openFiles, "open-files", 0, "limit on open files of each process")
	fl.Int64Var(&f.inodes, "inodes", 0, "limit on the number of files it makes, where the store can count them (inspect says so)")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "environment `NAME=VALUE`; NAME alone takes the value from here (repeatable)")
	fl.StringArrayVar(&f.labels, "label", nil, "label `KEY=VALUE` (repeatable)")
	fl.StringArrayVar(&f.workspaces, "workspace", nil, "show host folder `DIR[:TARGET]` inside as copy-on-write, at /workspace by default, where processes then start (repeatable)")
	fl.DurationVar(&f.lifetime, "lifetime", 0, "delete it after this time, as 30m (default never)")
	fl.DurationVar(&f.idle, "idle", 0, "delete it after this time without use (default never)")
	fl.StringArrayVar(&f.allowMissing, "allow-missing", nil, "start although this `LAYER` of isolation is missing here (repeatable; see doctor)")
	fl.StringVar(&f.record, "record", "", "content that the journal keeps beside hashes of it: hashes (none), content (arguments, code, input and output of programs) or all (also files through the API) (default content)")
	fl.StringVar(&f.fileChanges, "file-changes", "", "record which files each process changes: off, summary (how many) or full (which) (default off)")
	f.calls.register(cmd, "the server's; see casemate calls")
	f.network.register(cmd)
	_ = cmd.RegisterFlagCompletionFunc("file-changes", cobra.FixedCompletions([]string{"off", "summary", "full"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("profile", cobra.FixedCompletions([]string{"locked", "standard"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("record", cobra.FixedCompletions([]string{"hashes", "content", "all"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("isolation", cobra.FixedCompletions([]string{"namespace", "gvisor"}, cobra.ShellCompDirectiveNoFileComp))
}

// defaultTarget is where the server shows a workspace that names no place.
const defaultTarget = "/workspace"

// request turns the flags into a request.
func (f *sandboxFlags) request(getenv func(string) string) (*client.CreateRequest, error) {
	env, err := parseEnv(f.env, getenv)
	if err != nil {
		return nil, err
	}
	labels, err := parsePairs("label", f.labels)
	if err != nil {
		return nil, err
	}
	spaces, err := parseWorkspaces(f.workspaces)
	if err != nil {
		return nil, err
	}
	if f.cpus < 0 || f.pids < 0 || f.openFiles < 0 || f.inodes < 0 || f.lifetime < 0 || f.idle < 0 {
		return nil, usageError("a limit can't be negative")
	}
	req := &client.CreateRequest{
		Template:  f.template,
		Isolation: f.isolation,
		Profile:   f.profile,
		Name:      f.name,
		User:      f.user,
		Dir:       f.dir,
		Env:       env,
		Labels:    labels,
		Limits: &client.Limits{
			MemoryBytes: int64(f.memory), Cpus: f.cpus, Pids: f.pids,
			OpenFiles: f.openFiles, DiskBytes: int64(f.disk), Inodes: f.inodes,
		},
		// A person's sandbox ends when the person says so: zero means no end.
		Lifetime:     durationpb.New(f.lifetime),
		Workspaces:   spaces,
		AllowMissing: f.allowMissing,
		Record:       f.record,
		FileChanges:  f.fileChanges,
	}
	if req.Calls, err = f.calls.message(); err != nil {
		return nil, err
	}
	req.NoNetwork = f.network.net == netNone
	if req.Network, err = f.network.rules(); err != nil {
		return nil, err
	}
	if f.idle > 0 {
		req.Idle = durationpb.New(f.idle)
	}
	if req.Dir == "" && len(spaces) > 0 {
		req.Dir = cmp.Or(spaces[0].Target, defaultTarget) // who brings a folder means to work in it
	}
	return req, nil
}

// parseEnv reads NAME=VALUE pairs; a NAME alone takes its value from the caller's environment, so
// that a value need not stand in a command line, which every process of the host can read.
func parseEnv(list []string, getenv func(string) string) (map[string]string, error) {
	env := make(map[string]string, len(list))
	for _, e := range list {
		name, value, ok := strings.Cut(e, "=")
		if name == "" || strings.ContainsRune(e, 0) {
			return nil, usageError("-e %s is no NAME=VALUE", e)
		}
		if !ok {
			value = getenv(name)
		}
		env[name] = value
	}
	return env, nil
}

func parsePairs(what string, list []string) (map[string]string, error) {
	pairs := make(map[string]string, len(list))
	for _, l := range list {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return nil, usageError("--%s %s is no KEY=VALUE", what, l)
		}
		pairs[k] = v
	}
	return pairs, nil
}

// parseWorkspaces reads DIR[:TARGET] and makes DIR absolute, since the server has another working
// directory.
func parseWorkspaces(list []string) ([]*client.Workspace, error) {
	var out []*client.Workspace
	for _, w := range list {
		source, target := w, ""
		if i := strings.LastIndexByte(w, ':'); i > 0 && strings.HasPrefix(w[i+1:], "/") {
			source, target = w[:i], w[i+1:]
		}
		abs, err := filepath.Abs(source)
		if err != nil {
			return nil, fmt.Errorf("workspace %s: %w", source, err)
		}
		// Follow links here, as the person who asks; the server follows none.
		if abs, err = filepath.EvalSymlinks(abs); err != nil {
			return nil, cannot(err, "use workspace %s", source)
		}
		if st, err := os.Stat(abs); err != nil || !st.IsDir() {
			return nil, errs.New(errs.InvalidArgument, "workspace %s is no directory", source)
		}
		out = append(out, &client.Workspace{Source: abs, Target: target})
	}
	return out, nil
}
