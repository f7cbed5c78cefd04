package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"
)

// step is one call of a method, in JSON. ${box} is the sandbox; ${key} a key to revoke.
type step struct {
	method string // without the package
	rest   string // "VERB path" or "" for streams
	body   string // all fields, as the RPC takes them
	want   string // a piece of the answer, white space aside
}

// steps calls every method of the schema once, in an order that makes sense on one sandbox.
func steps() []step {
	return []step{
		{"SystemService/GetVersion", "GET /v1/version", `{}`, `"version":"v-test"`},
		{"TrustService/GetAuthority", "GET /v1/ca", `{}`, `"sha256":"00ff"`},
		{"SystemService/GetHost", "GET /v1/host", `{}`, `"name":"fake"`},
		{"SystemService/ListTemplates", "GET /v1/templates", `{}`, `"name":"host"`},
		{"SystemService/BuildTemplate", "", `{"name":"base"}`, `"template":{"name":"base"`},
		{"ImageService/PullImage", "", `{"image":"example.com/app:1","name":"app"}`, `"image":{"name":"app"`},
		{"ImageService/PushImage", "", `{"source":"host","image":"example.com/copy:1"}`, `"pushed":{"digest":"sha256:00"`},
		{"ImageService/ImportImage", "", `{"name":"loaded","data":"aGk="}`, `"image":{"name":"loaded"`},
		{"ImageService/ExportImage", "", `{"source":"host","format":"docker"}`, `"data":"`},
		{"ImageService/ListImages", "GET /v1/images", `{}`, `"name":"app"`},
		{"ImageService/DeleteImage", "DELETE /v1/images?name=app", `{"name":"app"}`, `"name":"app"`},
		{"SystemService/CreateKey", "POST /v1/keys", `{"name":"made"}`, `"secret":"csm_`},
		{"SystemService/ListKeys", "GET /v1/keys", `{}`, `"name":"made"`},
		{"SystemService/RevokeKey", "DELETE /v1/keys/${key}", `{"key":"${key}"}`, `"revokedAt":"`},
		{"SandboxService/CreateSandbox", "POST /v1/sandboxes", `{"labels":{"made":"here"},"network":{"rules":["allow 93.184.215.14"],"recorded":true}}`, `"state":"running"`},
		{"SandboxService/GetSandbox", "GET /v1/sandboxes/${box}", `{"sandbox":"${box}"}`, `"id":"${box}"`},
		{"SandboxService/ListSandboxes", "GET /v1/sandboxes?label=made=here", `{"label":["made=here"]}`, `"made":"here"`},
		{"SandboxService/UpdateSandbox", "PATCH /v1/sandboxes/${box}", `{"sandbox":"${box}","labels":{"labels":{"a":"b"}}}`, `"a":"b"`},
		{"SandboxService/GetUsage", "GET /v1/sandboxes/${box}/usage", `{"sandbox":"${box}"}`, `{`},
		{"MeterService/ListUsage", "GET /v1/usage?sandbox=${box}", `{"sandbox":"${box}"}`, `"template":"host"`},
		{"SandboxService/ListChanges", "GET /v1/sandboxes/${box}/changes", `{"sandbox":"${box}"}`, `"op":"added"`},
		{"ProcessService/Execute", "POST /v1/sandboxes/${box}/execute", `{"sandbox":"${box}","process":{"argv":["cat"]},"input":"aGk="}`, `"stdout":"aGk="`},
		{"ProcessService/Run", "", `{"sandbox":"${box}","process":{"argv":["echo","hi"]}}`, `"end":"exited"`},
		{"ProcessService/StartProcess", "POST /v1/sandboxes/${box}/processes", `{"sandbox":"${box}","process":{"id":"p1","argv":["sh","-c","cat; sleep 600"],"stdin":true,"terminal":{"rows":10,"cols":20}}}`, `"id":"p1"`},
		{"ProcessService/GetProcess", "GET /v1/sandboxes/${box}/processes/p1", `{"sandbox":"${box}","process":"p1"}`, `"id":"p1"`},
		{"ProcessService/ListProcesses", "GET /v1/sandboxes/${box}/processes", `{"sandbox":"${box}"}`, `"id":"p1"`},
		{"ProcessService/WriteInput", "POST /v1/sandboxes/${box}/processes/p1/input", `{"sandbox":"${box}","process":"p1","data":"aGk=","offset":"0"}`, `"offset":"2"`},
		{"ProcessService/ResizeTerminal", "POST /v1/sandboxes/${box}/processes/p1/resize", `{"sandbox":"${box}","process":"p1","terminal":{"rows":30,"cols":90}}`, `{`},
		{"ProcessService/SignalProcess", "POST /v1/sandboxes/${box}/processes/p1/signal", `{"sandbox":"${box}","process":"p1","signal":"KILL","tree":true}`, `{`},
		{"ProcessService/WaitProcess", "GET /v1/sandboxes/${box}/processes/p1/wait?timeout=10s", `{"sandbox":"${box}","process":"p1","timeout":"10s"}`, `"end":"canceled"`},
		{"ProcessService/Output", "", `{"sandbox":"${box}","process":"p1"}`, `"ended":`},
		{"ContextService/CreateContext", "POST /v1/sandboxes/${box}/contexts", `{"sandbox":"${box}","context":{"id":"c1","language":"python"}}`, `"id":"c1"`},
		{"ContextService/GetContext", "GET /v1/sandboxes/${box}/contexts/c1", `{"sandbox":"${box}","context":"c1"}`, `"state":"idle"`},
		{"ContextService/ListContexts", "GET /v1/sandboxes/${box}/contexts", `{"sandbox":"${box}"}`, `"id":"c1"`},
		{"ContextService/ExecuteCode", "POST /v1/sandboxes/${box}/code", `{"sandbox":"${box}","run":{"context":"c1","code":"print hi\n1+1"}}`, `"text/plain":"2"`},
		{"ContextService/RunCode", "", `{"sandbox":"${box}","run":{"id":"r1","context":"c1","code":"print hi"}}`, `"end":"completed"`},
		{"ContextService/FollowRun", "", `{"sandbox":"${box}","context":"c1","run":"r1","offset":"0","follow":true}`, `"data":"aGkK"`},
		{"ContextService/GetRun", "GET /v1/sandboxes/${box}/contexts/c1/runs/r1", `{"sandbox":"${box}","context":"c1","run":"r1"}`, `"end":"completed"`},
		{"ContextService/ListRuns", "GET /v1/sandboxes/${box}/contexts/c1/runs", `{"sandbox":"${box}","context":"c1"}`, `"id":"r1"`},
		{"ContextService/InterruptContext", "POST /v1/sandboxes/${box}/contexts/c1/interrupt", `{"sandbox":"${box}","context":"c1"}`, `{`},
		{"ContextService/RestartContext", "POST /v1/sandboxes/${box}/contexts/c1/restart", `{"sandbox":"${box}","context":"c1"}`, `"state":"idle"`},
		{"ContextService/DeleteContext", "DELETE /v1/sandboxes/${box}/contexts/c1", `{"sandbox":"${box}","context":"c1"}`, `{`},
		{"FileService/MakeDirectory", "POST /v1/sandboxes/${box}/files/mkdir", `{"sandbox":"${box}","path":"d/e","parents":true}`, `"type":"dir"`},
		{"FileService/WriteFile", "", `{"sandbox":"${box}","path":"d/f","data":"aGVsbG8="}`, `"size":"5"`},
		{"FileService/StatFile", "GET /v1/sandboxes/${box}/files/stat?path=d/f", `{"sandbox":"${box}","path":"d/f"}`, `"size":"5"`},
		{"FileService/ReadFile", "", `{"sandbox":"${box}","path":"d/f","offset":"1","length":"2"}`, `"data":"ZWw="`},
		{"FileService/ChangeMode", "POST /v1/sandboxes/${box}/files/chmod", `{"sandbox":"${box}","path":"d/f","mode":384}`, `"mode":384`},
		{"FileService/ListFiles", "GET /v1/sandboxes/${box}/files/list?path=d", `{"sandbox":"${box}","path":"d"}`, `"name":"f"`},
		{"FileService/MoveFile", "POST /v1/sandboxes/${box}/files/move", `{"sandbox":"${box}","path":"d/f","to":"d/g"}`, `"name":"g"`},
		{"FileService/RemoveFile", "POST /v1/sandboxes/${box}/files/remove", `{"sandbox":"${box}","path":"d","recursive":true}`, `{`},
		{"FileService/WatchFiles", "", `{"sandbox":"${box}","path":"."}`, `{`},
		{"ProofService/GetCheckpoint", "GET /v1/journal/checkpoint", `{}`, `"key":"casemate.test/`},
		{"ProofService/ExportBundle", "", `{"sandbox":"${box}"}`, `"data":"`},
		{"JournalService/ListEvents", "GET /v1/sandboxes/${box}/events", `{"sandbox":"${box}"}`, `"type":"sandbox.created"`},
		{"RecordService/ReadBody", "GET /v1/sandboxes/${box}/events/${start}/bodies/server.argv", `{"sandbox":"${box}","event":"${start}","name":"server.argv"}`, `"bytes":"`},
		{"RecordService/RedactEvent", "POST /v1/sandboxes/${box}/events/${start}/redact", `{"sandbox":"${box}","event":"${start}","reason":"for tests"}`, `"type":"body.redacted"`},
		{"JournalService/FollowEvents", "", `{"sandbox":"${box}"}`, `"type":"sandbox.created"`},
		{"SecretService/SetSecret", "PUT /v1/secrets/tool", `{"name":"tool","class":"tool","value":"a value for tests"}`, `"version":"1"`},
		{"SecretService/BindSecret", "POST /v1/secrets/tool/bindings", `{"secret":"tool","binding":{"for":{"sandboxes":["${box}"]},"hosts":["API.example.com"],"scheme":"bearer","env":"TOOL_KEY"}}`, `"hosts":["api.example.com"]`},
		{"SecretService/ListGrants", "GET /v1/sandboxes/${box}/grants", `{"sandbox":"${box}"}`, `"placeholder":"csm-placeholder-`},
		{"SecretService/RotateSecret", "POST /v1/secrets/tool/rotate", `{"secret":"tool","value":"another for tests"}`, `"version":"2"`},
		{"SecretService/GetSecret", "GET /v1/secrets/tool", `{"secret":"tool"}`, `"class":"tool"`},
		{"SecretService/ListSecrets", "GET /v1/secrets", `{}`, `"name":"tool"`},
		{"SecretService/UnbindSecret", "DELETE /v1/secrets/tool/bindings/all", `{"secret":"tool","binding":"all"}`, `"name":"tool"`},
		{"SecretService/SetModelRoute", "PUT /v1/model-routes/local", `{"provider":"local","route":{"family":"openai","baseUrl":"https://models.example.com/v1","secret":"tool","for":{"all":true},"maxTokens":"1000","maxCost":"2500000","priceIn":"3000000"}}`, `"maxCost":"2500000"`},
		{"SecretService/ListModelRoutes", "GET /v1/model-routes", `{}`, `"provider":"local"`},
		{"SecretService/DeleteModelRoute", "DELETE /v1/model-routes/local", `{"provider":"local"}`, `"provider":"local"`},
		{"SecretService/SetClassPolicy", "PUT /v1/secret-classes/tool", `{"class":"tool","policy":{"hosts":["*.example.com"]}}`, `"hosts":["*.example.com"]`},
		{"SecretService/ListClassPolicies", "GET /v1/secret-classes", `{}`, `"class":"tool"`},
		{"SecretService/DeleteSecret", "DELETE /v1/secrets/tool", `{"secret":"tool"}`, `"name":"tool"`},
		{"NetworkService/GetNetwork", "GET /v1/sandboxes/${box}/network", `{"sandbox":"${box}"}`, `"expanded":["allow 93.184.215.14"]`},
		{"NetworkService/ListNetworkSets", "GET /v1/network-sets", `{}`, `"name":"open","rules":["*:*"]`},
		{"NetworkService/ExplainNetwork", "GET /v1/sandboxes/${box}/network/explain?target=93.184.215.14:443", `{"sandbox":"${box}","target":"93.184.215.14:443"}`, `"allowed":true`},
		{"NetworkService/SetNetwork", "PUT /v1/sandboxes/${box}/network", `{"sandbox":"${box}","network":{"rules":["deny *.example.com","allow @open"],"recorded":true}}`, `"allow *:*"`},
		{"ReplayService/SetAnswers", "PUT /v1/sandboxes/${box}/answers", `{"sandbox":"${box}","answers":[{"method":"GET","url":"https://a.example.com/","status":200,"header":[{"name":"A","values":["b"]}],"data":"aGk="}]}`, `{`},
		{"NetworkService/SetTemplateNetwork", "PUT /v1/templates/host/network", `{"template":"host","network":{"rules":["allow a.example.com"]}}`, `"template":"host"`},
		{"NetworkService/GetTemplateNetwork", "GET /v1/templates/host/network", `{"template":"host"}`, `"rules":["allow a.example.com"]`},
		{"CallService/SetCallDefault", "PUT /v1/call-defaults", `{"template":"host","calls":{"exec":true}}`, `"template":"host"`},
		{"CallService/ListCallDefaults", "GET /v1/call-defaults", `{}`, `"exec":true`},
		{"CommitService/CreateCommit", "POST /v1/sandboxes/${box}/commits", `{"sandbox":"${box}","message":"m","tag":"ready"}`, `"tags":["ready"]`},
		{"CommitService/GetCommit", "GET /v1/commits/ready", `{"commit":"ready"}`, `"message":"m"`},
		{"CommitService/ListCommits", "GET /v1/commits?sandbox=${box}", `{"sandbox":"${box}"}`, `"author":`},
		{"CommitService/TagCommit", "POST /v1/commits/ready/tags", `{"commit":"ready","tag":"also/this"}`, `"also/this"`},
		{"CommitService/GetCommit", "GET /v1/commits/also%2Fthis", `{"commit":"also/this"}`, `"message":"m"`},
		{"HistoryService/GetLineage", "GET /v1/commits/also%2Fthis/lineage", `{"commit":"also/this"}`, `"id":"cmt_`},
		{"CommitService/UntagCommit", "POST /v1/commits/ready/untag", `{"commit":"ready","tag":"also/this"}`, `"tags":["ready"]`},
		{"CommitService/ForkSandbox", "POST /v1/sandboxes/${box}/fork", `{"sandbox":"${box}"}`, `"automatic":true`},
		{"CommitService/Checkout", "POST /v1/sandboxes/${box}/checkout", `{"sandbox":"${box}","commit":"ready"}`, `"saved":{`},
		{"CommitService/CompareStates", "GET /v1/compare?from=ready&to=${box}", `{"from":"ready","to":"${box}"}`, `"op":"added"`},
		{"HistoryService/DiffStates", "GET /v1/diff?from=ready&to=${box}&patches=true", `{"from":"ready","to":"${box}","patches":true}`, `"patch":"@@`},
		{"HistoryService/MergeStates", "POST /v1/merge", `{"into":"${box}","from":"ready","base":"ready","dryRun":true}`, `"MERGE_OUTCOME_MERGED"`},
		{"HistoryService/GetLineage", "GET /v1/commits/ready/lineage", `{"commit":"ready"}`, `"sandboxes":[{"id":"`},
		{"HistoryService/FindCommonAncestors", "GET /v1/commits/ready/common-ancestors?other=ready", `{"commit":"ready","other":"ready"}`, `"ancestors":[{"id":"cmt_`},
		{"HistoryService/VerifyCommit", "POST /v1/commits/ready/verify", `{"commit":"ready"}`, `"digest":"sha256:`},
		{"StateService/SetDocument", "PUT /v1/state/helper/document", `{"agent":"helper","name":"a/b","content":"aGk=","expectedVersion":"0","commit":"ready","sandbox":"${box}"}`, `"version":"1"`},
		{"StateService/PatchDocument", "PATCH /v1/state/helper/document", `{"agent":"helper","name":"c","patch":"{\"a\":1}"}`, `"version":"1"`},
		{"StateService/GetDocument", "GET /v1/state/helper/document?name=a/b", `{"agent":"helper","name":"a/b"}`, `"content":"aGk="`},
		{"StateService/ListDocuments", "GET /v1/state/helper/documents?prefix=a/", `{"agent":"helper","prefix":"a/"}`, `"name":"a/b"`},
		{"StateService/ListVersions", "GET /v1/state/helper/versions?name=a/b", `{"agent":"helper","name":"a/b"}`, `"revision":"1"`},
		{"StateService/WatchDocuments", "", `{"agent":"helper","name":"a/b"}`, `{`},
		{"StateService/SetRetention", "PUT /v1/state/helper/retention", `{"agent":"helper","retention":{"versions":5}}`, `"versions":5`},
		{"StateService/ListAgents", "GET /v1/state", `{}`, `"agent":"helper"`},
		{"StateService/DeleteDocument", "DELETE /v1/state/helper/document?name=a/b", `{"agent":"helper","name":"a/b"}`, `"deleted":true`},
		{"CommitService/DeleteCommit", "DELETE /v1/commits/ready", `{"commit":"ready"}`, `"message":"m"`},
		{"CommitService/CollectCommits", "POST /v1/collect", `{"dryRun":true}`, `{`},
		{"BuildService/UploadBuildFiles", "", `{"name":"f1"}`, `"name":"f1"`},
		{"BuildService/CreateBuild", "POST /v1/builds", `{"name":"web","from":"host","steps":[{"type":"ENV","args":["A","1"]}]}`, `"name":"web"`},
		{"BuildService/FollowBuild", "", `{"build":"web"}`, `"state":"ready"`},
		{"BuildService/GetBuild", "GET /v1/builds/web", `{"build":"web"}`, `"from":"host"`},
		{"BuildService/ListBuilds", "GET /v1/builds?name=web", `{"name":"web"}`, `"done":1`},
		{"BuildService/ListBuildLogs", "GET /v1/builds/web/logs?limit=2", `{"build":"web","limit":2}`, `"text":"FROM host"`},
		{"BuildService/CompareBuilds", "GET /v1/compare/builds?from=web&to=web", `{"from":"web","to":"web"}`, `{`},
		{"BuildService/CancelBuild", "POST /v1/builds/web/cancel", `{"build":"web"}`, `"state":"ready"`},
		{"BuildService/ShareTemplate", "POST /v1/templates/share", `{"name":"web"}`, `{`},
		{"BuildService/DeleteBuiltTemplate", "DELETE /v1/builds?name=web", `{"name":"web"}`, `{`},
		{"SandboxService/PauseSandbox", "POST /v1/sandboxes/${box}/pause", `{"sandbox":"${box}"}`, `"state":"paused"`},
		{"SandboxService/ResumeSandbox", "POST /v1/sandboxes/${box}/resume", `{"sandbox":"${box}"}`, `"state":"running"`},
		{"SandboxService/DeleteSandbox", "DELETE /v1/sandboxes/${box}", `{"sandbox":"${box}"}`, `"state":"stopped"`},
	}
}

