package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"casemate.dev/client"
)

func (a *app) inspectCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "inspect SANDBOX",
		Short: "Show a sandbox: state, limits, the isolation that holds it, its processes",
		Long: `Show everything about a sandbox: its state and limits, what it uses now, which layers of isolation
were really put in place, how long each step of its start took, and the processes started in it.

Exit codes: 0, or 125 when there is no such sandbox.`,
		Args:              exactly(1, "one sandbox"),
		ValidArgsFunction: a.completeSandboxes,
		RunE: a.withClient(func(ctx context.Context, c *client.Client, args []string) error {
			sb, err := c.Sandboxes.Get(ctx, args[0])
			if err != nil {
				return cannot(err, "inspect sandbox %s", args[0])
			}
			v := view{sandbox: sb, now: time.Now()}
			// A sandbox that has ended uses nothing, and its processes are in the journal only.
			if sb.GetState() != "stopped" {
				if v.usage, err = c.Sandboxes.Usage(ctx, sb.GetId()); err != nil {
					a.warn("usage is unknown: %s", err)
				}
				if v.processes, err = c.Processes.List(ctx, sb.GetId()); err != nil {
					a.warn("processes are unknown: %s", err)
				}
			}
			if a.json {
				return v.json(a)
			}
			v.write(a.stdout, a.color(a.stdout))
			return nil
		}),
	}
}

// view is what inspect shows of a sandbox.
type view struct {
	sandbox   *client.Sandbox
	usage     *client.Usage
	processes []*client.Process
	now       time.Time
}

func (v view) json(a *app) error {
	out := map[string]json.RawMessage{}
	var err error
	if out["sandbox"], err = marshalJSON(v.sandbox); err != nil {
		return err
	}
	if v.usage != nil {
		if out["usage"], err = marshalJSON(v.usage); err != nil {
			return err
		}
	}
	list := []json.RawMessage{}
	for _, p := range v.processes {
		raw, err := marshalJSON(p)
		if err != nil {
			return err
		}
		list = append(list, raw)
	}
	if out["processes"], err = json.Marshal(list); err != nil {
		return err
	}
	return a.printJSON(out)
}

func (v view) write(w io.Writer, color bool) {
	sb := v.sandbox
	title := sb.GetId()
	if n := handle(sb); n != sb.GetId() {
		title += "  " + n
	}
	fmt.Fprintln(w, paint(clean(title), bold, color))
	t := &table{indent: "  "}
	t.add("state", cell{v.state(), stateStyle(sb.GetState())})
	t.add("template", fmt.Sprintf("%s, profile %s, isolation %s", sb.GetTemplate(), sb.GetProfile(), sb.GetIsolation()))
	t.add("default", fmt.Sprintf("user %s in %s", sb.GetUser(), sb.GetDir()))
	t.add("owner", sb.GetOwner())
	if sb.GetParent() != "" {
		t.add("parent", sb.GetParent())
	}
	for _, k := range slices.Sorted(maps.Keys(sb.GetLabels())) {
		t.add("label", k+"="+sb.GetLabels()[k])
	}
	if sb.GetCommit() != "" {
		t.add("commit", sb.GetCommit())
	}
	if sb.GetHead() != sb.GetCommit() {
		t.add("head", sb.GetHead())
	}
	for _, ws := range sb.GetWorkspaces() {
		t.add("workspace", ws.GetSource()+" as "+ws.GetTarget())
	}
	if fc := sb.GetFileChanges(); fc != "" && fc != "off" {
		t.add("file changes", fc)
	}
	t.add("limits", limitsText(sb.GetLimits(), sb.GetApplied().GetLimits()))
	if u := v.usage; u != nil {
		t.add("usage", usageText(u))
	}
	t.write(w, color)
	if ap := sb.GetApplied(); ap.GetBackend() != "" {
		fmt.Fprintln(w, paint("isolation applied", bold, color))
		appliedTable(sb).write(w, color)
	}
	if len(sb.GetTimings()) > 0 {
		fmt.Fprintln(w, paint("start", bold, color), clean(timingsText(sb)))
	}
	if len(v.processes) > 0 {
		fmt.Fprintln(w, paint("processes", bold, color))
		v.processTable().write(w, color)
	}
}

func (v view) state() string {
	sb := v.sandbox
	var parts []string
	switch sb.GetState() {
	case "stopped":
		parts = append(parts, "stopped "+ago(when(sb.GetEndedAt()), v.now))
		if sb.GetEndReason() != "" {
			parts = append(parts, sb.GetEndReason())
		}
		if sb.GetEndDetail() != "" {
			parts = append(parts, sb.GetEndDetail())
		}
	default:
		parts = append(parts, stateText(sb)+", started "+ago(when(sb.GetStartedAt()), v.now))
		if sb.GetExpiresAt() != nil {
			parts = append(parts, "expires "+expires(sb, v.now))
		}
		if d := sb.GetIdle().AsDuration(); d > 0 {
			parts = append(parts, "ends when idle for "+formatDuration(d))
		}
	}
	return strings.Join(parts, ", ")
}

