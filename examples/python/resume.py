"""An agent whose sandbox is lost: it goes on in a new one from its last document and commit."""

import base64
import json
import os
import urllib.error
import urllib.parse
import urllib.request

URL, KEY = os.environ["CASEMATE_URL"], os.environ["CASEMATE_API_KEY"]
PLAN = "/v1/state/summer/content?name=plan"


def call(method: str, path: str, body=None, **headers: str):
    """Calls the API and returns the JSON answer; where it has an ETag, that too."""
    data = None if body is None else json.dumps(body).encode()
    headers = {k.replace("_", "-"): v for k, v in headers.items()} | {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(URL + path, data, headers, method=method)) as answer:
        return json.load(answer), answer.headers


def save(box: str, plan: dict, version: str) -> str:
    """Commits the sandbox's files and writes the plan that goes with them: version is the one that it replaces."""
    commit, _ = call("POST", f"/v1/sandboxes/{box}/commits", {"message": f"after step {plan['step']}"})
    query = urllib.parse.urlencode({"commit": commit["id"], "sandbox": box})
    condition = {"If_Match": version} if version else {"If_None_Match": "*"}
    _, headers = call("PUT", f"{PLAN}&{query}", plan, **condition)
    return headers["ETag"]


def resume() -> tuple[str, dict, str]:
    """Makes a sandbox where the agent was, and returns it with the plan and its version."""
    try:
        plan, headers = call("GET", PLAN)
    except urllib.error.HTTPError as e:
        if e.code != 404:
            raise
        box, _ = call("POST", "/v1/sandboxes", {"lifetime": "600s"})
        return box["id"], {"step": 0}, ""
    box, _ = call("POST", "/v1/sandboxes", {"lifetime": "600s", "template": headers["Casemate-Commit"]})
    return box["id"], plan, headers["ETag"]


def work(steps: int) -> None:
    """One life of the agent: some steps, each of which leaves a file, and then its sandbox is gone."""
    box, plan, version = resume()
    print(f"begins after step {plan['step']}")
    try:
        for _ in range(steps):
            plan["step"] += 1
            argv = ["sh", "-c", f"echo {plan['step']} >> steps"]
            call("POST", f"/v1/sandboxes/{box}/execute", {"process": {"argv": argv}})
            version = save(box, plan, version)
        ran, _ = call("POST", f"/v1/sandboxes/{box}/execute", {"process": {"argv": ["cat", "steps"]}})
        print("its file has", base64.b64decode(ran["stdout"]).decode().split(), "at version", version)
    finally:
        call("DELETE", f"/v1/sandboxes/{box}")


def main() -> None:
    work(2)
    work(3)
    # Somebody who still holds the first version is too late.
    try:
        call("PUT", PLAN, {"step": 99}, If_Match='"1"')
    except urllib.error.HTTPError as e:
        print("refused:", json.load(e)["code"])
    history, _ = call("GET", "/v1/state/summer/versions?name=plan")
    print("versions:", [v["version"] for v in history["versions"]], "each with a commit:", all(v["commit"] for v in history["versions"]))
    call("DELETE", "/v1/state/summer/document?name=plan&forget=true")


if __name__ == "__main__":
    main()
