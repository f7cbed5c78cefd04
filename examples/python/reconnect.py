"""A connection breaks while a process prints; what was missed is read by its offset.

Output is kept by the sandbox and counted in bytes, standard output and error in one, so a program that was
away, or was started anew, goes on where it was. Nothing is lost, and nothing is seen twice.
"""

import http.client
import json
import os
import urllib.parse

server = urllib.parse.urlsplit(os.environ["CASEMATE_URL"])
AUTH = {"Authorization": f"Bearer {os.environ['CASEMATE_API_KEY']}"}


def connect() -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if server.scheme == "https" else http.client.HTTPConnection
    return kind(server.hostname, server.port, timeout=60)


def call(method: str, path: str, body: dict | None = None) -> dict:
    c = connect()
    c.request(method, path, json.dumps(body) if body is not None else None, {**AUTH, "Content-Type": "application/json"})
    return json.load(c.getresponse())


def read(path: str, offset: int) -> tuple[bytes, int, str | None]:
    """Returns what was printed from offset on, where to go on, and how the process ended once it has."""
    c = connect()
    c.request("GET", f"{path}/output?offset={offset}&wait=30s", headers={**AUTH, "Accept": "application/octet-stream"})
    answer = c.getresponse()
    data = answer.read()
    return data, int(answer.headers["Casemate-Next-Offset"]), answer.headers.get("Casemate-Process-End")


box = call("POST", "/v1/sandboxes", {"lifetime": "600s"})["id"]
try:
    path = f"/v1/sandboxes/{box}/processes"
    script = "for i in 1 2 3 4 5 6; do echo line $i; sleep 0.2; done"
    # The id is ours: were the answer lost, asking again would attach to the same process.
    call("POST", path, {"process": {"id": "counter", "argv": ["sh", "-c", script]}})

    first, offset, _ = read(f"{path}/counter", 0)
    print("before:", first.decode().splitlines()[0])
    # Here the connection, or this whole program, may break. All that is needed later: sandbox, process, offset.
    call("GET", f"{path}/counter/wait?timeout=30s")

    seen, end = first, None
    while end is None:
        missed, offset, end = read(f"{path}/counter", offset)
        seen += missed
    print("in all:", ", ".join(seen.decode().splitlines()))
    print("end:", end)
finally:
    call("DELETE", f"/v1/sandboxes/{box}")
