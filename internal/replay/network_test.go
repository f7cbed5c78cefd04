package replay

import (
	"fmt"
	"strings"
	"testing"

	"casemate.dev/internal/journal/bundle"
)

// exchange is a request with its answer, as a record tells of it.
type exchange struct {
	method, url, asked string // asked is the request's body
	status             int    // 0: it got no answer
	header             map[string][]string
	text               string
	bytes              int // of the answer's body, where not all of it is kept
	facts              object
	without            string // a body that is not there
}

// asks tells of a connection and a request over it.
func (w *tape) asks(x exchange) {
	w.asked++
	w.add("network.opened", "", object{"server": object{"conn": w.asked, "proto": "tcp", "target": "api.test:443"}})
	server := object{"conn": w.asked, "target": "api.test:443", "method": x.method, "status": x.status, "began": w.now}
	var bodies []bundle.Body
	body := func(name, text string) {
		ref, b := put("server."+name, []byte(text))
		if b.Salt = []byte("salt"); x.without != name {
			bodies = append(bodies, b)
		}
		server[name] = ref
	}
	body("request", fmt.Sprintf(`{"method":%q,"url":%q}`, x.method, x.url))
	if x.asked != "" {
		body("request_body", x.asked)
	}
	if x.status != 0 {
		header := ""
		for name, values := range x.header {
			header = fmt.Sprintf(`%q:[%q]`, name, values[0])
		}
		body("answer", fmt.Sprintf(`{"status":%d,"header":{%s}}`, x.status, header))
		body("answer_body", x.text)
	}
	if x.bytes > 0 {
		server["answer_body"] = object{"body": "h", "bytes": x.bytes, "kept": len(x.text), "tail": 1}
	}
	for k, v := range x.facts {
		server[k] = v
	}
	w.add("network.request", "", object{"server": server}, bodies...)
}

func get(url, text string) exchange {
	return exchange{method: "GET", url: url, status: 200, text: text}
}

// TestNetworkPlan: which processes can be answered from the record, and why others can't.
func TestNetworkPlan(t *testing.T) {
	const url = "https://api.test/a"
	for _, tt := range []struct {
		name string
		do   func(w *tape)
		want string // why not; "": it can
	}{
		{"requests", func(w *tape) {
			w.asks(get(url, "one"))
			w.asks(exchange{method: "POST", url: url, asked: "q", status: 404, text: "no"})
		}, ""},
		{"a credential in the answer", func(w *tape) {
			w.asks(exchange{method: "GET", url: url, status: 200, header: map[string][]string{"Set-Cookie": {leftOut}}})
		}, ""},
		{"what was refused then", func(w *tape) {
			w.add("network.refused", "", object{"server": object{"proto": "dns", "target": "x.test", "verdict": object{"code": "no_rule"}}})
		}, ""},
		{"a request that nobody could read", func(w *tape) {
			w.asks(get(url, "one"))
			w.add("network.request", "", object{"server": object{"conn": w.asked, "target": "api.test:443", "status": 400}})
		}, ""},
		{"an answer that is cut", func(w *tape) { w.asks(exchange{method: "GET", url: url, status: 200, text: "xx", bytes: 100_000}) }, "the answer to GET " + url + " has 100000 bytes"},
		{"an answer that was erased", func(w *tape) {
			w.asks(exchange{method: "GET", url: url, status: 200, text: "x", without: "answer_body"})
		}, "the answer to GET " + url + " is not in the record: it was erased"},
		{"a request that was erased", func(w *tape) { w.asks(exchange{method: "GET", url: url, status: 200, without: "request"}) }, "a request's request is not in the record"},
		{"a body that was erased", func(w *tape) {
			w.asks(exchange{method: "POST", url: url, asked: "q", status: 200, without: "request_body"})
		}, "the body of POST " + url},
		{"no answer", func(w *tape) { w.asks(exchange{method: "GET", url: url}) }, "GET " + url + " got no answer"},
		{"another protocol", func(w *tape) { w.asks(exchange{method: "GET", url: url, status: 101}) }, "behind GET " + url},
		{"no end", func(w *tape) {
			w.asks(exchange{method: "GET", url: url, status: 200, facts: object{"unfinished": []string{"answer_body"}}})
		}, "GET " + url + " did not come to its end"},
		{"trailers", func(w *tape) {
			w.asks(exchange{method: "POST", url: url, status: 200, header: map[string][]string{"Content-Type": {"application/grpc+proto"}}})
		}, "the answer to POST " + url + " has trailers"},
		{"too many", func(w *tape) {
			w.asks(exchange{method: "GET", url: url, status: 200, facts: object{"count": 1, "request": nil}})
		}, "what it asked api.test:443 was too much"},
		{"a connection that was not looked into", func(w *tape) {
			w.add("network.opened", "", object{"server": object{"conn": 9, "proto": "tcp", "target": "db.test:5432", "dialed": "192.0.2.1:5432"}})
		}, "what passed between it and db.test:5432"},
		{"a connection without a request", func(w *tape) {
			w.add("network.opened", "", object{"server": object{"conn": 9, "proto": "tcp", "target": "db.test:443"}})
		}, "it said something to db.test:443"},
		{"a model", func(w *tape) { w.add("model.used", "", object{"server": object{"target": "casemate.internal:80"}}) }, "it asked a model"},
		{"a way to models that it has not", func(w *tape) {
			w.add("network.request", "", object{"server": object{"target": "casemate.internal:80", "status": 404}})
		}, "it asked for a model"},
		{"other rules", func(w *tape) {
			w.end(ran{id: "a"})
			w.add("sandbox.updated", "", object{"server": object{"network": object{"Rules": []string{"allow x.test"}}}})
			w.start(ran{id: "b", argv: []string{"b"}})
			w.asks(get(url, "one"))
		}, "the rules of its network were changed before it"},
		{"what another process left", func(w *tape) {
			w.add("process.ended", "a", object{"guest": object{"end": "exited", "leftover": 1}})
			w.start(ran{id: "b", argv: []string{"b"}})
			w.asks(get(url, "one"))
		}, "a before it left processes behind"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := recorded(t, nil)
			w.start(ran{id: "a", argv: []string{"a"}})
			tt.do(w)
			last := w.r.Processes()[len(w.r.Processes())-1].ID
			w.end(ran{id: last})
			p := w.r.Plan(Choice{Network: true, Processes: []string{last}})
			if why := p.Not[last]; !strings.HasPrefix(why, tt.want) || tt.want == "" && why != "" {
				t.Errorf("not attempted because %q, want %q", why, tt.want)
			}
			off := w.r.Plan(Choice{Processes: []string{last}}).Not[last]
			if used := strings.HasPrefix(off, "it used the network"); used == (tt.name == "what was refused then") {
				t.Errorf("without a network: %q", off)
			}
		})
	}
}

