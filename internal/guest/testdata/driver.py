"""A driver as small as one can be, for the tests of the guest."""
import ast
import fcntl
import json
import os
import signal
import socket
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


deaf = 0  # how many interrupts it loses


def interrupted(number, frame):
    global deaf
    if deaf:
        deaf -= 1
    elif running:
        send({"ev": "interrupted", "id": running})
        raise KeyboardInterrupt


def run(order, space):
    global running
    error = result = None
    try:
        running = order["id"]
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


def zygote():
    """Fork on request, each fork with a control socket and two pipes of its own."""
    control = socket.socket(fileno=3)
    children, buffer, passed = {}, b"", []
    send({"ev": "zygote", "pid": os.getpid()})
    while True:
        while b"\n" not in buffer:
            data, more, _, _ = socket.recv_fds(control, 4096, 64)
            if not data:
                os._exit(0)
            buffer, passed = buffer + data, passed + more
        line, buffer = buffer.split(b"\n", 1)
        order = json.loads(line)
        for slot in order.get("forget", ()):
            os.waitpid(children.pop(slot), 0)
        if order["op"] == "fork":
            pids, given, passed = [], passed, []
            for n, slot in enumerate(order["slots"]):
                pid = os.fork()
                if pid == 0:
                    control.detach()
                    for fd, to in zip(given[3 * n :], (3, 1, 2)):
                        os.dup2(fd, to)
                    os.closerange(4, 256)
                    return serve(os.fdopen(os.dup(3), "rb"), once=True)
                children[slot] = pid
                pids.append(pid)
            for fd in given:
                os.close(fd)
            send({"ev": "forked", "slot": order["slots"][0], "pids": pids})
        elif order["op"] == "reap":
            pid, status = os.waitpid(children.pop(order["slot"]), 0)
            how = {"signal": os.WTERMSIG(status)} if os.WIFSIGNALED(status) else {"code": os.WEXITSTATUS(status)}
            send({"ev": "reaped", "slot": order["slot"], "pid": pid, **how})


def serve(reader, once=False):
    space = {"__name__": "__main__"}
    signal.signal(signal.SIGINT, interrupted)
    send({"ev": "ready", "language": "python", "version": "3", "answers_interrupts": True})
    count = 0
    for line in reader:
        order = json.loads(line)
        if order["op"] == "zygote":
            return zygote()
        if order["op"] == "run":
            count += 1
            run(order, space)
            send({"ev": "end", "id": order["id"], "count": count})
            if once:
                os._exit(0)


serve(reader)
