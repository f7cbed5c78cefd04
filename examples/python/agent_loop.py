"""An agent's loop whose tool is a sandbox. The model is a script here: put a call of yours in its place."""

import base64
import json
import os
import urllib.request

URL, KEY = os.environ["CASEMATE_URL"], os.environ["CASEMATE_API_KEY"]

# What a model is told about the tool, in the form that most models take.
TOOL = {
    "name": "run_command",
    "description": "Run a shell command in a sandbox. Files stay between calls.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def call(method: str, path: str, body: dict | None = None) -> dict:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body is not None else None
    with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers, method=method)) as answer:
        return json.load(answer)


def run_command(box: str, command: str) -> str:
    """The tool: what the model gets to see of a command."""
    spec = {"argv": ["sh", "-c", f"({command}) 2>&1"], "timeout": "30s"}
    ran = call("POST", f"/v1/sandboxes/{box}/execute", {"process": spec})
    output, end = base64.b64decode(ran.get("stdout", "")).decode(errors="replace"), ran["process"]
    how = f"exit code {end.get('code', 0)}" if end["end"] == "exited" else end["end"]
    return f"{output[-8000:]}[{how}]"


def model(messages: list[dict]) -> dict:
    """Says what to do next. A real one reads the messages and TOOL; this one has its lines learnt."""
    script = [
        {"tool": "run_command", "input": {"command": "printf 'def square(x):\\n    return x + x\\n' > calc.py"}},
        {"tool": "run_command", "input": {"command": "python3 -c 'import calc; assert calc.square(3) == 9'"}},
        {"tool": "run_command", "input": {"command": "sed -i 's/x + x/x ** 2/' calc.py"}},
        {"tool": "run_command", "input": {"command": "python3 -c 'import calc; print(calc.square(3))'"}},
    ]
    turns = sum(1 for m in messages if m["role"] == "assistant")
    if turns < len(script):
        return script[turns]
    return {"text": "square() was wrong for 3, and is right now: " + messages[-1]["content"].split("[")[0].strip()}


def main() -> None:
    box = call("POST", "/v1/sandboxes", {"lifetime": "600s", "labels": {"agent": "example"}})["id"]
    try:
        messages = [{"role": "user", "content": "write square() and test it"}]
        for _ in range(20):  # an agent that never ends is no agent
            reply = model(messages)
            messages.append({"role": "assistant", "content": json.dumps(reply)})
            if "tool" not in reply:
                print("agent:", reply["text"])
                return
            result = run_command(box, **reply["input"])
            print(f"$ {reply['input']['command'][:60]}\n  {result.strip().splitlines()[-1]}")
            messages.append({"role": "tool", "content": result})
        raise SystemExit("the agent did not come to an end")
    finally:
        call("DELETE", f"/v1/sandboxes/{box}")


if __name__ == "__main__":
    main()