// limitsText shows the limits asked for, and where the server's store backs less disk or can't count files, what really holds.
func limitsText(l, applied *client.Limits) string {
	disk := formatSize(l.GetDiskBytes())
	if n := applied.GetDiskBytes(); n > 0 && n < l.GetDiskBytes() {
		disk = formatSize(n) + " (of " + disk + ": the store has no more)"
	}
	parts := []string{
		"memory " + formatSize(l.GetMemoryBytes()),
		fmt.Sprintf("cpus %.3g", l.GetCpus()),
		plural(int64(l.GetPids()), "process", "processes"),
		"disk " + disk,
		fmt.Sprintf("%d open files", l.GetOpenFiles()),
	}
	if l.GetInodes() > 0 {
		files := plural(l.GetInodes(), "file", "files")
		if applied.GetDiskBytes() > 0 && applied.GetInodes() == 0 {
			files = "as many files as the disk takes (not " + files + ": the store can't count them)"
		}
		parts = append(parts, files)
	}
	return strings.Join(parts, ", ")
}

func usageText(u *client.Usage) string {
	text := fmt.Sprintf("memory %s (peak %s), cpu %s, %s, disk %s", formatSize(u.GetMemoryBytes()),
		formatSize(u.GetMemoryPeakBytes()), formatDuration(u.GetCpu().AsDuration()),
		plural(int64(u.GetPids()), "process", "processes"), formatSize(u.GetDiskBytes()))
	if n := u.GetOomKills(); n > 0 {
		text += fmt.Sprintf(", %d killed for memory", n)
	}
	return text
}

// appliedTable shows each layer of isolation, and those that are missing in red.
func appliedTable(sb *client.Sandbox) *table {
	ap := sb.GetApplied()
	t := &table{indent: "  "}
	yes := func(ok bool, text string) cell {
		if ok {
			return cell{text: text}
		}
		return cell{"none", yellow}
	}
	if ap.GetUidCount() > 0 {
		first := uint64(ap.GetHostUid())
		t.add("host uids", fmt.Sprintf("%d to %d", first, first+uint64(ap.GetUidCount())-1))
	}
	t.add("namespaces", yes(len(ap.GetNamespaces()) > 0, strings.Join(ap.GetNamespaces(), " ")))
	caps := "none"
	if len(ap.GetCapabilities()) > 0 {
		caps = strings.ToLower(strings.Join(ap.GetCapabilities(), " "))
	}
	t.add("capabilities", caps)
	t.add("no_new_privs", map[bool]string{true: "yes", false: "no"}[ap.GetNoNewPrivs()])
	t.add("seccomp", yes(ap.GetSeccomp() != "", ap.GetSeccomp()))
	t.add("landlock", yes(ap.GetLandlockAbi() > 0, fmt.Sprintf("ABI %d", ap.GetLandlockAbi())))
	t.add("cgroup", yes(ap.GetCgroupVersion() > 0, fmt.Sprintf("v%d", ap.GetCgroupVersion())))
	t.add("disk limit", yes(ap.GetDisk() != "", diskText(ap.GetDisk(), ap.GetLimits())))
	t.add("network", networkText(sb))
	t.add("calls", callsText(ap.GetCalls()))
	t.add("guest", map[bool]string{true: "apart from the payload", false: "with the payload"}[ap.GetGuestSeparated()])
	for _, m := range ap.GetMissing() {
		t.add("missing", cell{m, red})
	}
	return t
}

// diskText names what limits the disk, and where that counts no files, says so.
func diskText(mechanism string, applied *client.Limits) string {
	if applied.GetInodes() == 0 {
		return mechanism + ", files by their bytes"
	}
	return mechanism
}

// callsText says which system calls are observed, and what an attempt brings about.
func callsText(calls map[string]string) string {
	var parts []string
	for _, kind := range []string{"attempts", "exec", "connect", "open"} {
		if text := calls[kind]; text != "" && text != "off" {
			parts = append(parts, kind+" "+text)
		}
	}
	if len(parts) == 0 {
		return "none is observed"
	}
	text := strings.Join(parts, ", ")
	if on := calls["on_attempt"]; on == "pause" || on == "kill" {
		text += "; an attempt: " + on
	}
	return text
}

// networkText names the way out, and whose default its rules are.
func networkText(sb *client.Sandbox) string {
	text := sb.GetApplied().GetNetwork()
	if t := sb.GetNetwork().GetTemplate(); t != "" {
		text += ", by the default rules of template " + t
	}
	return text
}

// timingsText shows the steps of a start, the longest first.
func timingsText(sb *client.Sandbox) string {
	type step struct {
		name string
		d    time.Duration
	}
	var steps []step
	total := ""
	for name, d := range sb.GetTimings() {
		if name == "total" {
			total = formatDuration(d.AsDuration()) + ": "
			continue
		}
		steps = append(steps, step{name, d.AsDuration()})
	}
	slices.SortFunc(steps, func(x, y step) int {
		if x.d != y.d {
			return int(y.d - x.d)
		}
		return strings.Compare(x.name, y.name)
	})
	parts := make([]string, len(steps))
	for i, s := range steps {
		parts[i] = s.name + " " + formatDuration(s.d)
	}
	return total + strings.Join(parts, ", ")
}

func (v view) processTable() *table {
	t := &table{indent: "  ", head: []string{"ID", "PID", "STARTED", "END", "COMMAND"}}
	for _, p := range v.processes {
		end := cell{"running", green}
		if p.GetEnd() != "" {
			end = cell{endText(p), faint}
		}
		t.add(p.GetId(), p.GetPid(), ago(when(p.GetStartedAt()), v.now), end, shorten(quoteArgv(p.GetArgv()), 60))
	}
	return t
}

// endText tells a process's end in a word or two.
func endText(p *client.Process) string {
	switch p.GetEnd() {
	case "exited":
		return fmt.Sprintf("exit %d", p.GetCode())
	case "signaled":
		return fmt.Sprintf("signal %d", p.GetSignal())
	}
	return strings.ReplaceAll(p.GetEnd(), "_", " ")
}
