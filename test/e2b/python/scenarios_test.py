"""Scenarios with E2B's SDK for Python as its users write them, synchronous and asynchronous.

The server is named by E2B_API_URL and E2B_SANDBOX_URL; nothing else differs from a program that runs at E2B.
"""

import asyncio
import json
import os
import socket
import time
import unittest
import urllib.request
from urllib.error import HTTPError

from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)


class Case(unittest.TestCase):
    def create(self, **opts):
        box = Sandbox.create(**{"timeout": 120, **opts})
        self.addCleanup(box.kill)
        return box


class Control(Case):
    def test_life(self):
        box = self.create(metadata={"run": "x y&z", "odd key!": "ü"}, envs={"X": "1"})
        self.assertTrue(box.is_running())
        info = box.get_info()
        self.assertEqual(info.metadata, {"run": "x y&z", "odd key!": "ü"})
        self.assertEqual(info.state, SandboxState.RUNNING)
        self.assertEqual(round((info.end_at - info.started_at).total_seconds()), 120)
        found = Sandbox.list(query=SandboxQuery(metadata={"run": "x y&z"})).next_items()
        self.assertEqual([s.sandbox_id for s in found], [box.sandbox_id])
        self.assertTrue(box.kill())
        self.assertFalse(box.kill())
        self.assertFalse(box.is_running())
        with self.assertRaises(NotFoundException):
            Sandbox.connect(box.sandbox_id)

    def test_pages(self):
        run = f"pages-{time.time()}"
        ids = [self.create(metadata={"run": run}).sandbox_id for _ in range(3)][::-1]
        pages = Sandbox.list(limit=2, query=SandboxQuery(metadata={"run": run}))
        got = []
        while pages.has_next:
            got += [s.sandbox_id for s in pages.next_items()]
        self.assertEqual(got, ids)

    def test_lifetime(self):
        box = self.create(timeout=300)
        before = box.get_info().end_at
        Sandbox.connect(box.sandbox_id, timeout=10)
        self.assertEqual(box.get_info().end_at, before)
        box.set_timeout(20)
        self.assertLess(box.get_info().end_at, before)

    def test_pause(self):
        box = self.create()
        box.files.write("note.txt", "before")
        cmd = box.commands.run("sleep 600", background=True, timeout=0)
        box.pause()
        self.assertFalse(box.is_running())
        self.assertEqual(box.get_info().state, SandboxState.PAUSED)
        again = Sandbox.connect(box.sandbox_id)
        self.assertEqual(again.files.read("note.txt"), "before")
        self.assertIn(cmd.pid, [p.pid for p in again.commands.list()])

    def test_wrong_key(self):
        with self.assertRaises(AuthenticationException):
            Sandbox.create(api_key="e2b_" + "0" * 40)

    def test_metrics(self):
        metrics = self.create().get_metrics()
        self.assertEqual(metrics[0].mem_total, 1 << 30)

    def test_snapshot(self):
        box = self.create(envs={"X": "1"})
        box.files.write("state", "one")
        snapshot = box.create_snapshot()
        box.kill()
        again = self.create(template=snapshot.snapshot_id)
        self.assertEqual(again.commands.run("cat state; echo $X").stdout, "one1\n")
        self.assertTrue(Sandbox.delete_snapshot(snapshot.snapshot_id))
        self.assertFalse(Sandbox.delete_snapshot(snapshot.snapshot_id))

    def test_fork(self):
        box = self.create()
        box.files.write("state", "one")
        forks = box.fork(count=2)
        for fork in forks:
            self.addCleanup(fork.kill)
        forks[0].files.write("state", "two")
        self.assertEqual([b.files.read("state") for b in (box, *forks)], ["one", "two", "one"])

    def test_pause_without_memory(self):
        box = self.create()
        boot = "cat /proc/sys/kernel/random/boot_id"
        before = box.commands.run(boot).stdout
        box.files.write("state", "one")
        box.pause(keep_memory=False)
        again = box.connect()
        self.assertEqual(again.files.read("state"), "one")
        self.assertNotEqual(again.commands.run(boot).stdout, before)


class Commands(Case):
    def test_run(self):
        box = self.create(envs={"A": "b"})
        got = box.commands.run("echo out $A; echo err >&2; pwd", cwd="/tmp")
        self.assertEqual((got.exit_code, got.stdout, got.stderr), (0, "out b\n/tmp\n", "err\n"))
        with self.assertRaises(CommandExitException) as failed:
            box.commands.run("echo no; exit 3")
        self.assertEqual((failed.exception.exit_code, failed.exception.stdout), (3, "no\n"))
        with self.assertRaises(TimeoutException):
            box.commands.run("sleep 60", timeout=1)

    def test_stdin_and_kill(self):
        box = self.create()
        cmd = box.commands.run("cat", background=True, stdin=True)
        box.commands.send_stdin(cmd.pid, "fed\n")
        for out, _, _ in cmd:
            self.assertEqual(out, "fed\n")
            break
        self.assertTrue(box.commands.kill(cmd.pid))
        self.assertFalse(box.commands.kill(999_999))

    def test_killed_sandbox(self):
        box = self.create()
        cmd = box.commands.run("sleep 60", background=True)
        box.kill()
        with self.assertRaises(TimeoutException):
            cmd.wait()


