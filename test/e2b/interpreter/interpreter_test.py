"""Scenarios with E2B's code interpreter SDK for Python as its users write them, synchronous and asynchronous."""

import asyncio
import unittest

from e2b import NotFoundException, TimeoutException
from e2b_code_interpreter import AsyncSandbox, Sandbox


class Interpreter(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.box = Sandbox.create(timeout=600, envs={"GLOBAL": "g"})
        cls.addClassCleanup(cls.box.kill)

    def test_variables_last(self):
        self.box.run_code("x = 1")
        r = self.box.run_code("x += 1; x")
        self.assertEqual(r.text, "2")
        self.assertEqual(r.logs.stdout, [])

    def test_output_and_errors(self):
        seen = []
        r = self.box.run_code("print('a'); 1/0", on_stdout=lambda m: seen.append(m.line), on_error=lambda e: seen.append(e.name))
        self.assertEqual(r.error.name, "ZeroDivisionError")
        self.assertEqual(seen, ["a\n", "ZeroDivisionError"])

    def test_environment(self):
        code = "import os; os.environ.get('GLOBAL'), os.environ.get('MINE')"
        self.assertEqual(self.box.run_code(code, envs={"MINE": "m"}).text, "('g', 'm')")
        self.assertEqual(self.box.run_code(code).text, "('g', None)")

    def test_contexts(self):
        c = self.box.create_code_context(cwd="/tmp")
        self.box.run_code("y = 5", context=c)
        self.assertEqual(self.box.run_code("y", context=c).text, "5")
        self.assertEqual(self.box.run_code("y").error.name, "NameError")
        self.assertEqual(self.box.list_code_contexts()[-1].id, c.id)
        self.box.restart_code_context(c)
        self.assertEqual(self.box.run_code("y", context=c).error.name, "NameError")
        self.box.remove_code_context(c)
        with self.assertRaises(NotFoundException):
            self.box.run_code("1", context=c)

    def test_much_text(self):
        n = (4 << 20) // 9
        r = self.box.run_code(f"""
import os
b = ('é漢😀' * {n}).encode()
for i in range(0, len(b), 4093): os.write(1, b[i:i+4093])
'done'""")
        self.assertEqual(r.text, "done")
        self.assertTrue("".join(r.logs.stdout) == "é漢😀" * n)

    def test_interrupt(self):
        self.box.run_code("kept = 1")
        with self.assertRaises(TimeoutException):
            self.box.run_code("while True: pass", timeout=1)
        self.assertEqual(self.box.run_code("kept", timeout=600).text, "1")


class Asynchronous(unittest.TestCase):
    def test_many_contexts_side_by_side(self):
        async def scenario():
            box = await AsyncSandbox.create(timeout=600)
            try:
                contexts = await asyncio.gather(*(box.create_code_context() for _ in range(4)))
                code = "import time; time.sleep(0.5); {}"
                runs = await asyncio.gather(*(box.run_code(code.format(i), context=c) for i, c in enumerate(contexts)))
                self.assertEqual([r.text for r in runs], ["0", "1", "2", "3"])
            finally:
                await box.kill()

        asyncio.run(scenario())


if __name__ == "__main__":
    unittest.main()