// TestNetworkBelongsToTheProcess: requests are of the process that had not ended when they began, also where they are told of
// behind its end.
func TestNetworkBelongsToTheProcess(t *testing.T) {
	w := recorded(t, nil)
	w.start(ran{id: "a", argv: []string{"a"}})
	w.asks(get("https://api.test/1", "one"))
	late := w.now
	w.run(ran{id: "b", argv: []string{"b"}})
	w.end(ran{id: "a"}) // beside b: together they can't be told apart
	w.start(ran{id: "c", argv: []string{"c"}})
	w.asks(get("https://api.test/2", "two"))
	w.asks(get("https://api.test/3", "three"))
	w.end(ran{id: "c"})
	w.start(ran{id: "d", argv: []string{"d"}})
	w.asks(exchange{method: "GET", url: "https://api.test/late", status: 200, facts: object{"began": late}})
	w.end(ran{id: "d"})
	w.r.assign()
	for id, want := range map[string]string{
		"a": "https://api.test/1 https://api.test/late", "b": "https://api.test/1 https://api.test/late",
		"c": "https://api.test/2 https://api.test/3", "d": "",
	} {
		var got []string
		for _, a := range w.r.Process(id).Answers() {
			got = append(got, a.URL)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v, want %s", id, got, want)
		}
	}
	if a := w.r.Process("c").Answers()[0]; string(a.Data) != "two" || a.Status != 200 || a.Method != "GET" {
		t.Errorf("%+v", a)
	}
}

// online are the settings of a sandbox with a network, again of one that is answered from a record.
func online(again bool) object {
	n := object{"Rules": []string{"allow https://api.test"}}
	if again {
		n["Recorded"] = true
	}
	return object{"network": n}
}

// asked is the record of one that asks twice, and says what it got.
func asked(w *tape, all ...exchange) {
	w.start(ran{id: "a", argv: []string{"fetch"}})
	out := ""
	for _, x := range all {
		w.asks(x)
		out += x.text
	}
	w.end(ran{id: "a", out: out})
}

