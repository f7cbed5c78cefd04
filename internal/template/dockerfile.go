package template

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/moby/buildkit/frontend/dockerfile/instructions"
	"github.com/moby/buildkit/frontend/dockerfile/parser"
	"github.com/moby/buildkit/frontend/dockerfile/shell"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/rootfs"
)

// maxDockerfile bounds a Dockerfile's text.
const maxDockerfile = 1 << 20

// dockerfile is a Dockerfile on its way to a plan.
type dockerfile struct {
	Dockerfile
	lex    *shell.Lex
	stages []*stage
	byName map[string]*stage
	// globals are ARGs before the first FROM, with their values, and those that every builder knows.
	globals map[string]string
	// used are those of Args that an ARG declares. Triggers of what a build begins with add to them.
	used map[string]bool
}

// compileDockerfile turns a Dockerfile into a plan of the stages that its target needs.
func compileDockerfile(r Request) (*plan, error) {
	d := &dockerfile{Dockerfile: *r.Dockerfile, byName: map[string]*stage{}, used: map[string]bool{}}
	d.Name = or(d.Name, "Dockerfile")
	if len(d.Text) > maxDockerfile {
		return nil, errs.New(errs.InvalidArgument, "%s is longer than %d bytes", d.Name, maxDockerfile)
	}
	if err := d.frontend(); err != nil {
		return nil, err
	}
	parsed, err := parser.Parse(strings.NewReader(d.Text))
	if err != nil {
		return nil, d.syntax(err)
	}
	d.lex = shell.NewLex(parsed.EscapeToken)
	stages, metaArgs, err := instructions.Parse(parsed.AST, nil)
	if err != nil {
		return nil, d.syntax(err)
	}
	if err := d.meta(metaArgs); err != nil {
		return nil, err
	}
	for i := range stages {
		if err := d.stage(&stages[i]); err != nil {
			return nil, err
		}
	}
	target, err := d.target()
	if err != nil {
		return nil, err
	}
	p := &plan{unused: d.unused}
	d.need(p, target)
	count := 0
	for _, s := range p.stages {
		for i := range s.ops {
			s.ops[i].step = number(&count)
		}
	}
	return p, nil
}

// syntax turns an error of the parser into one that names the line.
func (d *dockerfile) syntax(err error) error {
	at := d.Name
	var l *parser.LocationError
	if errors.As(err, &l) && len(l.Locations) > 0 && len(l.Locations[len(l.Locations)-1]) > 0 {
		at = d.at(l.Locations[len(l.Locations)-1])
	}
	return errs.Wrap(err, errs.InvalidArgument, "%s: %v", at, err)
}

// at names a place.
func (d *dockerfile) at(where []parser.Range) string {
	if len(where) == 0 {
		return d.Name
	}
	return d.Name + ":" + strconv.Itoa(where[0].Start.Line)
}

// env is what words are expanded from.
type env map[string]string

// Get implements shell.EnvGetter.
func (e env) Get(name string) (string, bool) { v, ok := e[name]; return v, ok }

// Keys implements shell.EnvGetter.
func (e env) Keys() []string { return slices.Sorted(maps.Keys(e)) }

func (d *dockerfile) expand(word string, from env) (string, error) {
	return expandBy(d.lex, word, from)
}

const (
	// maxWord bounds a word once it is expanded. Of what a program can be given, the kernel takes 128 KiB.
	maxWord = 2 << 20
	// maxExpansion bounds what expanding a word may make at most, in bytes, told before it is done: variables that
	// hold each other double with each line.
	maxExpansion = 256 << 20
)

// replaces finds the beginnings of ${variable/pattern/replacement}, which may put one value into another many times.
var replaces = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`\$\{[^}]*/`) })

func expandBy(lex *shell.Lex, word string, from env) (string, error) {
	longest := int64(0)
	for _, v := range from {
		longest = max(longest, int64(len(v)))
	}
	most := int64(len(word)) + int64(strings.Count(word, "$"))*longest
	if n := int64(len(replaces().FindAllStringIndex(word, -1))); n > 0 {
		most += n * longest * max(longest, int64(len(word)))
	}
	if most > maxExpansion {
		return "", errs.New(errs.ResourceExhausted, "the variables in %.40q could make it too long", word).WithHint("shorten what they hold")
	}
	out, _, err := lex.ProcessWord(word, from)
	if err == nil && len(out) > maxWord {
		err = errs.New(errs.ResourceExhausted, "%.40q is longer than %d MiB with what its variables hold", word, maxWord>>20)
	}
	return out, err
}

