package cli

import (
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	"casemate.dev/client"
)

func TestTellEvent(t *testing.T) {
	for _, tc := range []struct{ name, event, want string }{
		{
			"created by its maker",
			`{"type":"sandbox.created","actor":"key_a","facts":{"server":{"template":"host","profile":"locked","isolation":"namespace"}}}`,
			"sandbox created by key_a (host, locked, namespace)",
		},
		{
			"layers of isolation",
			`{"type":"sandbox.started","actor":"server","facts":{"server":{"host_uid":1879048192,"namespaces":["user","pid"],"seccomp":"allow-list, 300 calls","landlock_abi":7,"cgroup_version":2,"missing":["landlock-scope"]}}}`,
			"isolation is up (uids from 1879048192, 2 namespaces, seccomp allow-list, 300 calls, landlock 7, cgroup v2, MISSING landlock-scope)",
		},
		{
			"process", `{"type":"process.started","actor":"maker","process":"prc_abcdefghijklmnop","facts":{"server":{"argv":["sh","-c","a b"]}}}`,
			"▶ prc_abcdefghi… sh -c 'a b'",
		},
		{
			"somebody else's process", `{"type":"process.started","actor":"key_b","process":"p","facts":{"server":{"argv":["true"]}}}`,
			"▶ p true by key_b",
		},
		{
			"exit", `{"type":"process.ended","process":"p","facts":{"guest":{"end":"exited","code":3,"bytes":2048,"dropped":1024},"server":{"duration_ms":1500}}}`,
			"■ p exit 3 (2 KiB of output, 1 KiB dropped, after 1.5s)",
		},
		{
			// The kernel's word stands before the guest's.
			"out of memory", `{"type":"process.ended","process":"p","facts":{"guest":{"end":"signaled","signal":9},"server":{"end":"oom_killed"},"kernel":{"oom_kills":1}}}`,
			"■ p oom killed (1 killed for memory (kernel))",
		},
		{"signal", `{"type":"process.ended","process":"p","facts":{"guest":{"end":"signaled","signal":15}}}`, "■ p signal 15"},
		{"lost", `{"type":"process.ended","process":"p","facts":{"server":{"end":"lost"}}}`, "■ p lost"},
		{"could not start", `{"type":"process.failed","process":"p","facts":{"guest":{"error":"no such file"}}}`, "✗ p could not be started: no such file"},
		{"ended", `{"type":"sandbox.ended","actor":"server","facts":{"server":{"reason":"lifetime","after_ms":60000}}}`, "sandbox ended: lifetime (after 1m)"},
		{"file", `{"type":"file.moved","actor":"maker","facts":{"server":{"path":"/a","to":"/b"}}}`, "file moved: /a to /b"},
		{
			"used", `{"type":"usage.metered","actor":"server","facts":{"kernel":{"cpu_us":29256,"memory_bytes":802816,"memory_byte_seconds":13877768,"over_ms":15966,"last":true}}}`,
			"used so far: cpu 29ms, memory 784 KiB now",
		},
		{"conflict", `{"type":"conflict","facts":{"kernel":{"pids":3},"guest":{"pids":2}}}`, "CONFLICT: the guest's word and the kernel's differ: pids=3, pids=2"},
		{
			"context", `{"type":"context.created","actor":"key_b","facts":{"server":{"context":"python","language":"python"},"guest":{"version":"3.11.2","pid":7}}}`,
			"context python created (python 3.11.2) by key_b",
		},
		{
			"interpreter", `{"type":"context.ended","facts":{"server":{"context":"python","reason":"interpreter_ended","end":"oom_killed"},"guest":{"end":"signaled","signal":9}}}`,
			"context python has lost its interpreter: oom killed",
		},
		{
			"executed", `{"type":"call.exec","facts":{"kernel":{"call":"execve","pid":7,"command":"sh","target":"/bin/echo","argv":["echo","deep"]}}}`,
			"exec echo deep by sh (7)",
		},
		{
			"executed, and only a hash of what", `{"type":"call.exec","facts":{"kernel":{"call":"execve","command":"sh","target":"/bin/echo","argv":{"body":"ab","bytes":12}}}}`,
			"exec /bin/echo by sh",
		},
		{"connected", `{"type":"call.connect","facts":{"kernel":{"call":"connect","command":"curl","target":"192.0.2.1:443"}}}`, "connect 192.0.2.1:443 by curl"},
		{
			"attempt", `{"type":"call.attempt","facts":{"kernel":{"call":"mount","command":"mount","target":"/mnt","args":["none","tmpfs"],"errno":"EPERM","reaction":"kill"}}}`,
			"ATTEMPT refused: mount /mnt none tmpfs by mount (EPERM) so it ends",
		},
		{
			"attempt that a kernel of the sandbox's own allowed", `{"type":"call.attempt","facts":{"kernel":{"call":"unshare","command":"unshare","args":["user"],"note":"the sandbox's own kernel allowed it"}}}`,
			"ATTEMPT: unshare user by unshare the sandbox's own kernel allowed it",
		},
		{"code", `{"type":"run.started","actor":"maker","facts":{"server":{"context":"python","run":"r","language":"python","code":{"body":"ab","bytes":12}}}}`, "▶ r in python 12 B of python"},
		{"shown code", `{"type":"run.started","actor":"maker","facts":{"server":{"context":"python","run":"r","language":"python","code":"\nx = 1\nprint(x)"}}}`, "▶ r in python x = 1 …"},
		{
			"refused", `{"type":"network.refused","actor":"server","facts":{"server":{"target":"a.test:443","proto":"tcp","count":3,"verdict":{"allow":false,"reason":"no rule allows it"}}}}`,
			"✗ a.test:443 refused: no rule allows it 3 times",
		},
		{
			"closed", `{"type":"network.closed","actor":"server","facts":{"server":{"target":"a.test:443","sent":1024,"received":2048}}}`,
			"← a.test:443 closed (1 KiB sent, 2 KiB received)",
		},
		{
			"closed, summed up", `{"type":"network.closed","actor":"server","facts":{"server":{"target":"a.test:443","count":40,"sent":1024,"received":2048}}}`,
			"← a.test:443 closed 40 times (1 KiB sent, 2 KiB received)",
		},
		{
			"cut", `{"type":"network.cut","actor":"server","facts":{"server":{"target":"a.test:443","verdict":{"allow":false,"reason":"no rule allows a.test:443"}}}}`,
			"✗ a.test:443 cut: no rule allows a.test:443",
		},
		{
			"redacted", `{"type":"body.redacted","actor":"key_b","facts":{"server":{"event":7,"names":["guest.stdout","server.argv"],"reason":"a password"}}}`,
			"redacted: guest.stdout, server.argv of event 7 by key_b (a password)",
		},
		{
			"code's error", `{"type":"run.ended","facts":{"server":{"context":"python","run":"r"},"guest":{"end":"failed","error":"NameError","items":2,"duration_ms":1500}}}`,
			"■ r in python raised NameError (2 items, after 1.5s)",
		},
		{
			"code without an interpreter", `{"type":"run.ended","facts":{"server":{"context":"c","run":"r"},"guest":{"end":"driver_ended","driver":"signaled","signal":11}}}`,
			"■ r in c its interpreter ended: signal 11",
		},
		{"unknown", `{"type":"new.thing","facts":{"server":{"x":1}}}`, "new.thing (x=1)"},
		{"empty", `{}`, ""},
	} {
		e := &client.Event{}
		if err := protojson.Unmarshal([]byte(tc.event), e); err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		if got := tellEvent(e, "maker").text; got != tc.want {
			t.Errorf("%s:\n got %s\nwant %s", tc.name, got, tc.want)
		}
	}
}
