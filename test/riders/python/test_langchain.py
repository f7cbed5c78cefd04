"""LangChain's E2B backend for deepagents: LangChain's standard suite for sandboxes, and an agent."""

from collections.abc import Iterator

import e2b
import pytest
from deepagents import create_deep_agent
from deepagents.backends.protocol import SandboxBackendProtocol
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_e2b import E2BSandbox
from langchain_tests.integration_tests import SandboxIntegrationTests

# The suite calls `python`; of the templates that stand in for `base`, `host` has the machine's programs
# only, of which Debian names it python3.
NAME_PYTHON = """command -v python || {
    mkdir -p ~/bin && ln -s "$(command -v python3)" ~/bin/python && echo 'PATH=~/bin:$PATH' > ~/.bash_profile
}"""


@pytest.fixture(scope="module")
def box() -> Iterator[e2b.Sandbox]:
    with e2b.Sandbox.create(timeout=600) as box:
        box.commands.run(NAME_PYTHON)
        yield box


class TestStandard(SandboxIntegrationTests):
    @pytest.fixture(scope="class")
    def sandbox(self, box: e2b.Sandbox) -> SandboxBackendProtocol:
        return E2BSandbox(sandbox=box)


class Script(GenericFakeChatModel):
    """A model that says what it is told to, whatever tools it is given."""

    def bind_tools(self, tools, **kwargs):
        return self


def call(name: str, **args) -> AIMessage:
    return AIMessage(content="", tool_calls=[{"name": name, "args": args, "id": f"call_{name}"}])


def test_deep_agent(box: e2b.Sandbox) -> None:
    """An agent writes a program, runs it, and reads what came of it."""
    model = Script(
        messages=iter(
            [
                call("write_file", file_path="/home/user/primes.py", content="print([n for n in range(2, 20) if all(n % d for d in range(2, n))])\n"),
                call("execute", command="python3 /home/user/primes.py > /home/user/primes.txt; echo done"),
                call("read_file", file_path="/home/user/primes.txt"),
                AIMessage(content="finished"),
            ]
        )
    )
    agent = create_deep_agent(model=model, backend=E2BSandbox(sandbox=box))
    result = agent.invoke({"messages": [("user", "list the primes below 20")]})
    results = [m.text for m in result["messages"] if isinstance(m, ToolMessage)]
    assert len(results) == 3
    assert "done" in results[1]
    assert "[2, 3, 5, 7, 11, 13, 17, 19]" in results[2]
    assert result["messages"][-1].text == "finished"