// stage reads one stage.
func (d *dockerfile) stage(st *instructions.Stage) error {
	at := d.at(st.Location)
	base, err := d.expand(st.BaseName, d.globals)
	if err != nil {
		return errs.Wrap(err, errs.InvalidArgument, "%s: %v", at, err)
	}
	if base == "" {
		return errs.New(errs.InvalidArgument, "%s: FROM %s names nothing", at, st.BaseName).
			WithHint("give its ARG a value, before the first FROM or with --build-arg")
	}
	if st.Platform != "" {
		want, err := d.expand(st.Platform, d.globals)
		if err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "%s: %v", at, err)
		}
		if own := runtime.GOOS + "/" + runtime.GOARCH; want != own {
			return errs.New(errs.Unsupported, "%s: FROM --platform=%s: this server builds for %s alone", at, want, own).
				WithHint("leave --platform out")
		}
	}
	s := &stage{name: st.Name, base: base, from: d.byName[strings.ToLower(base)], at: at, docker: d, before: len(d.stages)}
	for _, c := range st.Commands {
		o, err := d.command(s, c, d.at(c.Location()))
		if err != nil {
			return err
		}
		s.ops = append(s.ops, o)
	}
	d.stages = append(d.stages, s)
	if st.Name != "" {
		d.byName[strings.ToLower(st.Name)] = s
	}
	return nil
}

// target returns the stage to build.
func (d *dockerfile) target() (*stage, error) {
	if d.Target == "" {
		return d.stages[len(d.stages)-1], nil
	}
	if s := d.stageNamed(d.Target, len(d.stages)); s != nil {
		return s, nil
	}
	var names []string
	for _, s := range d.stages {
		if s.name != "" {
			names = append(names, s.name)
		}
	}
	return nil, errs.New(errs.NotFound, "%s has no stage %s", d.Name, d.Target).WithHint("it has: %s", strings.Join(names, ", "))
}

// stageNamed finds one of the first so many stages by its name or number.
func (d *dockerfile) stageNamed(ref string, among int) *stage {
	if s := d.byName[strings.ToLower(ref)]; s != nil && s.before < among {
		return s
	}
	if n, err := strconv.Atoi(ref); err == nil && n >= 0 && n < min(among, len(d.stages)) {
		return d.stages[n]
	}
	return nil
}

// need adds a stage to the plan, behind those that it needs.
func (d *dockerfile) need(p *plan, s *stage) {
	if slices.Contains(p.stages, s) {
		return
	}
	if s.from != nil {
		d.need(p, s.from)
	}
	for _, o := range s.ops {
		c, ok := o.do.(*dockerStep)
		if !ok {
			continue
		}
		for _, other := range c.needs {
			d.need(p, other)
		}
	}
	p.stages = append(p.stages, s)
}

// dockerStep is an instruction, whose words are expanded when what they stand for is known.
type dockerStep struct {
	d     *dockerfile
	c     instructions.Command
	in    *stage
	needs []*stage // that it copies from
}

// command reads one instruction of a stage. What can't be done is refused here, before anything is built.
func (d *dockerfile) command(in *stage, c instructions.Command, at string) (op, error) {
	step := &dockerStep{d: d, c: c, in: in}
	if err := step.check(); err != nil {
		text, hint := errs.PublicText(err)
		out := errs.Wrap(err, errs.KindOf(err), "%s: %s", at, text)
		if hint != "" {
			out = out.WithHint("%s", hint)
		}
		return op{}, out
	}
	if a, ok := c.(*instructions.ArgCommand); ok {
		for _, kv := range a.Args {
			d.arg(kv.Key) // now, so that one that is not used is told of at once
		}
	}
	return op{at: at, text: sourceText(c), do: step}, nil
}

// sourceText is an instruction as it was written, on one line.
func sourceText(c instructions.Command) string {
	text := c.Name()
	if s, ok := c.(fmt.Stringer); ok {
		text = s.String()
	}
	text = continuation().ReplaceAllString(text, " ")
	if first, _, more := strings.Cut(text, "\n"); more {
		text = first + " …"
	}
	const most = 500
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "…"
	}
	return text
}

// continuation is where a line goes on in the next.
var continuation = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`\s*\\\n\s*`) })

