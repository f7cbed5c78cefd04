"""The HTTP API with the standard library: a sandbox, a file, a command, code, and its end."""

import base64
import json
import os
import urllib.error
import urllib.parse
import urllib.request

URL, KEY = os.environ["CASEMATE_URL"], os.environ["CASEMATE_API_KEY"]


def call(method: str, path: str, body=None) -> dict:
    """Calls the API with a JSON body, or with bytes as they are, and returns the JSON answer."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
    try:
        with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers, method=method)) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as e:
        problem = json.load(e)  # code, message and often a hint what to do
        raise SystemExit(f"{method} {path}: {problem['message']} {problem.get('hint', '')}")


def main() -> None:
    box = call("POST", "/v1/sandboxes", {"lifetime": "600s", "limits": {"memoryBytes": 256 << 20}})
    path = f"/v1/sandboxes/{box['id']}"
    try:
        query = urllib.parse.urlencode({"path": "data/numbers.txt", "parents": "true"})
        call("PUT", f"{path}/files?{query}", b"3\n1\n2\n")

        ran = call("POST", f"{path}/execute", {"process": {"argv": ["sort", "data/numbers.txt"], "timeout": "10s"}})
        print("sorted:", base64.b64decode(ran["stdout"]).decode().split())

        ran = call("POST", f"{path}/execute", {"process": {"argv": ["sh", "-c", "echo oops >&2; exit 3"]}})
        print("exit code:", ran["process"]["code"], base64.b64decode(ran["stderr"]).decode().strip())

        # Code runs in an interpreter that keeps its variables between calls.
        call("POST", f"{path}/code", {"run": {"language": "python", "code": "numbers = [3, 1, 2]"}})
        ran = call("POST", f"{path}/code", {"run": {"language": "python", "code": "sum(numbers)"}})
        print("sum:", ran["results"][0]["data"]["text/plain"])
    finally:
        print("then:", call("DELETE", path)["state"])


if __name__ == "__main__":
    main()