// TestStepsCoverTheSchema: a new method must be added to steps.
func TestStepsCoverTheSchema(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range steps() {
		seen["/casemate.v1."+s.method] = true
	}
	for _, s := range schemaServices() {
		for i := range s.Methods().Len() {
			if p := procedureOf(s.Methods().Get(i)); !seen[p] {
				t.Errorf("%s is not tested", p)
			}
		}
	}
}

// protocol makes one call and returns the answer, or all answers of a stream, as compact JSON.
type protocol func(t *testing.T, h *harness, s step, m protoreflect.MethodDescriptor) (string, error)

// TestEveryMethodByEveryProtocol calls each method by Connect in JSON and in protobuf, gRPC, gRPC-Web
// and REST, and once without a key.
func TestEveryMethodByEveryProtocol(t *testing.T) {
	h2c := new(http.Protocols)
	h2c.SetUnencryptedHTTP2(true)
	http2 := &http.Client{Transport: &http.Transport{Protocols: h2c}}
	protocols := []struct {
		name string
		call protocol
	}{
		{"plain JSON", callPlainJSON},
		{"REST", callREST},
		{"Connect JSON", callRPC(http.DefaultClient, connect.WithProtoJSON())},
		{"Connect", callRPC(http.DefaultClient)},
		{"gRPC", callRPC(http2, connect.WithGRPC())},
		{"gRPC-Web", callRPC(http.DefaultClient, connect.WithGRPCWeb())},
	}
	for _, p := range protocols {
		t.Run(p.name, func(t *testing.T) {
			h := newHarness(t)
			vars := strings.NewReplacer()
			names := map[string]string{}
			for _, s := range steps() {
				s.rest, s.body, s.want = vars.Replace(s.rest), vars.Replace(s.body), vars.Replace(s.want)
				m := methodOf(t, s.method)
				got, err := p.call(t, h, s, m)
				if err != nil {
					t.Errorf("%s: %v", s.method, err)
					continue
				}
				if !strings.Contains(got, s.want) {
					t.Errorf("%s answered %s, want a piece %s", s.method, got, s.want)
				}
				learn(names, s.method, got)
				vars = strings.NewReplacer("${box}", names["box"], "${key}", names["key"], "${start}", names["start"])
			}
		})
	}
}

