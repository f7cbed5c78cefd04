"""The official Python client of the Model Context Protocol, over both transports."""

import asyncio
import json
import os
import time
import urllib.request
from contextlib import asynccontextmanager

import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

URL, KEY = os.environ["CASEMATE_URL"], os.environ["CASEMATE_API_KEY"]
AUTH = {"Authorization": f"Bearer {KEY}"}


@asynccontextmanager
async def over_stdio():
    env = {"PATH": os.environ["PATH"], "CASEMATE_URL": URL, "CASEMATE_API_KEY": KEY}
    async with Client(StdioServerParameters(command="casemate", args=["mcp"], env=env)) as client:
        yield client


@asynccontextmanager
async def over_http():
    async with httpx2.AsyncClient(headers=AUTH, timeout=60) as http:
        async with Client(streamable_http_client(URL + "/mcp", http_client=http)) as client:
            yield client


def sandboxes() -> list:
    request = urllib.request.Request(URL + "/v1/sandboxes", headers=AUTH)
    return json.load(urllib.request.urlopen(request)).get("sandboxes", [])


def text(result) -> str:
    return "".join(c.text for c in result.content if c.type == "text")


@pytest.mark.parametrize("connect", [over_stdio, over_http])
async def test_tools(connect) -> None:
    async with connect() as client:
        tools = {t.name: t for t in (await client.list_tools()).tools}
        assert tools["run_command"].annotations.destructive_hint and tools["list_files"].annotations.read_only_hint

        ran = await client.call_tool("run_command", {"command": "echo out; echo err >&2; exit 3"})
        assert not ran.is_error and ran.structured_content["output"] == "out\nerr\n" and ran.structured_content["exit_code"] == 3
        assert "exit code 3" in text(ran)

        await client.call_tool("write_file", {"path": "a/b.txt", "text": "grüße\n"})
        assert text(await client.call_tool("read_file", {"path": "a/b.txt"})) == "grüße\n"
        code = await client.call_tool("run_code", {"code": "6*7"})
        assert code.structured_content["values"][0]["data"]["text/plain"] == "42"

        heard = []

        async def progress(done, total, message) -> None:
            heard.append(message)

        await client.call_tool("run_command", {"command": "for i in 1 2 3; do echo step $i; sleep 0.8; done"}, progress_callback=progress)
        assert any(m.startswith("step") for m in heard), heard

        with pytest.raises(Exception, match="(?i)time"):
            await client.call_tool("run_command", {"command": "sleep 600", "timeout_seconds": 900}, read_timeout_seconds=1)
        left = await until(client, "pgrep -x sleep | wc -l", "0\n")
        assert left == "0\n", "what the client gave up still runs"

        refused = await client.call_tool("read_file", {"path": "nothing"})
        assert refused.is_error and "not_found" in text(refused) and "What to do" in text(refused)
        assert len(sandboxes()) == 1
    deadline = time.monotonic() + 120
    while sandboxes():
        assert time.monotonic() < deadline, "the session's sandbox is left"
        await asyncio.sleep(0.05)


async def until(client, command: str, want: str) -> str:
    deadline = time.monotonic() + 120
    while True:
        got = (await client.call_tool("run_command", {"command": command})).structured_content["output"]
        if got == want or time.monotonic() > deadline:
            return got
        await asyncio.sleep(0.05)
