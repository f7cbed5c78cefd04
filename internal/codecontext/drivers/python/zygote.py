# The part of the Python driver for fresh runs: a warm interpreter that forks children ahead of need.
# It runs no code itself; each child gets one run and ends. `driver` is the driver's module.
import atexit  # what leave() needs
import fcntl
import gc
import importlib
import linecache
import os
import socket
import sys

# What a child does before it is ready is done for every run, and each page that it touches is a page
# to copy: so all that can be known before the fork is made before it.
READY = driver._encode(dict(driver.ready(), pid="%d")).replace('"%d"', "%d").encode("ascii") + b"\n"
TOP = os.sysconf("SC_OPEN_MAX")
PRACTICE = 16  # runs, after which the interpreter has adapted its code to what it does


def serve(message):
    """Import what was asked for, then fork on request until the guest closes the socket."""
    failed = {}
    for name in message.get("imports") or ():
        try:
            importlib.import_module(name)
        except BaseException as e:
            failed[name] = f"{type(e).__name__}: {driver.text_of(e)}"
    practise()
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
            for slot in message.get("forget") or ():
                self.wait(slot)
            if message["op"] == "fork":
                self.fork(message["slots"], 4 if message.get("place") else 3)
            elif message["op"] == "reap":
                self.reap(message["slot"])

    def fill(self):
        data, fds, _flags, _address = socket.recv_fds(self.control, 1 << 16, 64)
        self.fds.extend(fds)
        self.buffer += data
        return bool(data)

    def fork(self, slots, count):
        """Fork a child for each slot, as many as there can be. What is written between two forks is copied
        for the first one: so that is little."""
        pids = []
        answer = {"ev": "forked", "slot": slots[0], "pids": pids}
        given, self.fds = self.fds, []
        try:
            if len(given) != count * len(slots):
                raise ValueError(f"{len(given)} descriptors came with the request, not {count * len(slots)}")
            at = 0
            for _slot in slots:
                pid = os.fork()
                if pid == 0:
                    try:
                        become_child(given[at : at + count])
                    finally:
                        driver._real_exit(70)
                pids.append(pid)
                at += count
        except Exception as e:
            answer["error"] = driver.text_of(e)
        for fd in given:
            os.close(fd)
        self.children.update(zip(slots, pids))
        driver.CONTROL.send(answer)

    def wait(self, slot):
        pid = self.children.pop(slot, None)
        return (None, 0) if pid is None else os.waitpid(pid, 0)

    def reap(self, slot):
        pid, status = self.wait(slot)
        answer = {"ev": "reaped", "slot": slot, "pid": pid}
        if pid is None:
            answer["error"] = "no such slot"
        elif os.WIFSIGNALED(status):
            answer["signal"] = os.WTERMSIG(status)
        else:
            answer["code"] = os.WEXITSTATUS(status)
        driver.CONTROL.send(answer)


def practise():
    """Go the way of a run with code that does and shows nothing: each child then finds imported what is
    imported late, and the interpreter's own code adapted to what it does, which else happens in each."""
    run = driver.Run
    fd, driver.CONTROL.fd = driver.CONTROL.fd, os.open(os.devnull, os.O_WRONLY)
    space, cells, total = dict(run.ns), dict(driver.Cells.sizes), driver.Cells.total
    try:
        for _ in range(PRACTICE):
            driver.handle_run({"id": "", "code": "None", "silent": True})
            driver.publish({"text/plain": "2"}, None, main=True)
            driver.CONTROL.send(run.held.pop())
            driver._decode(READY % 0)
    finally:
        os.close(driver.CONTROL.fd)
        driver.CONTROL.fd = fd
        run.ns.clear()
        run.ns.update(space)
        for name in set(driver.Cells.sizes) - set(cells):
            linecache.cache.pop(name, None)
        driver.Cells.sizes.clear()
        driver.Cells.sizes.update(cells)
        driver.Cells.total = total
        run.silent, run.cell_name = False, ""


def become_child(fds):
    """Turn the forked process into the driver of one run."""
    if len(fds) > 3:
        os.write(fds[3], b"0")  # into its place, by itself: who is moved by others waits for all processors
    os.dup2(fds[1], 1)
    os.dup2(fds[2], 2)
    control = driver.CONTROL
    try:
        keep = fcntl.fcntl(fds[0], fcntl.F_DUPFD_CLOEXEC, 500)
    except OSError:  # the limit of descriptors is lower
        keep = driver.move_high(fds[0])
    control.fd = keep
    os.closerange(3, keep)  # nothing of the zygote's stays
    os.closerange(keep + 1, TOP)
    driver.Run.forked = False
    reseed()
    gc.enable()
    os.write(keep, READY % os.getpid())
    message = control.receive()
    if message is not None and message.get("op") == "run":
        driver.handle_run(message)
    driver.leave()


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
