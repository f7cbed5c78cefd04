package api

import (
	"cmp"
	"encoding/json"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/journal"
	"casemate.dev/internal/policy"
	"casemate.dev/internal/sandbox"
	v1 "casemate.dev/proto/casemate/v1"
)

// stamp leaves zero times unset.
func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// span leaves zero durations unset.
func span(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

// clamp32 narrows a count to what the schema carries.
func clamp32[N ~int | ~int64 | ~uint32](n N) int32 {
	return int32(max(min(int64(n), 1<<31-1), -1<<31)) //nolint:gosec // bounded in the same line
}

func sandboxMessage(s sandbox.Sandbox) *v1.Sandbox {
	m := &v1.Sandbox{
		Id:          s.ID,
		State:       string(s.State),
		Name:        s.Spec.Name,
		Template:    s.Spec.Template,
		Isolation:   s.Spec.Isolation,
		Profile:     string(s.Spec.Profile),
		Labels:      s.Spec.Labels,
		Limits:      limitsMessage(s.Spec.Limits),
		Owner:       s.Owner,
		Parent:      s.Parent,
		CreatedAt:   stamp(s.CreatedAt),
		StartedAt:   stamp(s.StartedAt),
		EndedAt:     stamp(s.EndedAt),
		ExpiresAt:   stamp(s.ExpiresAt),
		Idle:        span(s.Spec.Idle),
		EndReason:   string(s.EndReason),
		EndDetail:   s.EndDetail,
		User:        s.Spec.User,
		Dir:         s.Spec.Dir,
		Network:     networkMessage(s.Spec.Network),
		Calls:       callsMessage(s.Spec.Calls),
		FilesOnly:   s.FilesOnly,
		OnDisk:      s.OnDisk,
		Commit:      s.Spec.Commit,
		Head:        s.Head,
		Record:      string(s.Spec.Record),
		FileChanges: string(cmp.Or(s.Spec.FileChanges, sandbox.FileChangesOff)),
	}
	if s.Applied.Backend != "" {
		m.Applied = appliedMessage(s.Applied)
	}
	for _, w := range s.Spec.Workspaces {
		m.Workspaces = append(m.Workspaces, &v1.Workspace{Source: w.Source, Target: w.Target})
	}
	if len(s.Timings) > 0 {
		m.Timings = make(map[string]*durationpb.Duration, len(s.Timings))
		for step, d := range s.Timings {
			m.Timings[step] = durationpb.New(d)
		}
	}
	return m
}

func appliedMessage(a sandbox.Applied) *v1.Applied {
	return &v1.Applied{
		Backend:        a.Backend,
		Profile:        string(a.Profile),
		HostUid:        a.HostUID,
		UidCount:       a.UIDCount,
		Namespaces:     a.Namespaces,
		Capabilities:   a.Capabilities,
		NoNewPrivs:     a.NoNewPrivs,
		Seccomp:        a.Seccomp,
		LandlockAbi:    clamp32(a.LandlockABI),
		CgroupVersion:  clamp32(a.CgroupVersion),
		Limits:         limitsMessage(a.Limits),
		Disk:           a.Disk,
		Network:        a.Network,
		GuestSeparated: a.GuestSeparated,
		Missing:        a.Missing,
		Calls:          a.Calls,
	}
}

func callsMessage(c *sandbox.Calls) *v1.Calls {
	if c == nil {
		return nil
	}
	return &v1.Calls{Attempts: c.Attempts, Exec: c.Exec, Connect: c.Connect, Open: c.Open, OnAttempt: string(c.OnAttempt)}
}

func callsOf(m *v1.Calls) *sandbox.Calls {
	if m == nil {
		return nil
	}
	return &sandbox.Calls{
		Attempts: m.GetAttempts(), Exec: m.GetExec(), Connect: m.GetConnect(), Open: m.GetOpen(), OnAttempt: sandbox.Reaction(m.GetOnAttempt()),
	}
}

func limitsMessage(l sandbox.Limits) *v1.Limits {
	return &v1.Limits{
		MemoryBytes: l.MemoryBytes,
		Cpus:        l.CPUs,
		Pids:        clamp32(l.Pids),
		OpenFiles:   clamp32(l.OpenFiles),
		DiskBytes:   l.DiskBytes,
		Inodes:      l.Inodes,
	}
}

func limitsOf(m *v1.Limits) sandbox.Limits {
	return sandbox.Limits{
		MemoryBytes: m.GetMemoryBytes(),
		CPUs:        m.GetCpus(),
		Pids:        int(m.GetPids()),
		OpenFiles:   int(m.GetOpenFiles()),
		DiskBytes:   m.GetDiskBytes(),
		Inodes:      m.GetInodes(),
	}
}

func specOf(m *v1.CreateSandboxRequest) sandbox.Spec {
	s := sandbox.Spec{
		Template:     m.GetTemplate(),
		Isolation:    m.GetIsolation(),
		Profile:      sandbox.Profile(m.GetProfile()),
		Limits:       limitsOf(m.GetLimits()),
		Name:         m.GetName(),
		Labels:       m.GetLabels(),
		Env:          m.GetEnv(),
		User:         m.GetUser(),
		Dir:          m.GetDir(),
		Idle:         m.GetIdle().AsDuration(),
		AllowMissing: m.GetAllowMissing(),
		Network:      networkOf(m.GetNetwork()),
		NoNetwork:    m.GetNoNetwork(),
		Record:       sandbox.Recording(m.GetRecord()),
		FileChanges:  sandbox.FileChanges(m.GetFileChanges()),
		Calls:        callsOf(m.GetCalls()),
	}
	if m.GetLifetime() != nil {
		s.Lifetime = m.GetLifetime().AsDuration()
		if s.Lifetime <= 0 {
			s.Lifetime = -1 // the domain's "none"; its zero is the default
		}
	}
	for _, w := range m.GetWorkspaces() {
		s.Workspaces = append(s.Workspaces, sandbox.Workspace{Source: w.GetSource(), Target: w.GetTarget()})
	}
	return s
}

func processMessage(p sandbox.Process) *v1.Process {
	return &v1.Process{
		Id:          p.ID,
		Sandbox:     p.SandboxID,
		Argv:        p.Argv,
		Dir:         p.Dir,
		User:        p.User,
		Pid:         clamp32(p.PID),
		Tty:         p.TTY,
		StartedAt:   stamp(p.StartedAt),
		EndedAt:     stamp(p.EndedAt),
		End:         string(p.End),
		Code:        clamp32(p.Code),
		Signal:      clamp32(p.Signal),
		Error:       p.Error,
		Bytes:       p.Bytes,
		Dropped:     p.Dropped,
		CpuUser:     span(p.UserTime),
		CpuSystem:   span(p.SystemTime),
		MaxRssBytes: p.MaxRSS,
		Leftover:    clamp32(p.Leftover),
		Attached:    p.Attached,
		OomKills:    p.OOMKills,
		Refused:     refusalMessages(p.Refused),
	}
}

func processSpecOf(m *v1.ProcessSpec) sandbox.ProcessSpec {
	s := sandbox.ProcessSpec{
		ID:      m.GetId(),
		Argv:    m.GetArgv(),
		Env:     m.GetEnv(),
		Dir:     m.GetDir(),
		User:    m.GetUser(),
		Stdin:   m.GetStdin(),
		Timeout: m.GetTimeout().AsDuration(),
		Hold:    m.GetHold(),
	}
	if t := m.GetTerminal(); t != nil {
		s.TTY = true
		s.Rows, s.Cols = terminalSize(t)
	}
	return s
}

// terminalSize narrows a terminal's size to what a kernel takes.
func terminalSize(t *v1.Terminal) (rows, cols uint16) {
	return uint16(min(t.GetRows(), 1<<16-1)), uint16(min(t.GetCols(), 1<<16-1)) //nolint:gosec // bounded in the same line
}

func gapMessage(g sandbox.Gap) *v1.Gap { return &v1.Gap{From: g.From, To: g.To} }

func fileMessage(f sandbox.FileInfo) *v1.File {
	m := &v1.File{
		Path:   f.Path,
		Name:   f.Name,
		Type:   string(f.Type),
		Size:   f.Size,
		Mode:   f.Mode,
		Uid:    clamp32(f.UID),
		Gid:    clamp32(f.GID),
		Owner:  f.Owner,
		Group:  f.Group,
		Target: f.Target,
	}
	if f.MTime != 0 {
		m.ModifiedAt = timestamppb.New(time.Unix(0, f.MTime))
	}
	return m
}

func eventMessage(e journal.Event) *v1.Event {
	m := &v1.Event{
		Sandbox: e.Sandbox,
		Seq:     e.Seq,
		Time:    stamp(e.Time),
		Type:    string(e.Type),
		Actor:   e.Actor,
		Process: e.Process,
	}
	if len(e.Facts) == 0 {
		return m
	}
	m.Facts = make(map[string]*structpb.Struct, len(e.Facts))
	for observer, raw := range e.Facts {
		m.Facts[string(observer)] = factsMessage(raw)
	}
	for _, b := range e.Bodies {
		showBody(m.Facts[string(b.By)], b)
	}
	return m
}

// showBody puts a process's arguments, which are JSON, and code in the place of their hash.
func showBody(facts *structpb.Struct, b journal.Body) {
	if int64(len(b.Data)) != b.Size || b.Size == 0 || facts.GetFields()[b.Name] == nil {
		return
	}
	var v structpb.Value
	switch b.Name {
	case "argv":
		if v.UnmarshalJSON(b.Data) == nil {
			facts.Fields[b.Name] = &v
		}
	case "code":
		facts.Fields[b.Name] = structpb.NewStringValue(strings.ToValidUTF8(string(b.Data), "\uFFFD"))
	}
}

// factsMessage carries a JSON object over; what is none shows as it is, under "raw".
func factsMessage(raw json.RawMessage) *structpb.Struct {
	s := &structpb.Struct{}
	if err := s.UnmarshalJSON(raw); err != nil {
		return &structpb.Struct{Fields: map[string]*structpb.Value{"raw": structpb.NewStringValue(strings.ToValidUTF8(string(raw), "\uFFFD"))}}
	}
	return s
}

func templateMessage(t sandbox.Template) *v1.Template {
	return &v1.Template{
		Name:        t.Name,
		Description: t.Description,
		Profiles:    t.Profiles,
		Ready:       t.Ready,
		SizeBytes:   t.SizeBytes,
		BuiltAt:     stamp(t.BuiltAt),
	}
}

func keyMessage(k policy.Key) *v1.Key {
	return &v1.Key{Id: k.ID, Name: k.Name, CreatedAt: stamp(k.CreatedAt), RevokedAt: stamp(k.RevokedAt), Admin: k.Admin}
}

// signalNumber reads a signal: a number, or a name with or without "SIG". Empty means TERM, as for
// kill(1). The numbers are those of asm-generic/signal.h, which amd64 and arm64 share.
func signalNumber(s string) (int, error) {
	if s == "" {
		return 15, nil
	}
	if n, err := strconv.Atoi(s); err == nil {
		if n < 1 || n > 64 {
			return 0, errs.New(errs.InvalidArgument, "signal %d is not within 1 to 64", n)
		}
		return n, nil
	}
	names := [...]string{
		1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 5: "TRAP", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 10: "USR1",
		11: "SEGV", 12: "USR2", 13: "PIPE", 14: "ALRM", 15: "TERM", 16: "STKFLT", 17: "CHLD", 18: "CONT", 19: "STOP",
		20: "TSTP", 21: "TTIN", 22: "TTOU", 23: "URG", 24: "XCPU", 25: "XFSZ", 26: "VTALRM", 27: "PROF", 28: "WINCH",
		29: "IO", 30: "PWR", 31: "SYS",
	}
	want := strings.TrimPrefix(strings.ToUpper(s), "SIG")
	for n, name := range names {
		if n > 0 && name == want {
			return n, nil
		}
	}
	return 0, errs.New(errs.InvalidArgument, "no signal is called %q", s).WithHint("use a number, or a name such as TERM, KILL or HUP")
}

// labelsOf joins both ways to name labels in a query.
func labelsOf(m map[string]string, pairs []string) (map[string]string, error) {
	if len(pairs) == 0 {
		return m, nil
	}
	out := make(map[string]string, len(m)+len(pairs))
	for k, v := range m {
		out[k] = v
	}
	for _, pair := range pairs {
		k, v, ok := strings.Cut(pair, "=")
		if !ok || k == "" {
			return nil, errs.New(errs.InvalidArgument, "label %q is not of the form key=value", pair)
		}
		out[k] = v
	}
	return out, nil
}