// check refuses what this builder does not do, and finds the stages that are copied from.
func (s *dockerStep) check() error {
	switch c := s.c.(type) {
	case *instructions.RunCommand:
		return s.checkRun(c)
	case *instructions.CopyCommand:
		if err := s.copiesFrom(c.From); err != nil {
			return err
		}
		for _, src := range c.SourcePaths {
			if remote(src) {
				return errs.New(errs.InvalidArgument, "COPY takes files, and %s is none", src)
			}
		}
		return nil
	case *instructions.AddCommand:
		if c.Checksum != "" || c.KeepGitDir != nil {
			return errs.New(errs.Unsupported, "ADD takes no --checksum and no --keep-git-dir: it downloads nothing").
				WithHint("download in a RUN step, and check it there: sha256sum -c")
		}
		for _, src := range c.SourcePaths {
			if err := refuseURL(src); err != nil {
				return err
			}
		}
		return nil
	case *instructions.OnbuildCommand:
		_, err := parseTrigger(c.Expression)
		return err
	case *instructions.EnvCommand, *instructions.ArgCommand, *instructions.LabelCommand, *instructions.WorkdirCommand,
		*instructions.UserCommand, *instructions.CmdCommand, *instructions.EntrypointCommand, *instructions.ExposeCommand,
		*instructions.ShellCommand, *instructions.StopSignalCommand, *instructions.HealthCheckCommand,
		*instructions.VolumeCommand, *instructions.MaintainerCommand:
		return nil
	}
	return errs.New(errs.Unsupported, "instruction %s is unknown", s.c.Name())
}

// checkRun refuses flags of RUN that can't hold.
func (s *dockerStep) checkRun(c *instructions.RunCommand) error {
	// Mounts are read when their words are expanded; now only for what they are, and again when that is known.
	if err := c.Expand(func(word string) (string, error) { return word, nil }); err != nil {
		return errs.Wrap(err, errs.InvalidArgument, "%v", err)
	}
	for _, m := range instructions.GetMounts(c) {
		switch m.Type {
		case instructions.MountTypeSecret:
			return errs.New(errs.Unsupported, "RUN --mount=type=secret: no secret ever enters a sandbox, a build's neither").
				WithHint("bind the secret to the hosts that ask for it; the gateway puts it on requests: casemate secrets bind")
		case instructions.MountTypeSSH:
			return errs.New(errs.Unsupported, "RUN --mount=type=ssh: no agent's socket is shown in a sandbox").
				WithHint("fetch over HTTPS, with a secret that is bound to the host: casemate secrets bind")
		}
		if err := s.copiesFrom(m.From); err != nil {
			return err
		}
	}
	if len(instructions.GetDevices(c)) > 0 {
		return errs.New(errs.Unsupported, "RUN --device: no device of this machine is shown in a sandbox")
	}
	if n := instructions.GetNetwork(c); n == instructions.NetworkHost {
		return errs.New(errs.Unsupported, "RUN --network=host: a step reaches what the build's rules allow, and never the host's network").
			WithHint("leave it out, and allow what is needed: --net, --allow")
	}
	if instructions.GetSecurity(c) == instructions.SecurityInsecure {
		return errs.New(errs.Unsupported, "RUN --security=insecure: no step leaves its walls")
	}
	return nil
}

// copiesFrom notes the stage that a step copies from. "" is the context, and what is no stage is found when it is its
// turn: a template, a commit or an image.
func (s *dockerStep) copiesFrom(ref string) error {
	if strings.Contains(ref, "$") {
		return errs.New(errs.InvalidArgument, "from=%s: variables are not expanded here", ref).
			WithHint("give the image a stage of its own: FROM %s AS name", ref)
	}
	other := s.d.stageNamed(ref, s.in.before)
	if _, err := strconv.Atoi(ref); err == nil && other == nil {
		return errs.New(errs.InvalidArgument, "from=%s: there is no stage %s before this one", ref, ref)
	}
	if other != nil {
		s.needs = append(s.needs, other)
	}
	return nil
}

// words returns what an instruction's words are expanded from. Of an ENV and an ARG of one name the later holds.
func words(s *state) env {
	e := env(s.env.toMap())
	maps.Copy(e, s.args)
	return e
}

