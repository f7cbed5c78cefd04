"""What E2B's SDK for Python says of networks and secrets, against a server in a fake internet; see network.mjs."""

import os

from e2b import CommandExitException, Sandbox, Secret

site, other, value = os.environ["SITE"], os.environ["OTHER"], os.environ["VALUE"]


def get(box, url):
    return box.commands.run(f"curl -sSf -m 30 '{url}'").stdout


def refused(box, url):
    try:
        get(box, url)
    except CommandExitException as e:
        assert e.exit_code != 28, "a refusal does not wait for a time limit"
    else:
        raise AssertionError(f"{url} was reached")


Secret.create("py-key", value, metadata={"team": "a"})
assert Secret.get_info("py-key").metadata == {"team": "a"}
rules = {site: [{"transform": {"headers": {"Authorization": "Bearer " + Secret.fill("py-key")}}}]}
with Sandbox.create("base", timeout=600, network={"allow_out": [site], "deny_out": ["0.0.0.0/0"], "rules": rules}) as box:
    assert "you sent" in get(box, f"https://{site}/py-first")
    assert value not in get(box, f"https://{site}/py-echo")
    refused(box, f"https://{other}/py-refused")
    print("headers")
    box.update_network({"allow_out": [other], "deny_out": ["0.0.0.0/0"]})
    get(box, f"https://{other}/py-updated")
    refused(box, f"https://{site}/py-refused")
    print("updated")
assert Secret.destroy("py-key") and not Secret.destroy("py-key")
with Sandbox.create("base", timeout=600, allow_internet_access=False) as box:
    refused(box, f"https://{site}/py-refused")
print("access")
