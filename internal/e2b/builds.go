package e2b

import (
	"cmp"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"casemate.dev/internal/errs"
	"casemate.dev/internal/id"
	"casemate.dev/internal/sandbox"
	"casemate.dev/internal/template"
)

// The bounds of builds.
const (
	// pendingFor is how long a build may wait for its steps: files are uploaded meanwhile.
	pendingFor = 2 * time.Hour
	maxPending = 1000
	// maxBuildLogs is how many entries of a log one answer holds.
	maxBuildLogs = 100
	// readyWithin is how long a start command may take to be ready.
	readyWithin = 5 * time.Minute
)

// The user and directory of E2B's templates.
const (
	buildUser = "user"
	buildDir  = "/home/user"
)

// pendingBuild was asked for and has no steps yet.
type pendingBuild struct {
	owner  string
	name   string
	tags   []string
	limits sandbox.Limits
	asked  time.Time
}

// templateRequest is the request of both versions; version 2 names the template by alias.
type templateRequest struct {
	Name     string   `json:"name"`
	Alias    string   `json:"alias"`
	Tags     []string `json:"tags"`
	CPUCount int64    `json:"cpuCount"`
	MemoryMB int64    `json:"memoryMB"`
	// MinFreeDiskMB is what a sandbox's disk has free at least: all of its own layer, here.
	MinFreeDiskMB int64 `json:"minFreeDiskMb"`
}

// buildName takes what names a build, and its tags, apart.
func (r templateRequest) buildName() (name string, tags []string, err error) {
	ref := strings.ToLower(cmp.Or(r.Name, r.Alias))
	if ref == "" {
		return "", nil, fail(http.StatusBadRequest, "Error when parsing request: name is missing")
	}
	name, tag := parseTemplate(ref)
	if _, given, ok := strings.Cut(ref[strings.LastIndexByte(ref, '/')+1:], ":"); ok {
		if given == "" || strings.Contains(given, ":") {
			return "", nil, fail(http.StatusBadRequest, "Invalid template name '%s'", ref)
		}
		tags = append(tags, tag)
	}
	for _, t := range r.Tags {
		t = strings.ToLower(t)
		if err := checkTag(t); err != nil {
			return "", nil, err
		}
		if !slices.Contains(tags, t) {
			tags = append(tags, t)
		}
	}
	if len(tags) == 0 {
		tags = []string{defaultTag}
	}
	return name, tags, nil
}

func checkTag(tag string) error {
	if tag == "" || strings.ContainsAny(tag, ":/ ") {
		return fail(http.StatusBadRequest, "Invalid tag '%s': use letters, digits and . _ -", tag)
	}
	return nil
}

// requestTemplate makes room for a build, whose steps follow.
func (a *API) requestTemplate(c call) error {
	if a.cfg.Builder == nil {
		return notYet("building templates")
	}
	var req templateRequest
	if err := c.decode(&req); err != nil {
		return err
	}
	name, tags, err := req.buildName()
	if err != nil {
		return err
	}
	all, err := a.allTemplates(c)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(all, func(t sandbox.Template) bool { return t.Name == name }) {
		return fail(http.StatusConflict, "template '%s' comes with the server: give yours another name", name)
	}
	const most = 1 << 30 // MiB: more than there is, and no overflow in bytes
	for _, n := range []int64{req.CPUCount, req.MemoryMB, req.MinFreeDiskMB} {
		if n < 0 || n > most {
			return fail(http.StatusBadRequest, "cpuCount, memoryMB and minFreeDiskMb must be within 0 and %d", most)
		}
	}
	p := &pendingBuild{
		owner: c.p.ID, name: name, tags: tags, asked: time.Now(),
		limits: sandbox.Limits{CPUs: float64(req.CPUCount), MemoryBytes: req.MemoryMB << 20},
	}
	if disk := req.MinFreeDiskMB << 20; disk > sandbox.DefaultLimits(sandbox.Limits{}).DiskBytes {
		p.limits.DiskBytes = disk
	}
	buildID := id.New(id.Build)
	if err := a.await(buildID, p); err != nil {
		return err
	}
	return c.json(http.StatusAccepted, map[string]any{
		"templateID": name, "buildID": buildUUID(buildID), "public": false, "names": []string{namespace + name}, "aliases": []string{name}, "tags": tags,
	})
}