// learn picks ids for later steps out of an answer.
func learn(names map[string]string, method, answer string) {
	var j struct {
		ID  string `json:"id"`
		Key struct {
			ID string `json:"id"`
		} `json:"key"`
		Events []struct {
			Seq  json.Number `json:"seq"`
			Type string      `json:"type"`
		} `json:"events"`
	}
	_ = json.Unmarshal([]byte(answer), &j)
	switch method {
	case "SandboxService/CreateSandbox":
		names["box"] = j.ID
	case "SystemService/CreateKey":
		names["key"] = j.Key.ID
	case "JournalService/ListEvents":
		for _, e := range j.Events {
			if e.Type == "process.started" {
				names["start"] = e.Seq.String()
				return
			}
		}
	}
}

func methodOf(t *testing.T, method string) protoreflect.MethodDescriptor {
	t.Helper()
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("casemate.v1." + strings.ReplaceAll(method, "/", ".")))
	if err != nil {
		t.Fatal(err)
	}
	return d.(protoreflect.MethodDescriptor) //nolint:forcetypeassert // the name is a method's
}

// compact strips protojson's random spaces.
func compact(b []byte) string {
	var out bytes.Buffer
	if json.Compact(&out, b) != nil {
		return string(b)
	}
	return out.String()
}

// callPlainJSON is what curl does: a POST of JSON without any of Connect's headers. Streams have
// twins for that.
func callPlainJSON(t *testing.T, h *harness, s step, m protoreflect.MethodDescriptor) (string, error) {
	if m.IsStreamingServer() || m.IsStreamingClient() {
		return callRPC(http.DefaultClient)(t, h, s, m)
	}
	return plain(h.call("POST", "/casemate.v1."+s.method, s.body, "Authorization", "Bearer "+h.admin))
}

