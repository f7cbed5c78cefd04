"""E2B's SDK, pointed at a Casemate server by three settings: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY."""

from e2b import CommandExitException, Sandbox

with Sandbox.create(timeout=600, envs={"GREETING": "hello"}) as box:
    print(box.commands.run('echo "$GREETING from $(uname -s)"').stdout, end="")

    box.files.write("/home/user/app/main.py", "print('written by the SDK')\n")
    print(box.commands.run("python3 main.py", cwd="/home/user/app").stdout, end="")

    try:
        box.commands.run("echo oops >&2; exit 4")
    except CommandExitException as e:
        print("exit code:", e.exit_code, e.stderr.strip())

    # In the background: found again by its process id, with all of its output.
    started = box.commands.run("for i in 1 2 3; do echo tick $i; sleep 0.2; done", background=True)
    print(", ".join(box.commands.connect(started.pid).wait().stdout.split("\n")[:3]))
print("running:", box.is_running())