// prepare implements action.
func (s *dockerStep) prepare(ctx context.Context, x *execution, st *state) (*work, error) {
	if err := x.stages(ctx, s.needs); err != nil {
		return nil, err
	}
	if c, ok := s.c.(*instructions.ArgCommand); ok {
		return nil, s.args(c, st)
	}
	e := words(st)
	word := func(w string) (string, error) { return s.d.expand(w, e) }
	if c, ok := s.c.(instructions.SupportsSingleWordExpansion); ok {
		if err := c.Expand(word); err != nil {
			return nil, errs.Wrap(err, errs.InvalidArgument, "%v", err)
		}
	}
	switch c := s.c.(type) {
	case *instructions.RunCommand:
		return s.run(c).prepare(ctx, x, st)
	case *instructions.CopyCommand:
		a, err := s.copy(&c.SourcesAndDest, e, c.Chown, c.Chmod)
		if err != nil {
			return nil, err
		}
		a.exclude, a.parents = c.ExcludePatterns, c.Parents
		s.copyFrom(a, c.From)
		return a.prepare(ctx, x, st)
	case *instructions.AddCommand:
		a, err := s.copy(&c.SourcesAndDest, e, c.Chown, c.Chmod)
		if err != nil {
			return nil, err
		}
		a.exclude, a.extract = c.ExcludePatterns, c.Unpack == nil || *c.Unpack
		return a.prepare(ctx, x, st)
	case *instructions.WorkdirCommand:
		return workdirAction{dir: func(*state) (string, error) { return c.Path, nil }, owner: st.image.User != ""}.prepare(ctx, x, st)
	}
	return nil, s.describe(st)
}

// describe does the instructions that only say something of the image.
func (s *dockerStep) describe(st *state) error {
	i := &st.image
	switch c := s.c.(type) {
	case *instructions.EnvCommand:
		for _, kv := range c.Env {
			st.env.set(kv.Key, kv.Value)
			delete(st.args, kv.Key)
		}
	case *instructions.LabelCommand:
		if i.Labels == nil {
			i.Labels = map[string]string{}
		}
		for _, kv := range c.Labels {
			i.Labels[kv.Key] = kv.Value
		}
	case *instructions.MaintainerCommand:
		if i.Labels == nil {
			i.Labels = map[string]string{}
		}
		i.Labels["maintainer"] = c.Maintainer
	case *instructions.UserCommand:
		i.User = c.User
	case *instructions.CmdCommand:
		i.Cmd, st.cmdSet = st.commandLine(c.ShellDependantCmdLine), true
	case *instructions.EntrypointCommand:
		i.Entrypoint = st.commandLine(c.ShellDependantCmdLine)
		if !st.cmdSet { // what it begins with has one that was meant for another entry point
			i.Cmd = nil
		}
	case *instructions.ShellCommand:
		i.Shell = slices.Clone(c.Shell)
	case *instructions.ExposeCommand:
		return s.expose(c, st)
	case *instructions.VolumeCommand:
		for _, v := range c.Volumes {
			if !slices.Contains(i.Volumes, v) {
				i.Volumes = append(i.Volumes, v)
			}
		}
	case *instructions.StopSignalCommand:
		if !isSignal(c.Signal) {
			return errs.New(errs.InvalidArgument, "STOPSIGNAL %s: that is no signal", c.Signal).WithHint("as in SIGTERM, INT or 9")
		}
		i.StopSignal = c.Signal
	case *instructions.OnbuildCommand:
		i.OnBuild = append(i.OnBuild, c.Expression)
	case *instructions.HealthCheckCommand:
		i.Healthcheck = &rootfs.Healthcheck{
			Test: slices.Clone(c.Health.Test), Interval: c.Health.Interval, Timeout: c.Health.Timeout,
			StartPeriod: c.Health.StartPeriod, StartInterval: c.Health.StartInterval, Retries: c.Health.Retries,
		}
	}
	return nil
}

// commandLine is a CMD or ENTRYPOINT as argv.
func (s *state) commandLine(c instructions.ShellDependantCmdLine) []string {
	if c.PrependShell {
		return append(slices.Clone(s.shell()), strings.Join(withHeredocs(c), " "))
	}
	return slices.Clone(c.CmdLine)
}