// callREST calls a method's REST path, with what is in the path or query left out of the body.
func callREST(t *testing.T, h *harness, s step, m protoreflect.MethodDescriptor) (string, error) {
	if s.rest == "" {
		return callRPC(http.DefaultClient)(t, h, s, m)
	}
	verb, path, _ := strings.Cut(s.rest, " ")
	body := ""
	if verb == "POST" || verb == "PUT" || verb == "PATCH" {
		fields := map[string]any{}
		if err := json.Unmarshal([]byte(s.body), &fields); err != nil {
			t.Fatal(err)
		}
		delete(fields, "sandbox")
		if strings.Contains(path, "/p1/") {
			delete(fields, "process")
		}
		b, _ := json.Marshal(fields)
		body = string(b)
	}
	return plain(h.call(verb, path, body, "Authorization", "Bearer "+h.admin))
}

func plain(status int, _ http.Header, body string) (string, error) {
	if status != http.StatusOK {
		return "", fmt.Errorf("status %d: %s", status, body)
	}
	return compact([]byte(body)), nil
}

// callRPC calls a method by one of Connect's protocols, with dynamic messages.
func callRPC(c connect.HTTPClient, opts ...connect.ClientOption) protocol {
	return func(t *testing.T, h *harness, s step, m protoreflect.MethodDescriptor) (string, error) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		opts := append([]connect.ClientOption{
			connect.WithSchema(m),
			connect.WithResponseInitializer(func(_ connect.Spec, msg any) error {
				*msg.(*dynamicpb.Message) = *dynamicpb.NewMessage(m.Output()) //nolint:forcetypeassert // as Connect documents it
				return nil
			}),
		}, opts...)
		client := connect.NewClient[dynamicpb.Message, dynamicpb.Message](c, h.url+"/casemate.v1."+s.method, opts...)
		req := dynamicpb.NewMessage(m.Input())
		if err := protojson.Unmarshal([]byte(s.body), req); err != nil {
			t.Fatal(err)
		}
		return exchange(ctx, client, req, m, "Bearer "+h.admin)
	}
}

