"""Asks models with the official SDKs, which know nothing but their usual variables."""

import sys

import anthropic
import openai

a, o = anthropic.Anthropic(), openai.OpenAI()
m = {"model": "m-1", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}


def spent(call):
    try:
        call()
    except (anthropic.PermissionDeniedError, openai.PermissionDeniedError) as e:
        return type(e).__name__
    return "answered"


if sys.argv[1:] == ["spent"]:
    print("anthropic", spent(lambda: a.messages.create(**m)))
    sys.exit()
print("message", a.messages.create(**m).content[0].text)
with a.messages.stream(**m) as s:
    print("stream", "".join(s.text_stream), s.get_final_message().usage.output_tokens)
print("count", a.messages.count_tokens(model="m-1", messages=m["messages"]).input_tokens)
print("chat", o.chat.completions.create(**m).choices[0].message.content)
print("chat stream", "".join(c.choices[0].delta.content or "" for c in o.chat.completions.create(stream=True, **m)))
print("responses", o.responses.create(model="m-1", input="hello").output_text)
print("embedding", o.embeddings.create(model="m-1", input="hello", encoding_format="float").data[0].embedding)
print("models", [x.id for x in o.models.list()])