// await keeps a build that waits for its steps.
func (a *API) await(buildID string, p *pendingBuild) error {
	a.pendingMu.Lock()
	defer a.pendingMu.Unlock()
	for k, old := range a.pending {
		if p.asked.Sub(old.asked) > pendingFor {
			delete(a.pending, k)
		}
	}
	if len(a.pending) >= maxPending {
		return errs.New(errs.ResourceExhausted, "%d builds wait for their steps already", maxPending)
	}
	a.pending[buildID] = p
	return nil
}

// waiting returns a build that waits for its steps, which take removes.
func (a *API) waiting(c call, buildID string, take bool) (*pendingBuild, bool) {
	a.pendingMu.Lock()
	defer a.pendingMu.Unlock()
	p, ok := a.pending[buildID]
	if !ok || p.owner != c.p.ID {
		return nil, false
	}
	if take {
		delete(a.pending, buildID)
	}
	return p, true
}

// buildStart holds the steps of a build.
type buildStart struct {
	FromImage         string        `json:"fromImage"`
	FromTemplate      string        `json:"fromTemplate"`
	FromImageRegistry *registryAuth `json:"fromImageRegistry"`
	Force             bool          `json:"force"`
	StartCmd          string        `json:"startCmd"`
	ReadyCmd          string        `json:"readyCmd"`
	Steps             []struct {
		Type      string   `json:"type"`
		Args      []string `json:"args"`
		FilesHash string   `json:"filesHash"`
		Force     bool     `json:"force"`
	} `json:"steps"`
}

// registryAuth is what an image's registry is shown, in one of three forms that Type tells.
type registryAuth struct {
	Type               string `json:"type"`
	Username           string `json:"username"`
	Password           string `json:"password"`
	ServiceAccountJSON string `json:"serviceAccountJson"`
}

// credentials returns a user and a password.
func (r *registryAuth) credentials() (template.Credentials, error) {
	if r == nil {
		return template.Credentials{}, nil
	}
	c := template.Credentials{User: r.Username, Password: r.Password}
	switch r.Type {
	case "registry":
	case "gcp": // the registry takes a service account's key as a password
		c = template.Credentials{User: "_json_key", Password: r.ServiceAccountJSON}
	case "aws":
		return c, errs.New(errs.Unsupported, "fromAWSRegistry: this server asks AWS for no token").
			WithHint("give the token as a password: user AWS, and what aws ecr get-login-password prints")
	default:
		return c, fail(http.StatusBadRequest, "fromImageRegistry has the unknown type '%s'", r.Type)
	}
	if c.User == "" || c.Password == "" {
		return c, fail(http.StatusBadRequest, "fromImageRegistry lacks a user or a password")
	}
	return c, nil
}

// baseImage is the image that E2B's SDKs begin with where their user names none: what template base is here.
const baseImage = "e2bdev/base"

// from returns what the build begins with.
func (a *API) from(c call, s buildStart) (string, error) {
	switch {
	case s.FromImageRegistry != nil && s.FromImage == "":
		return "", fail(http.StatusBadRequest, "fromImageRegistry goes with fromImage")
	case s.FromImage != "" && s.FromTemplate != "":
		return "", fail(http.StatusBadRequest, "a build begins with an image or a template, not both")
	case s.FromImage != "":
		if ref, _, _ := strings.Cut(s.FromImage, ":"); ref != baseImage {
			return s.FromImage, nil
		}
		s.FromTemplate = "base"
	case s.FromTemplate == "":
		return "", fail(http.StatusBadRequest, "a build begins with an image or a template: neither is named")
	}
	t, err := a.resolveTemplate(c, s.FromTemplate)
	return t.name, err
}

// startBuild starts a build that was asked for.
func (a *API) startBuild(c call) error {
	if a.cfg.Builder == nil {
		return notYet("building templates")
	}
	var s buildStart
	if err := c.decode(&s); err != nil {
		return err
	}
	buildID := ofUUID(c.r.PathValue("build"))
	p, ok := a.waiting(c, buildID, false)
	if !ok || p.name != c.r.PathValue("id") {
		return fail(http.StatusNotFound, "build '%s' not found, or it was started already", c.r.PathValue("build"))
	}
	from, err := a.from(c, s)
	if err != nil {
		return err
	}
	auth, err := s.FromImageRegistry.credentials()
	if err != nil {
		return err
	}
	r := template.Request{
		ID: buildID, Name: p.name, From: from, FromAuth: auth, User: buildUser, Dir: buildDir, Provision: from == s.FromImage, Start: s.StartCmd, Ready: s.ReadyCmd, ReadyWithin: readyWithin,
		Limits: p.limits, BuildLimits: p.limits, Network: (*networkConfig)(nil).wayOut(nil), NoCache: s.Force,
		Tags: p.tags, TagsAlone: !slices.Contains(p.tags, defaultTag),
	}
	for _, step := range s.Steps {
		// What a pattern finds goes into a directory, even where that is one file.
		if step.Type == "COPY" && len(step.Args) > 1 && strings.ContainsAny(step.Args[0], "*?[") && !strings.HasSuffix(step.Args[1], "/") {
			step.Args[1] += "/"
		}
		r.Steps = append(r.Steps, template.Step{Type: step.Type, Args: step.Args, FilesHash: step.FilesHash, Force: step.Force})
	}
	if _, err := a.cfg.Builder.Start(c.r.Context(), c.p, r); err != nil {
		return err
	}
	a.waiting(c, buildID, true)
	c.w.Header().Set("Content-Length", "0") // a chunked empty body is no JSON to the SDKs
	c.w.WriteHeader(http.StatusAccepted)
	return nil
}

// buildLogJSON is one entry of a build's log.
type buildLogJSON struct {
	Timestamp time.Time `json:"timestamp"`
	Message   string    `json:"message"`
	Level     string    `json:"level"`
	Step      string    `json:"step,omitempty"`
}

// buildReason says why a build failed.
type buildReason struct {
	Message    string         `json:"message"`
	Step       string         `json:"step,omitempty"`
	LogEntries []buildLogJSON `json:"logEntries"`
}

// buildStatusJSON is a build and a piece of its log.
type buildStatusJSON struct {
	TemplateID string         `json:"templateID"`
	BuildID    string         `json:"buildID"`
	Status     string         `json:"status"`
	Logs       []string       `json:"logs"`
	LogEntries []buildLogJSON `json:"logEntries"`
	Reason     *buildReason   `json:"reason,omitempty"`
}

// statusOf is a build's state in E2B's words.
func statusOf(s template.State) string {
	switch s {
	case template.Ready:
		return "ready"
	case template.Failed, template.Canceled:
		return "error"
	case template.Queued, template.Building:
	}
	return "building"
}

// buildOf returns the build that a request names.
func (a *API) buildOf(c call) (template.Build, error) {
	missing := fail(http.StatusNotFound, "build '%s' of template '%s' not found", c.r.PathValue("build"), c.r.PathValue("id"))
	buildID := ofUUID(c.r.PathValue("build"))
	if buildID == "" || a.cfg.Builder == nil {
		return template.Build{}, missing
	}
	b, err := a.cfg.Builder.Get(c.r.Context(), c.p, buildID)
	if errs.Is(err, errs.NotFound) || err == nil && b.Name != c.r.PathValue("id") {
		return template.Build{}, missing
	}
	return b, err
}