// TestNetworkVerdicts: what is asked for is compared, and what the record does not have is named.
func TestNetworkVerdicts(t *testing.T) {
	one, two := get("https://api.test/1", "one"), get("https://api.test/2", "two")
	cookie := exchange{method: "GET", url: "https://api.test/1", status: 200, text: "one", header: map[string][]string{"Set-Cookie": {leftOut}}}
	missing := exchange{method: "GET", url: "https://api.test/new"}
	name := func(w *tape) {
		w.add("network.refused", "", object{"server": object{"proto": "dns", "target": "new.test", "verdict": object{"code": notRecorded}}})
	}
	for _, tt := range []struct {
		what     string
		recorded []exchange
		again    func(w *tape)
		want     string
		told     string
	}{
		{"the same", []exchange{one, two}, func(w *tape) { asked(w, one, two) }, "reproduced", ""},
		{"another request", []exchange{one}, func(w *tape) { asked(w, one, missing) }, "diverged at GET https://api.test/new, which it asked for and which is not in the record", "GET https://api.test/new"},
		{"one less", []exchange{one, two}, func(w *tape) { asked(w, one) }, "diverged at GET https://api.test/2, which it did not ask for again", ""},
		{"a connection", []exchange{one}, func(w *tape) {
			w.start(ran{id: "a", argv: []string{"fetch"}})
			w.asks(one)
			w.add("network.refused", "", object{"server": object{"proto": "tcp", "target": "db.test:5432", "verdict": object{"code": notRecorded}}})
			w.end(ran{id: "a", out: "one"})
		}, "diverged at a connection to db.test:5432, which it asked for and which is not in the record", "a connection to db.test:5432"},
		{"a name, and the same outcome", []exchange{one}, func(w *tape) {
			w.start(ran{id: "a", argv: []string{"fetch"}})
			name(w)
			w.asks(one)
			w.end(ran{id: "a", out: "one"})
		}, "reproduced", "the name new.test"},
		{"a name, and another outcome", []exchange{one}, func(w *tape) {
			w.start(ran{id: "a", argv: []string{"fetch"}})
			name(w)
			w.asks(one)
			w.end(ran{id: "a", out: "one", code: 6})
		}, "diverged at the name new.test, which it asked for and which is not in the record", "the name new.test"},
		{"a credential that does not matter", []exchange{cookie}, func(w *tape) { asked(w, cookie) }, "reproduced", ""},
		{"a credential that may matter", []exchange{cookie}, func(w *tape) {
			w.start(ran{id: "a", argv: []string{"fetch"}})
			w.asks(cookie)
			w.end(ran{id: "a", out: "another"})
		}, "not attempted because what it was answered is not all in the record (Set-Cookie of GET https://api.test/1)", ""},
		{"an answer that was not kept", []exchange{one}, func(w *tape) {
			x := one
			x.without = "answer_body"
			asked(w, x)
		}, "not attempted because of run 1 something was not recorded: the answer to GET https://api.test/1 is not in the record", ""},
	} {
		t.Run(tt.what, func(t *testing.T) {
			was := recorded(t, online(false))
			asked(was, tt.recorded...)
			var replays []*Record
			for run := range Runs {
				w := again(t, "web", run+1, online(true))
				tt.again(w)
				replays = append(replays, w.r)
			}
			p, runs, err := was.r.Accept(replays)
			if err != nil {
				t.Fatal(err)
			}
			got := was.r.Judge(p, runs...)
			if len(got) != 1 || !strings.HasPrefix(got[0].Text(), tt.want) {
				t.Fatalf("%s, want %s", got[0].Text(), tt.want)
			}
			if told := strings.Join(got[0].Unanswered, ", "); told != tt.told {
				t.Errorf("unanswered: %q, want %q", told, tt.told)
			}
		})
	}
}

