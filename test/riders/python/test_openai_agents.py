"""The E2B client of OpenAI's Agents SDK: its session, and an agent whose model is a script."""

import asyncio
import io
import json
from pathlib import Path

from agents import ItemHelpers, Model, ModelResponse, RunConfig, Runner, Usage
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from agents.run_config import SandboxRunConfig
from agents.sandbox import Manifest, SandboxAgent
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

OPTIONS = E2BSandboxClientOptions(sandbox_type="e2b", timeout=600, envs={"GREETING": "hello"})
# A root below the user's home: at the default, /workspace, only a template with sudo may make one.
MANIFEST = Manifest(root="/home/user/workspace")


def test_session() -> None:
    async def task() -> None:
        client = E2BSandboxClient()
        session = await client.create(manifest=MANIFEST, options=OPTIONS)
        await session.start()
        result = await session.exec("echo \"$GREETING\"; pwd; echo oops >&2; exit 6")
        assert result.stdout == b"hello\n/home/user/workspace\n", result
        assert result.stderr == b"oops\n" and result.exit_code == 6

        await session.mkdir(Path("notes"), parents=True)
        await session.write(Path("notes/a.bin"), io.BytesIO(bytes(range(256))))
        assert (await session.read(Path("notes/a.bin"))).read() == bytes(range(256))
        assert [Path(e.path).name for e in await session.ls(Path("notes"))] == ["a.bin"]

        assert session.supports_pty()
        started = await session.pty_exec_start("read -r line; echo \"got $line\"", tty=True, yield_time_s=0.5)
        assert started.process_id is not None, started
        typed = await session.pty_write_stdin(session_id=started.process_id, chars="typed\n", yield_time_s=5)
        assert b"got typed" in typed.output, typed

        archive = await session.persist_workspace()
        await session.exec("rm -rf notes")
        await session.hydrate_workspace(archive)
        assert (await session.exec("wc -c < notes/a.bin")).stdout.strip() == b"256"

        again = await client.resume(client.deserialize_session_state(client.serialize_session_state(session.state)))
        assert await again.running()
        assert (await again.exec("wc -c < notes/a.bin")).stdout.strip() == b"256"
        await session.aclose()
        assert not await session.running()

    asyncio.run(task())


def test_snapshot() -> None:
    async def task() -> None:
        options = OPTIONS.model_copy(update={"workspace_persistence": "snapshot"})
        session = await E2BSandboxClient().create(manifest=MANIFEST, options=options)
        await session.start()
        await session.write(Path("kept.txt"), io.BytesIO(b"kept"))
        snapshot = await session.persist_workspace()
        await session.exec("rm kept.txt")
        await session.hydrate_workspace(snapshot)  # moves to a sandbox made from the snapshot
        assert (await session.read(Path("kept.txt"))).read() == b"kept"
        await session.aclose()

    asyncio.run(task())


class Script(Model):
    """A model that calls the shell tool once, and then repeats what it printed."""

    async def get_response(self, system_instructions, input, model_settings, tools, *args, **kwargs):
        outputs = [i["output"] for i in input if isinstance(i, dict) and i.get("type") == "function_call_output"]
        if not outputs:
            shell = next(t for t in tools if "command" in t.name or "shell" in t.name)
            item = ResponseFunctionToolCall(
                type="function_call", call_id="call_1", name=shell.name, arguments=json.dumps({"cmd": "echo $((6*7)) | tee answer.txt"})
            )
        else:
            text = ResponseOutputText(type="output_text", text=str(outputs[-1]), annotations=[])
            item = ResponseOutputMessage(id="msg_1", type="message", role="assistant", status="completed", content=[text])
        return ModelResponse(output=[item], usage=Usage(), response_id=None)

    async def stream_response(self, *args, **kwargs):
        raise NotImplementedError
        yield  # makes this a generator, as the base class asks


def test_agent() -> None:
    agent = SandboxAgent(name="worker", model=Script(), default_manifest=MANIFEST)
    config = RunConfig(sandbox=SandboxRunConfig(client=E2BSandboxClient(), options=OPTIONS), tracing_disabled=True)
    result = asyncio.run(Runner.run(agent, "what is six times seven?", run_config=config))
    assert "42" in result.final_output, ItemHelpers.text_message_outputs(result.new_items)
