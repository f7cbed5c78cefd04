"""LangChain's deepagents with a sandbox as its backend. The model is a script: put yours in its place."""

import e2b
from deepagents import create_deep_agent
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, ToolMessage
from langchain_e2b import E2BSandbox


class Script(GenericFakeChatModel):
    """A model that has its lines learnt, whatever tools it is given."""

    def bind_tools(self, tools, **kwargs):
        return self


def call(name: str, **args) -> AIMessage:
    return AIMessage(content="", tool_calls=[{"name": name, "args": args, "id": name}])


PROGRAM = "import sys\nprint(sum(int(line) for line in sys.stdin))\n"

model = Script(
    messages=iter(
        [
            call("write_file", file_path="/home/user/total.py", content=PROGRAM),
            call("execute", command="seq 1 100 | python3 /home/user/total.py"),
            AIMessage(content="The numbers from 1 to 100 add up to 5050."),
        ]
    )
)

with e2b.Sandbox.create(timeout=600) as box:
    agent = create_deep_agent(model=model, backend=E2BSandbox(sandbox=box))
    result = agent.invoke({"messages": [("user", "write a program that adds up lines, and try it")]})
    for message in result["messages"]:
        if isinstance(message, ToolMessage) and message.name == "execute":
            print("execute:", message.text.split("\n")[0])
    print("agent:", result["messages"][-1].text)
