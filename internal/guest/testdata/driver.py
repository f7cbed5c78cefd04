"""A driver as small as one can be, for the tests of the guest."""
import ast
import fcntl
import json
import os
import signal
import sys
import traceback

fcntl.fcntl(3, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
reader = os.fdopen(os.dup(3), "rb")
running = False


def send(message):
    sys.stdout.flush()
    sys.stderr.flush()
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(3, line):]


def interrupted(number, frame):
    if running:
        raise KeyboardInterrupt


def run(order, space):
    global running
    error = result = None
    try:
        running = True
        tree = ast.parse(order["code"], "<cell>")
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, "<cell>", "exec"), space)
        if last is not None:
            result = eval(compile(last, "<cell>", "eval"), space)
    except BaseException as e:
        error = e
    running = False
    if result is not None:
        send({"ev": "result", "id": order["id"], "main": True, "data": {"text/plain": repr(result)}})
    if error is not None:
        send({"ev": "error", "id": order["id"], "name": type(error).__name__, "value": str(error),
              "traceback": "".join(traceback.format_exception(error))})


space = {"__name__": "__main__"}
signal.signal(signal.SIGINT, interrupted)
send({"ev": "ready", "language": "python", "version": "3"})
count = 0
for line in reader:
    order = json.loads(line)
    if order["op"] == "run":
        count += 1
        run(order, space)
        send({"ev": "end", "id": order["id"], "count": count})
