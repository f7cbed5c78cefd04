# The part of the Python driver for fresh runs: a warm interpreter that forks children ahead of need.
# It runs no code itself; each child gets one run and ends. `driver` is the driver's module.
import gc
import importlib
import os
import signal
import socket
import sys


def serve(message):
    """Import what was asked for, then fork on request until the guest closes the socket."""
    failed = {}
    for name in message.get("imports") or ():
        try:
            importlib.import_module(name)
        except BaseException as e:
            failed[name] = f"{type(e).__name__}: {driver.text_of(e)}"
    # Nothing of what is there now is garbage: the collector must not touch it, so that the children
    # go on sharing its pages.
    gc.collect()
    gc.freeze()
    hide()
    control = socket.socket(fileno=os.dup(driver.CONTROL.fd))
    os.close(driver.CONTROL.fd)
    driver.CONTROL.fd = control.fileno()
    driver.CONTROL.send({"ev": "zygote", "failed": failed, "pid": os.getpid()})
    Zygote(control).serve()


def hide():
    """Keep children, which run as the same user, from reading or changing this process."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    except Exception:
        pass


class Zygote:
    def __init__(self, control):
        self.control = control
        self.buffer = bytearray()
        self.fds = []
        self.children = {}  # slot: pid

    def serve(self):
        while True:
            end = self.buffer.find(b"\n")
            if end < 0:
                if not self.fill():
                    return
                continue
            message = driver._decode(bytes(self.buffer[:end]))
            del self.buffer[: end + 1]
            if message["op"] == "fork":
                self.fork(message["slot"])
            elif message["op"] == "reap":
                self.reap(message["slot"])

    def fill(self):
        data, fds, _flags, _address = socket.recv_fds(self.control, 1 << 16, 16)
        self.fds.extend(fds)
        self.buffer += data
        return bool(data)

    def fork(self, slot):
        fds, self.fds = self.fds[:3], self.fds[3:]
        try:
            if len(fds) != 3:
                raise ValueError(f"{len(fds)} descriptors came with the request, not 3")
            pid = os.fork()
        except Exception as e:
            for fd in fds:
                os.close(fd)
            driver.CONTROL.send({"ev": "fork_failed", "slot": slot, "error": driver.text_of(e)})
            return
        if pid == 0:
            try:
                become_child(fds)
            finally:
                driver._real_exit(70)
        for fd in fds:
            os.close(fd)
        self.children[slot] = pid
        driver.CONTROL.send({"ev": "forked", "slot": slot, "pid": pid})

    def reap(self, slot):
        pid = self.children.pop(slot, None)
        answer = {"ev": "reaped", "slot": slot, "pid": pid}
        if pid is None:
            answer["error"] = "no such slot"
        else:
            _pid, status = os.waitpid(pid, 0)
            if os.WIFSIGNALED(status):
                answer["signal"] = os.WTERMSIG(status)
            else:
                answer["code"] = os.WEXITSTATUS(status)
        driver.CONTROL.send(answer)


def become_child(fds):
    """Turn the forked process into the driver of one run."""
    control, out, err = fds
    os.dup2(out, 1)
    os.dup2(err, 2)
    keep = driver.move_high(control)
    close_others(keep)
    driver.CONTROL.fd = keep
    driver.CONTROL.buffer.clear()
    driver.CONTROL.searched = 0
    driver.Run.forked = False
    reseed()
    gc.enable()
    driver.hello()
    message = driver.receive()
    if message is not None and message.get("op") == "run":
        driver.handle_run(message)
    driver.leave()


def close_others(keep):
    """Close every descriptor but the standard ones and the socket: nothing of the zygote's stays."""
    try:
        names = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        names = range(os.sysconf("SC_OPEN_MAX"))
    for fd in names:
        if fd > 2 and fd != keep:
            try:
                os.close(fd)
            except OSError:
                pass


def reseed():
    """Give this process random numbers of its own. What can't be changed in a fork is the seed of
    hash(): all children of one zygote share it."""
    if "random" in sys.modules:
        sys.modules["random"].seed()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    uuid = sys.modules.get("uuid")
    if uuid is not None:
        uuid._last_timestamp = None
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()
    signal.signal(signal.SIGINT, driver.on_sigint)