// expose adds ports, each of a range for itself, as docker build does.
func (s *dockerStep) expose(c *instructions.ExposeCommand, st *state) error {
	for _, word := range c.Ports {
		ports, err := s.d.lex.ProcessWords(word, words(st))
		if err != nil {
			return errs.Wrap(err, errs.InvalidArgument, "%v", err)
		}
		for _, p := range ports {
			port, proto, hasProto := strings.Cut(strings.ToLower(p), "/")
			if !hasProto {
				proto = "tcp"
			}
			from, to, isRange := strings.Cut(port, "-")
			if !isRange {
				to = from
			}
			first, last := portNumber(from), portNumber(to)
			if first == 0 || last < first || proto != "tcp" && proto != "udp" && proto != "sctp" {
				return errs.New(errs.InvalidArgument, "EXPOSE %s: that is no port", p).WithHint("as in 8080, 53/udp or 8000-8010")
			}
			for n := first; n <= last; n++ {
				if full := strconv.Itoa(n) + "/" + proto; !slices.Contains(st.image.Exposed, full) {
					st.image.Exposed = append(st.image.Exposed, full)
				}
				if len(st.image.Exposed) > maxExposed {
					return errs.New(errs.InvalidArgument, "EXPOSE %s: more than %d ports are exposed", p, maxExposed)
				}
			}
		}
	}
	return nil
}

// maxExposed bounds the ports of an image.
const maxExposed = 4096

// portNumber reads a port; 0: it is none.
func portNumber(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || n >= 1<<16 {
		return 0
	}
	return n
}

// withHeredocs puts the texts of heredocs back behind the line that names them.
func withHeredocs(c instructions.ShellDependantCmdLine) []string {
	line := slices.Clone(c.CmdLine)
	for _, f := range c.Files {
		line[len(line)-1] += "\n" + f.Data + f.Name
	}
	return line
}

// run returns what a RUN does.
func (s *dockerStep) run(c *instructions.RunCommand) *runAction {
	a := &runAction{vars: true, proxies: s.d.proxies(), offline: instructions.GetNetwork(c) == instructions.NetworkNone}
	switch {
	case len(c.Files) == 1 && len(c.CmdLine) == 1 && strings.HasPrefix(strings.TrimSpace(c.CmdLine[0]), "<<") && onlyHeredoc(c.CmdLine[0]):
		a.script = c.Files[0].Data
		if c.Files[0].Chomp {
			a.script = parser.ChompHeredocContent(a.script)
		}
		a.line = c.CmdLine[0]
	case c.PrependShell:
		a.line = strings.Join(withHeredocs(c.ShellDependantCmdLine), " ")
	default:
		a.argv = slices.Clone(c.CmdLine)
	}
	for _, m := range instructions.GetMounts(c) {
		out := mount{target: m.Target}
		if m.Mode != nil {
			out.mode = uint32(*m.Mode) & 0o7777
		}
		if m.UID != nil {
			out.owner = strconv.FormatUint(*m.UID, 10)
		}
		if m.Type == instructions.MountTypeBind || m.From != "" {
			out.source = &copyAction{sources: []string{or(m.Source, "/")}}
			s.copyFrom(out.source, m.From)
		}
		a.mounts = append(a.mounts, out)
	}
	return a
}

// onlyHeredoc reports whether a line is nothing but the name of a heredoc.
func onlyHeredoc(line string) bool {
	return heredocOnly().MatchString(line)
}

var heredocOnly = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^\s*<<-?\s*(['"]?)[A-Za-z_][A-Za-z0-9_]*(['"]?)\s*$`)
})

// copy returns what a COPY or an ADD does.
func (s *dockerStep) copy(c *instructions.SourcesAndDest, e env, chown, chmod string) (*copyAction, error) {
	a := &copyAction{sources: slices.Clone(c.SourcePaths), dest: c.DestPath, owner: chown, mode: chmod, optional: true}
	for _, content := range c.SourceContents {
		data := content.Data
		if content.Expand {
			raw := *s.d.lex
			raw.RawQuotes, raw.RawEscapes, raw.SkipProcessQuotes = true, true, true
			var err error
			if data, err = expandBy(&raw, data, e); err != nil {
				return nil, errs.Wrap(err, errs.InvalidArgument, "%v", err)
			}
		}
		a.contents = append(a.contents, inlineFile{name: path.Base(content.Path), data: data})
	}
	return a, nil
}

// copyFrom says where an action copies from; "" is the context.
func (s *dockerStep) copyFrom(a *copyAction, from string) {
	if from == "" {
		return
	}
	if a.stage = s.d.stageNamed(from, s.in.before); a.stage == nil {
		a.image = from
	}
}
