"""Templates are built by the SDK: steps, tags, and what goes wrong."""

import unittest
from uuid import uuid4

from e2b import BuildException, Sandbox, Template


def unique() -> str:
    return f"built-{uuid4()}"


class Build(unittest.TestCase):
    def test_steps_and_tags(self):
        name = unique()
        lines = []
        template = Template().from_template("base").set_envs({"COLOUR": "blue"}).run_cmd("echo $COLOUR > made.txt")
        built = Template.build(template, f"{name}:v1", on_build_logs=lambda entry: lines.append(entry.message))
        self.assertTrue(any("RUN echo" in line for line in lines), lines)
        with Sandbox.create(f"{name}:v1") as box:
            self.assertEqual(box.files.read("made.txt"), "blue\n")
        self.assertTrue(Template.exists(name))
        self.assertFalse(Template.exists(unique()))
        assigned = Template.assign_tags(f"{name}:v1", ["stable"])
        self.assertEqual(str(assigned.build_id), built.build_id)
        Template.remove_tags(name, "v1")
        self.assertEqual([t.tag for t in Template.get_tags(built.template_id)], ["stable"])

    def test_background_and_failure(self):
        built = Template.build_in_background(Template().from_template("base").run_cmd("exit 3"), unique())
        while (status := Template.get_build_status(built)).status in ("building", "waiting"):
            pass
        self.assertEqual(status.status.value if hasattr(status.status, "value") else status.status, "error")
        self.assertIn("exit code 3", status.reason.message)
        with self.assertRaisesRegex(BuildException, "invalid username: 'nobody-here'"):
            Template.build(Template().from_template("base").run_cmd("true", user="nobody-here"), unique())


if __name__ == "__main__":
    unittest.main()