// TestForgedAnswers: a replay that was answered otherwise than the record has it, or that reached anything, is none.
func TestForgedAnswers(t *testing.T) {
	one, two := get("https://api.test/1", "one"), get("https://api.test/1", "two")
	post := exchange{method: "POST", url: "https://api.test/1", asked: "question", status: 200, text: "answer"}
	was := recorded(t, online(false))
	asked(was, one, two, post)
	forged := func(x exchange, change func(*exchange)) exchange { change(&x); return x }
	for _, tt := range []struct {
		name     string
		settings object
		do       func(w *tape)
		want     string // "": it is accepted
	}{
		{"as it should be", online(true), func(w *tape) { asked(w, one, two, post) }, ""},
		{"less is asked for", online(true), func(w *tape) { asked(w, one) }, ""},
		{"another text", online(true), func(w *tape) { asked(w, one, forged(two, func(x *exchange) { x.text = "TWO" })) }, "was answered in it"},
		{"another status", online(true), func(w *tape) { asked(w, forged(one, func(x *exchange) { x.status = 201 })) }, "was answered in it"},
		{"another header", online(true), func(w *tape) {
			asked(w, forged(one, func(x *exchange) { x.header = map[string][]string{"X": {"y"}} }))
		}, "was answered in it"},
		{"the other order", online(true), func(w *tape) { asked(w, two, one) }, "was answered in it"},
		{"one time more", online(true), func(w *tape) { asked(w, one, two, two) }, "was answered in it"},
		{"a request that is not there", online(true), func(w *tape) { asked(w, get("https://api.test/3", "three")) }, "was answered in it"},
		{"another question", online(true), func(w *tape) { asked(w, forged(post, func(x *exchange) { x.asked = "Question" })) }, "was answered in it"},
		{"other rules", object{"network": object{"Rules": []string{"allow *"}, "Recorded": true}}, func(w *tape) { asked(w, one, two, post) }, "another network"},
		{"it may leave", online(false), func(w *tape) { asked(w, one, two, post) }, "api.test:443 was reached from it"},
		{"it has no answers", object{"network": object{"Recorded": true}}, func(w *tape) { asked(w) }, "could not be run again: it used the network"},
		{"it left", online(true), func(w *tape) {
			w.start(ran{id: "a", argv: []string{"fetch"}})
			w.add("network.opened", "", object{"server": object{"conn": 9, "proto": "tcp", "target": "api.test:443", "dialed": "192.0.2.1:443"}})
			w.end(ran{id: "a"})
		}, "api.test:443 was reached from it"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := again(t, "web", 1, tt.settings)
			tt.do(w)
			_, _, err := was.r.Accept([]*Record{w.r})
			if tt.want == "" && err == nil {
				return
			}
			if err == nil || tt.want == "" || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %s", err, tt.want)
			}
		})
	}
	// Of two runs none may have had another network.
	first, second := again(t, "web", 1, online(true)), again(t, "web", 2, nil)
	asked(first, one, two, post)
	if _, _, err := was.r.Accept([]*Record{first.r, second.r}); err == nil {
		t.Error("two runs with different networks are taken for a replay")
	}
}

// TestReplaysAreSealed: where a process did not use the network, a sandbox that could reach anything, or did, is none of a replay.
func TestReplaysAreSealed(t *testing.T) {
	one, quiet := get("https://api.test/1", "one"), recorded(t, online(false))
	quiet.run(ran{id: "a", argv: []string{"fetch"}})
	for _, tt := range []struct {
		name     string
		settings object
		asks     []exchange
		want     string
	}{
		{"no network", nil, nil, ""},
		{"one that refuses everything", object{"network": object{"Recorded": true}}, nil, ""},
		{"the recorded one, from the record", online(true), nil, ""},
		{"the recorded one", online(false), nil, "another network"},
		{"it reached the way to models", object{"network": object{}}, []exchange{one}, "api.test:443 was reached from it"},
	} {
		w := again(t, "web", 1, tt.settings)
		asked(w, tt.asks...)
		if _, _, err := quiet.r.Accept([]*Record{w.r}); tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
}

// TestRequestsAtTheSameTime: of like requests that were under way together either may have got an answer first; of those that
// came one after the other, the first got the first.
func TestRequestsAtTheSameTime(t *testing.T) {
	for _, tt := range []struct {
		name     string
		together bool
		order    []string
		ok       bool
	}{
		{"in order", false, []string{"one", "two"}, true},
		{"the other order", false, []string{"two", "one"}, false},
		{"together in order", true, []string{"one", "two"}, true},
		{"together the other way", true, []string{"two", "one"}, true},
		{"the first left out", false, []string{"two"}, false},
		{"together, the first left out", true, []string{"two"}, false},
	} {
		was, w := recorded(t, online(false)), again(t, "web", 1, online(true))
		asked(was, get("https://api.test/1", "one"), get("https://api.test/1", "two"))
		w.start(ran{id: "a", argv: []string{"fetch"}})
		began := w.now
		for _, text := range tt.order {
			x := get("https://api.test/1", text)
			if tt.together {
				x.facts = object{"began": began}
			}
			w.asks(x)
		}
		w.end(ran{id: "a"})
		if _, _, err := was.r.Accept([]*Record{w.r}); (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}
