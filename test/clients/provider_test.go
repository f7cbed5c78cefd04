package clients

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// provider is a fake model provider of both families of APIs, which wants the key. Each answer tells that 7 tokens came
// in and 3 went out.
func provider() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/messages", func(w http.ResponseWriter, r *http.Request) {
		if !streamed(r) {
			tell(w, `{"id":"m","type":"message","role":"assistant","model":"m-1","stop_reason":"end_turn","content":[{"type":"text","text":"hi there"}],"usage":{"input_tokens":7,"output_tokens":3}}`)
			return
		}
		events(w, `event: message_start
data: {"type":"message_start","message":{"id":"m","type":"message","role":"assistant","model":"m-1","content":[],"stop_reason":null,"usage":{"input_tokens":7,"output_tokens":1}}}`,
			`event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}`, `event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi "}}`, `event: content_block_delta
data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"there"}}`, `event: content_block_stop
data: {"type":"content_block_stop","index":0}`, `event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{"output_tokens":3}}`, `event: message_stop
data: {"type":"message_stop"}`)
	})
	mux.HandleFunc("POST /v1/messages/count_tokens", func(w http.ResponseWriter, _ *http.Request) { tell(w, `{"input_tokens":7}`) })
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		const usage = `"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}`
		if !streamed(r) {
			tell(w, `{"id":"c","object":"chat.completion","created":1,"model":"m-1","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":"hi there"}}],`+usage+`}`)
			return
		}
		const head = `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m-1","choices":[`
		events(w, head+`{"index":0,"delta":{"role":"assistant","content":"hi "},"finish_reason":null}]}`,
			head+`{"index":0,"delta":{"content":"there"},"finish_reason":"stop"}]}`, head+`],`+usage+`}`, `data: [DONE]`)
	})
	mux.HandleFunc("POST /v1/responses", func(w http.ResponseWriter, _ *http.Request) {
		tell(w, `{"id":"r","object":"response","created_at":1,"model":"m-1","status":"completed","parallel_tool_calls":true,"tool_choice":"auto","tools":[],`+
			`"output":[{"type":"message","id":"o","role":"assistant","status":"completed","content":[{"type":"output_text","text":"hi there","annotations":[]}]}],`+
			`"usage":{"input_tokens":7,"output_tokens":3,"total_tokens":10,"input_tokens_details":{"cached_tokens":0},"output_tokens_details":{"reasoning_tokens":0}}}`)
	})
	mux.HandleFunc("POST /v1/embeddings", func(w http.ResponseWriter, _ *http.Request) {
		tell(w, `{"object":"list","model":"m-1","data":[{"object":"embedding","index":0,"embedding":[0.5,0.25]}],"usage":{"prompt_tokens":7,"total_tokens":7}}`)
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		tell(w, `{"object":"list","data":[{"id":"m-1","object":"model","created":1,"owned_by":"x"}]}`)
	})
	return guarded(mux, func(r *http.Request) bool {
		return r.Header.Get("X-Api-Key") == value || r.Header.Get("Authorization") == "Bearer "+value
	})
}

func streamed(r *http.Request) bool {
	var q struct{ Stream bool }
	_ = json.NewDecoder(r.Body).Decode(&q)
	return q.Stream
}

// tell answers with text, and with the key, which must not arrive.
func tell(w http.ResponseWriter, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Echo", value)
	fmt.Fprint(w, strings.TrimSuffix(text, "}")+`,"echo":"`+value+`"}`)
}

func events(w http.ResponseWriter, list ...string) {
	w.Header().Set("Content-Type", "text/event-stream")
	for _, e := range list {
		fmt.Fprint(w, e+"\n\n")
		w.(http.Flusher).Flush()
	}
}