// exchange makes the call in the shape that the method has.
func exchange(ctx context.Context, client *connect.Client[dynamicpb.Message, dynamicpb.Message], req *dynamicpb.Message,
	m protoreflect.MethodDescriptor, authorization string,
) (string, error) {
	var all []string
	add := func(msg *dynamicpb.Message) {
		b, _ := protojson.Marshal(msg)
		all = append(all, compact(b))
	}
	switch {
	case m.IsStreamingClient():
		stream := client.CallClientStream(ctx)
		stream.RequestHeader().Set("Authorization", authorization)
		if err := stream.Send(req); err != nil {
			return "", err
		}
		resp, err := stream.CloseAndReceive()
		if err != nil {
			return "", err
		}
		add(resp.Msg)
	case m.IsStreamingServer():
		r := connect.NewRequest(req)
		r.Header().Set("Authorization", authorization)
		stream, err := client.CallServerStream(ctx, r)
		if err != nil {
			return "", err
		}
		defer func() { _ = stream.Close() }()
		for stream.Receive() {
			add(stream.Msg())
			if strings.HasPrefix(string(m.Name()), "Watch") || m.Name() == "FollowEvents" {
				break // these end only with their caller
			}
		}
		if err := stream.Err(); err != nil {
			return "", err
		}
	default:
		r := connect.NewRequest(req)
		r.Header().Set("Authorization", authorization)
		resp, err := client.CallUnary(ctx, r)
		if err != nil {
			return "", err
		}
		add(resp.Msg)
	}
	return strings.Join(all, "\n"), nil
}