// buildStatus tells how a build goes, with its log from an offset on.
func (a *API) buildStatus(c call) error {
	out := buildStatusJSON{TemplateID: c.r.PathValue("id"), BuildID: c.r.PathValue("build"), Status: "waiting", Logs: []string{}, LogEntries: []buildLogJSON{}}
	if p, ok := a.waiting(c, ofUUID(out.BuildID), false); ok && p.name == out.TemplateID {
		return c.json(http.StatusOK, out)
	}
	q := c.r.URL.Query()
	offset, err := count(q.Get("logsOffset"), 0)
	if err != nil {
		return err
	}
	limit, err := count(q.Get("limit"), maxBuildLogs)
	if err != nil {
		return err
	}
	// The state before the log: what is over has its whole log.
	b, err := a.buildOf(c)
	if err != nil {
		return err
	}
	entries, err := a.buildEntries(c, b, q.Get("level"), offset, max(1, min(limit, maxBuildLogs)))
	if err != nil {
		return err
	}
	out.Status = statusOf(b.State)
	for _, e := range entries {
		out.LogEntries = append(out.LogEntries, e)
		out.Logs = append(out.Logs, e.Message)
	}
	if b.State == template.Canceled {
		out.Reason = &buildReason{Message: "the build was canceled", LogEntries: []buildLogJSON{}}
	}
	if r := b.Reason; r != nil {
		out.Reason = &buildReason{Message: reasonText(r), Step: r.Step, LogEntries: []buildLogJSON{}}
	}
	return c.json(http.StatusOK, out)
}

// buildEntries returns entries of a build's log that matter as much as level at least, "": all; of these from offset on, at
// most limit, 0: no limit.
func (a *API) buildEntries(c call, b template.Build, level string, offset, limit int) ([]buildLogJSON, error) {
	least, err := levelOf(level)
	if err != nil {
		return nil, err
	}
	from, most := offset, limit
	if least > 0 { // which they are is not known before all are read
		from, most = 0, 0
	}
	all, err := a.cfg.Builder.Logs(c.r.Context(), c.p, b.ID, from, most)
	if err != nil {
		return nil, err
	}
	out := make([]buildLogJSON, 0, len(all))
	for _, e := range all {
		if logRank(string(e.Level)) >= least {
			out = append(out, buildLogJSON{e.Time.UTC(), e.Text, string(e.Level), e.Step})
		}
	}
	if least > 0 {
		out = out[min(offset, len(out)):]
	}
	if limit > 0 {
		out = out[:min(limit, len(out))]
	}
	return out, nil
}

// buildLogs shows the log of a build from a time on, or back from one. It is the same wherever E2B would take it from.
func (a *API) buildLogs(c call) error {
	q := c.r.URL.Query()
	if s := q.Get("source"); s != "" && s != "temporary" && s != "persistent" {
		return fail(http.StatusBadRequest, "Error when parsing request: source must be temporary or persistent")
	}
	backward, err := backwardOf(q)
	if err != nil {
		return err
	}
	cursor, err := milliTime(q, "cursor")
	if err != nil {
		return err
	}
	limit, err := count(q.Get("limit"), maxBuildLogs)
	if err != nil {
		return err
	}
	b, err := a.buildOf(c)
	if err != nil {
		return err
	}
	entries, err := a.buildEntries(c, b, q.Get("level"), 0, 0)
	if err != nil {
		return err
	}
	if backward {
		slices.Reverse(entries)
	}
	entries = slices.DeleteFunc(entries, func(e buildLogJSON) bool {
		return !cursor.IsZero() && (backward && e.Timestamp.After(cursor) || !backward && e.Timestamp.Before(cursor))
	})
	return c.json(http.StatusOK, map[string]any{"logs": entries[:min(len(entries), limit, maxBuildLogs)]})
}

// count reads a number of a query.
func count(s string, unset int) (int, error) {
	if s == "" {
		return unset, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 {
		return 0, fail(http.StatusBadRequest, "'%s' is no number", s)
	}
	return n, nil
}

// noSuchUser is how a step says that its user is none of the sandbox's.
const noSuchUser = "no such user in the sandbox: "

// reasonText says why a step failed in words that E2B's users know.
func reasonText(r *template.Reason) string {
	text := strings.TrimPrefix(r.Message, "step "+r.Step+": ")
	line, run := strings.CutPrefix(r.Command, "RUN ")
	if !run {
		if r.Hint != "" {
			text += " (" + r.Hint + ")"
		}
		return text
	}
	if _, quoted, ok := strings.Cut(text, noSuchUser); ok {
		user := strings.Trim(quoted, `"`)
		line, text = strings.TrimSuffix(line, " "+user), "unauthenticated: invalid username: '"+user+"'"
	}
	return "failed to run command '" + line + "': command failed: " + text
}
