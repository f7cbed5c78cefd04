"""Code contexts and fresh runs, as the machine of test/qemu.sh has them: on control groups of version 2.

Takes the server's socket and a sandbox. Prints what failed, and leaves with 1 then.
"""
import http.client
import json
import socket
import sys

SOCKET, SANDBOX = sys.argv[1:]
failed = []


def call(method, path, body=None):
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(SOCKET)
    connection.request(method, f"/v1/sandboxes/{SANDBOX}/{path}", body and json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200:
        raise SystemExit(f"{method} {path}: {answer.status} {text!r}")
    return json.loads(text)


def run(code, **how):
    answer = call("POST", "code", {"run": {"code": code, "timeout": "300s", "grace": "60s", **how}})
    shown = [r["data"]["text/plain"] for r in answer.get("results", []) if r.get("main")]
    return answer["run"], shown[0] if shown else None


def check(what, got, want):
    print(("ok    " if got == want else "FAILED"), what, got, flush=True)
    if got != want:
        failed.append(what)


run("x = 20\ndef twice(n): return 2 * n")
check("variables last", run("twice(x) + 2")[1], "42")
check("an endless loop is interrupted", run("while True: pass", timeout="3s")[0]["end"], "timed_out")
check("and the variables are kept", run("x")[1], "20")

seen = [run("import os, random; os.getpid(), random.random(), 'x' in globals(), open('/proc/self/cgroup').read()", fresh=True)[1] for _ in range(6)]
check("fresh runs", len(set(seen)), 6)
values = [eval(s) for s in seen]
check("have a process and random numbers of their own", (len({v[0] for v in values}), len({v[1] for v in values})), (6, 6))
check("see nothing of others", {v[2] for v in values}, {False})
groups = {v[3] for v in values}
check("have a control group of their own", len(groups) == 6 and all(g.startswith("0::/") for g in groups), True)

run("import subprocess; subprocess.Popen(['sleep', '4321'], start_new_session=True).pid", fresh=True)
left = "import os\nn = 0\nfor p in os.listdir('/proc'):\n    try: n += open(f'/proc/{p}/cmdline').read() == 'sleep\\0' + '4321\\0'\n    except OSError: pass\nn"
for _ in range(60):
    gone = run(left + "; __import__('time').sleep(0.5) if n else None; n")[1]
    if gone == "0":
        break
check("what a fresh run left behind goes with it", gone, "0")

end, _ = run("import ctypes; ctypes.string_at(0)", fresh=True)
check("a fresh run that crashes says how", (end["end"], end.get("driver_end") or end.get("driverEnd"), end.get("driver_signal") or end.get("driverSignal")), ("driver_ended", "signaled", 11))
end, _ = run("import ctypes; ctypes.string_at(0)")
check("so does a context", (end["end"], end.get("driver_signal") or end.get("driverSignal")), ("driver_ended", 11))
call("POST", "contexts/python/restart", {})
check("which can be restarted", run("1+1")[1], "2")
call("DELETE", "contexts/python")
check("and deleted", run("'x' in globals()")[1], "False")
sys.exit(bool(failed))
