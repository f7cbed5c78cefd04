package trajectory

import (
	"encoding/json"
	"io"
	"strings"
	"time"
)

// ATIFVersion is the version of the Agent Trajectory Interchange Format that WriteATIF writes
// (https://harborframework.com/docs/trajectory-format).
const ATIFVersion = "ATIF-v1.7"

type atif struct {
	SchemaVersion string         `json:"schema_version"`
	SessionID     string         `json:"session_id"`
	TrajectoryID  string         `json:"trajectory_id"`
	Agent         atifAgent      `json:"agent"`
	Steps         []atifStep     `json:"steps"`
	Notes         string         `json:"notes"`
	FinalMetrics  atifMetrics    `json:"final_metrics"`
	Extra         map[string]any `json:"extra"`
}

type atifAgent struct {
	Name    string         `json:"name"`
	Version string         `json:"version"`
	Extra   map[string]any `json:"extra,omitempty"`
}

type atifStep struct {
	StepID      int              `json:"step_id"`
	Timestamp   string           `json:"timestamp"`
	Source      string           `json:"source"`
	Message     string           `json:"message"`
	ToolCalls   []atifCall       `json:"tool_calls,omitempty"`
	Observation *atifObservation `json:"observation,omitempty"`
}

type atifCall struct {
	ToolCallID   string         `json:"tool_call_id"`
	FunctionName string         `json:"function_name"`
	Arguments    map[string]any `json:"arguments"`
	Extra        map[string]any `json:"extra"`
}

type atifObservation struct {
	Results []atifResult `json:"results"`
}

type atifResult struct {
	SourceCallID string         `json:"source_call_id"`
	Content      string         `json:"content"`
	Extra        map[string]any `json:"extra"`
}

type atifMetrics struct {
	TotalSteps int `json:"total_steps"`
}

// WriteATIF writes the story as one ATIF document. What the agent thought and said is not in it: the server saw what was
// asked of the sandbox, and each call names its place in the log.
func (s *Story) WriteATIF(w io.Writer) error {
	doc := atif{
		SchemaVersion: ATIFVersion, SessionID: s.Sandbox, TrajectoryID: s.Sandbox,
		Agent: atifAgent{Name: "casemate", Version: "1", Extra: map[string]any{"created": s.Created}},
		Notes: "Recorded by the sandbox's server, outside it: what was asked of the sandbox and what came of it, not what an agent thought. " +
			"The bundle of the same record proves it.",
		Extra: map[string]any{"sandbox": map[string]any{"id": s.Sandbox, "log": s.Origin, "key": s.Key, "events": s.Events, "gaps": s.Gaps}},
	}
	if len(s.Between) > 0 {
		doc.Extra["sandbox"].(map[string]any)["between"] = s.Between
	}
	doc.Steps = append(doc.Steps, atifStep{StepID: 1, Timestamp: stamp(s.Begun), Source: "system", Message: "sandbox " + s.Sandbox})
	for _, c := range s.Calls {
		step := atifStep{StepID: len(doc.Steps) + 1, Timestamp: stamp(c.Begun), Source: "agent", ToolCalls: []atifCall{{
			ToolCallID: c.ID, FunctionName: functionName(c.Tool), Arguments: c.Arguments,
			Extra: map[string]any{"sandbox": map[string]any{"exec": c.ID, "actor": c.Actor, "log": c.Start}},
		}}}
		if !c.Ended.IsZero() {
			step.Observation = &atifObservation{Results: []atifResult{{
				SourceCallID: c.ID, Content: c.said(), Extra: map[string]any{"sandbox": c.extra()},
			}}}
		}
		doc.Steps = append(doc.Steps, step)
	}
	doc.FinalMetrics.TotalSteps = len(doc.Steps)
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(doc)
}

// extra is what is on record of a call's end. Facts stay under who observed them.
func (c *Call) extra() map[string]any {
	out := map[string]any{
		"exec": c.ID, "log": c.End, "end": c.outcome(), "net": c.Connections, "denied": c.Refused,
		"timed_out": c.outcome() == "timed_out", "oom": c.outcome() == "oom_killed",
	}
	if code, ok := c.fact("code").(float64); ok {
		out["exit"] = code
	}
	if signal, ok := c.fact("signal").(float64); ok {
		out["signal"] = signal
	}
	if c.Files != nil {
		out["files"] = Changed{c.Files, c.Compared}
	}
	for name, facts := range map[string]map[string]any{"kernel": c.Kernel, "server": c.Server, "guest": c.Guest} {
		if len(facts) > 0 {
			out[name] = facts
		}
	}
	return out
}

// functionName is a tool's name as a function's.
func functionName(tool string) string { return strings.ReplaceAll(tool, ".", "_") }

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }
