package mcp

import (
	"context"
	"fmt"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/google/jsonschema-go/jsonschema"

	"casemate.dev/client"
)

// box describes a sandbox to a model.
type box struct {
	ID        string            `json:"id"`
	Name      string            `json:"name,omitempty"`
	State     string            `json:"state"`
	Template  string            `json:"template,omitempty"`
	Profile   string            `json:"profile,omitempty"`
	User      string            `json:"user,omitempty"`
	Dir       string            `json:"dir,omitempty" jsonschema:"Where commands start."`
	Network   string            `json:"network,omitempty"`
	MemoryMB  int64             `json:"memory_mb,omitempty"`
	CPUs      float64           `json:"cpus,omitempty"`
	DiskMB    int64             `json:"disk_mb,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`
	CreatedAt string            `json:"created_at,omitempty"`
	ExpiresAt string            `json:"expires_at,omitempty" jsonschema:"When it is deleted by itself; absent: never."`
	Own       bool              `json:"session_sandbox" jsonschema:"Whether it is this session's own sandbox, deleted with the session."`
}

func boxOf(sb *client.Sandbox, own string) box {
	return box{
		ID: sb.GetId(), Name: sb.GetName(), State: sb.GetState(), Template: sb.GetTemplate(), Profile: sb.GetProfile(),
		User: sb.GetUser(), Dir: sb.GetDir(), Network: sb.GetApplied().GetNetwork(),
		MemoryMB: sb.GetLimits().GetMemoryBytes() >> 20, CPUs: sb.GetLimits().GetCpus(), DiskMB: sb.GetLimits().GetDiskBytes() >> 20,
		Labels: sb.GetLabels(), CreatedAt: stamp(sb.GetCreatedAt()), ExpiresAt: stamp(sb.GetExpiresAt()),
		Own: own != "" && sb.GetId() == own,
	}
}

func stamp(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().UTC().Format(time.RFC3339)
}

// line is a sandbox in a list.
func (b box) line() string {
	s := b.ID
	if b.Name != "" && b.Name != b.ID {
		s += " (" + b.Name + ")"
	}
	s += fmt.Sprintf(" %s, template %s, profile %s", b.State, b.Template, b.Profile)
	if b.ExpiresAt != "" {
		s += ", until " + b.ExpiresAt
	}
	if b.Own {
		s += ", this session's own"
	}
	return s
}

type createInput struct {
	Template        string            `json:"template,omitempty" jsonschema:"What it starts from, e.g. host or base. Default: the server's."`
	Profile         string            `json:"profile,omitempty" jsonschema:"locked: an unprivileged user, for code nobody read. standard: root inside and sudo, to install packages. Default: the template's."`
	Name            string            `json:"name,omitempty" jsonschema:"A name to call it by: lower-case letters, digits and dashes."`
	MemoryMB        int64             `json:"memory_mb,omitempty" jsonschema:"Memory limit in MiB. Default: the server's."`
	CPUs            float64           `json:"cpus,omitempty" jsonschema:"CPU limit in cores. Default: the server's."`
	DiskMB          int64             `json:"disk_mb,omitempty" jsonschema:"Limit on what it writes, in MiB. Default: the server's."`
	Env             map[string]string `json:"env,omitempty" jsonschema:"Environment variables of all its processes."`
	Labels          map[string]string `json:"labels,omitempty" jsonschema:"Labels to find it by."`
	LifetimeMinutes *float64          `json:"lifetime_minutes,omitempty" jsonschema:"It is deleted after that many minutes. 0: never. Default: the server's, usually 60."`
}

type listInput struct {
	Label map[string]string `json:"labels,omitempty" jsonschema:"Only those that have all these labels."`
}

type listResult struct {
	Sandboxes []box `json:"sandboxes"`
}

type deleteInput struct {
	Sandbox string `json:"sandbox" jsonschema:"Id or name of the sandbox."`
}

type deleteResult struct {
	ID    string `json:"id"`
	State string `json:"state"`
}

func (s *Server) addSandboxTools() {
	add(s, tool{
		name: "create_sandbox", title: "Create a sandbox", kind: adds,
		text: "Make a sandbox that stays until delete_sandbox or the end of its lifetime, also after this session. " +
			"Not needed for ordinary work: other tools make this session's own sandbox by themselves. " +
			"Returns when it is running, usually within milliseconds.",
		shape: func(in *jsonschema.Schema) {
			in.Properties["profile"].Enum = []any{"locked", "standard"}
			// The default is the server's: the schema names none.
			for _, n := range []string{"memory_mb", "cpus", "disk_mb", "lifetime_minutes"} {
				zero := 0.0
				in.Properties[n].Minimum = &zero
			}
		},
	}, createSandbox)
	add(s, tool{
		name: "list_sandboxes", title: "List sandboxes", kind: reads,
		text: "List the sandboxes that this key may use, newest first, with their state, template and end.",
	}, listSandboxes)
	add(s, tool{
		name: "delete_sandbox", title: "Delete a sandbox", kind: replaces, idempotent: true,
		text: "End a sandbox with its processes and files, for good. Of this session's own sandbox it makes a fresh start: the next tool makes a new one.",
	}, deleteSandbox)
}

func createSandbox(ctx context.Context, c call, in createInput) (answer[box], error) {
	req := &client.CreateRequest{
		Template: in.Template, Profile: in.Profile, Name: in.Name, Env: in.Env, Labels: in.Labels,
		Limits: &client.Limits{MemoryBytes: in.MemoryMB << 20, Cpus: in.CPUs, DiskBytes: in.DiskMB << 20},
	}
	if in.LifetimeMinutes != nil {
		req.Lifetime = durationpb.New(time.Duration(*in.LifetimeMinutes * float64(time.Minute)))
	}
	sb, err := c.client.Sandboxes.Create(ctx, req)
	if err != nil {
		return answer[box]{}, err
	}
	b := boxOf(sb, "")
	return answer[box]{text: "created " + b.line(), out: b}, nil
}

func listSandboxes(ctx context.Context, c call, in listInput) (answer[listResult], error) {
	all, err := c.client.Sandboxes.All(ctx, &client.ListRequest{Labels: in.Label})
	if err != nil {
		return answer[listResult]{}, err
	}
	out := listResult{Sandboxes: make([]box, len(all))}
	lines := make([]string, len(all))
	for i, sb := range all {
		out.Sandboxes[i] = boxOf(sb, c.own())
		lines[i] = out.Sandboxes[i].line()
	}
	text := strings.Join(lines, "\n")
	if len(all) == 0 {
		text = "no sandboxes"
	}
	return answer[listResult]{text: text, out: out}, nil
}

func deleteSandbox(ctx context.Context, c call, in deleteInput) (answer[deleteResult], error) {
	sb, err := c.client.Sandboxes.Delete(ctx, in.Sandbox)
	if err != nil {
		return answer[deleteResult]{}, err
	}
	c.forget(sb.GetId())
	return answer[deleteResult]{text: "deleted " + sb.GetId(), out: deleteResult{ID: sb.GetId(), State: sb.GetState()}}, nil
}
