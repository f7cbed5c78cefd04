package selftest

import (
	"context"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"casemate.dev/client"
)

// Server is a Target that makes sandboxes through a server's API.
type Server struct {
	client    *client.Client
	local     bool
	templates map[string]string // by profile
}

var _ Target = (*Server)(nil)

// NewServer returns a Target for the server that c talks to. Its sandboxes are of the built-in templates that allow their
// profile: the host's own programs are for locked only, since its setuid programs must not work inside.
func NewServer(c *client.Client) *Server {
	return &Server{client: c, local: strings.HasPrefix(c.URL(), "unix:"), templates: map[string]string{"locked": "host", "standard": StandardTemplate}}
}

// StandardTemplate is the built-in template of sandboxes of profile standard.
const StandardTemplate = "base"

// Use makes the sandboxes of a profile of another template.
func (s *Server) Use(profile, template string) { s.templates[profile] = template }

// Local implements Target: a server on a Unix socket is on this machine.
func (s *Server) Local() bool { return s.local }

// Create implements Target. The sandbox ends by itself after an hour, should nobody delete it.
func (s *Server) Create(ctx context.Context, spec Spec) (Sandbox, error) {
	req := &client.CreateRequest{
		Template: s.templates[spec.Profile], Isolation: spec.Isolation, Profile: spec.Profile, Env: spec.Env,
		Labels:   map[string]string{"casemate": "selftest"},
		Lifetime: durationpb.New(time.Hour),
		Limits: &client.Limits{
			MemoryBytes: spec.Limits.MemoryBytes, Cpus: spec.Limits.CPUs, Pids: int32(spec.Limits.Pids),
			OpenFiles: int32(spec.Limits.OpenFiles), DiskBytes: spec.Limits.DiskBytes,
		},
	}
	if spec.Network != nil {
		req.Network = &client.NetworkRules{Rules: spec.Network}
	}
	sb, err := s.client.Sandboxes.Create(ctx, req)
	if err != nil {
		return nil, err
	}
	return &serverSandbox{client: s.client, id: sb.GetId()}, nil
}

type serverSandbox struct {
	client *client.Client
	id     string
}

func (s *serverSandbox) ID() string { return s.id }

func (s *serverSandbox) Run(ctx context.Context, c Command) (Result, error) {
	spec := &client.ProcessSpec{Argv: c.Argv, Env: c.Env, Dir: c.Dir, User: c.User}
	if c.TTY {
		spec.Terminal = &client.Terminal{Rows: 24, Cols: 80}
	}
	if c.Timeout > 0 {
		spec.Timeout = durationpb.New(c.Timeout)
	}
	begun := time.Now()
	res, err := s.client.Processes.Execute(ctx, s.id, spec, []byte(c.Input))
	if err != nil {
		return Result{}, err
	}
	p := res.GetProcess()
	return Result{
		End: p.GetEnd(), Code: int(p.GetCode()), Signal: int(p.GetSignal()), Bytes: p.GetBytes(),
		Output: string(res.GetStdout()) + string(res.GetStderr()), Took: time.Since(begun),
	}, nil
}

func (s *serverSandbox) List(ctx context.Context, path string) ([]string, error) {
	files, err := s.client.Files.List(ctx, s.id, path, "", 1)
	if err != nil {
		return nil, err
	}
	names := make([]string, 0, len(files))
	for _, f := range files {
		names = append(names, f.GetName())
	}
	return names, nil
}

func (s *serverSandbox) Read(ctx context.Context, path string) ([]byte, error) {
	return s.client.Files.ReadAll(ctx, s.id, path)
}

func (s *serverSandbox) CPU(ctx context.Context) (time.Duration, error) {
	u, err := s.client.Sandboxes.Usage(ctx, s.id)
	return u.GetCpu().AsDuration(), err
}

func (s *serverSandbox) Ended(ctx context.Context) (string, error) {
	sb, err := s.client.Sandboxes.Get(ctx, s.id)
	if err != nil || sb.GetEndReason() == "" {
		return "", err
	}
	return strings.TrimSuffix(sb.GetEndReason()+": "+sb.GetEndDetail(), ": "), nil
}

func (s *serverSandbox) Delete(ctx context.Context) error {
	_, err := s.client.Sandboxes.Delete(ctx, s.id)
	return err
}