class Files(Case):
    def test_files(self):
        box = self.create()
        self.assertEqual(box.files.write("dir/a.txt", "héllo").path, "/home/user/dir/a.txt")
        self.assertEqual(box.files.read("dir/a.txt"), "héllo")
        self.assertEqual([(e.name, e.size) for e in box.files.list("dir")], [("a.txt", 6)])
        box.files.rename("dir/a.txt", "dir/b.txt")
        self.assertFalse(box.files.exists("dir/a.txt"))
        data = bytes(i * 7 % 256 for i in range(300_000))
        box.files.write("bytes", data)
        self.assertEqual(bytes(box.files.read("bytes", format="bytes")), data)
        box.files.remove("dir")
        with self.assertRaises(NotFoundException):
            box.files.read("dir/b.txt")

    def test_watch(self):
        box = self.create()
        watch = box.files.watch_dir(".")
        box.files.write("w1", "x")
        seen = []
        for _ in range(1000):
            seen += [e.name for e in watch.get_new_events()]
            if "w1" in seen:
                break
            time.sleep(0.05)
        self.assertIn("w1", seen)
        watch.stop()

    def test_links(self):
        box = self.create()
        box.files.write("link.txt", "by link")
        with urllib.request.urlopen(box.download_url("link.txt")) as r:
            self.assertEqual(r.read(), b"by link")
        with self.assertRaises(HTTPError) as refused:
            urllib.request.urlopen(box.download_url("link.txt", use_signature_expiration=-60))
        self.assertEqual(json.load(refused.exception), {"code": 401, "message": "signature is already expired"})
        refused.exception.close()


class Ports(Case):
    def test_host(self):
        box = self.create()
        box.files.write("/tmp/www/index.html", "from inside")
        box.commands.run("python3 -m http.server 8000 -d /tmp/www", background=True, timeout=0)
        request = urllib.request.Request(os.environ["E2B_SANDBOX_URL"], headers={"Host": box.get_host(8000)})
        for _ in range(1000):
            try:
                with urllib.request.urlopen(request) as r:
                    self.assertEqual(r.read(), b"from inside")
                    return
            except HTTPError as err:  # 502 until it listens
                self.assertEqual(err.code, 502)
                err.close()
                time.sleep(0.05)
        self.fail("the server inside does not come up")


class Names(Case):
    """Host names over TLS, with the certificate of the server's own authority, which SSL_CERT_FILE trusts."""

    def setUp(self):
        # As systemd's resolver has it: every name below localhost leads to the machine itself (RFC 6761).
        resolve = socket.getaddrinfo
        socket.getaddrinfo = lambda host, *a, **k: resolve("127.0.0.1" if str(host).endswith(".localhost") else host, *a, **k)
        self.addCleanup(setattr, socket, "getaddrinfo", resolve)

    def test_port(self):
        box = self.create()
        box.files.write("/tmp/www/index.html", "over TLS")
        box.commands.run("python3 -m http.server 8000 -d /tmp/www", background=True, timeout=0)
        for _ in range(1000):
            try:
                with urllib.request.urlopen(f"https://{box.get_host(8000)}") as r:
                    self.assertEqual(r.read(), b"over TLS")
                    return
            except HTTPError as err:  # 502 until it listens
                self.assertEqual(err.code, 502)
                err.close()
                time.sleep(0.05)
        self.fail("the server inside does not come up")

    def test_nothing_but_a_domain(self):
        domain = self.create().get_host(1).split(".", 1)[1]
        kept = {name: os.environ.pop(name) for name in ("E2B_API_URL", "E2B_SANDBOX_URL")}
        self.addCleanup(os.environ.update, kept)
        box = Sandbox.create(domain=domain, timeout=600)
        try:
            self.assertEqual(box.commands.run("echo by name").stdout, "by name\n")
            box.files.write("note", "by name")
            self.assertEqual(box.files.read("note"), "by name")
        finally:
            self.assertTrue(box.kill())


class Asynchronous(unittest.IsolatedAsyncioTestCase):
    async def test_many(self):
        boxes = await asyncio.gather(*(AsyncSandbox.create(timeout=600) for _ in range(5)))
        try:
            said = await asyncio.gather(*(b.commands.run("echo $E2B_SANDBOX_ID") for b in boxes))
            self.assertEqual([r.stdout.strip() for r in said], [b.sandbox_id for b in boxes])
            box = boxes[0]
            await box.files.write("a", "b")
            self.assertEqual(await box.files.read("a"), "b")
            out = []
            pty = await box.pty.create(size=_size(), on_data=out.append)
            await box.pty.send_stdin(pty.pid, b"stty size; exit\n")
            await pty.wait()
            self.assertIn(b"24 80", b"".join(out))
        finally:
            killed = await asyncio.gather(*(b.kill() for b in boxes))
        self.assertEqual(killed, [True] * len(boxes))


def _size():
    from e2b import PtySize

    return PtySize(rows=24, cols=80)


if __name__ == "__main__":
    unittest.main()
