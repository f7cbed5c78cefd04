"""Reads what the passes of suites.sh reported: failed-files REPORT, or score DIRECTORY SUITE…"""

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

# It compares classes of two copies of the SDK, where that of the registry stands in for the source.
NOT_COUNTED = {"sandbox/fork.test.ts > fork with count lower than 1 fails"}


def js(report):
    """The outcomes of a report of vitest, by file and name; tests that share a name are counted one by one."""
    out, seen = {}, Counter()
    for f in json.loads(Path(report).read_text())["testResults"]:
        name = f["name"].split("/tests/", 1)[1]
        for a in f["assertionResults"]:
            key = f"{name} > {a['fullName']}"
            if key in NOT_COUNTED:
                continue
            seen[key] += 1
            out[f"{key} #{seen[key]}"] = a["status"]
        if f["status"] == "failed" and not f["assertionResults"]:
            out[f"{name} > (the file)"] = "failed"
    return out


def python(report):
    """The outcomes of a report of pytest."""
    out = {}
    for c in ET.parse(report).iter("testcase"):
        bad = c.find("failure") is not None or c.find("error") is not None
        skipped = c.find("skipped") is not None
        out[f"{c.get('classname')}::{c.get('name')}"] = "failed" if bad else "skipped" if skipped else "passed"
    return out


def score(directory, suites):
    failed = 0
    for suite in suites:
        read, pattern = {"js": (js, "js-*.json"), "python": (python, "py-*.xml")}[suite]
        passes = [read(p) for p in sorted(Path(directory).glob(pattern))]
        counted = {k: s for k, s in passes[0].items() if s in ("passed", "failed")}
        held = Counter()
        left = []
        for k, s in sorted(counted.items()):
            n = next((i for i, p in enumerate(passes, 1) if p.get(k) == "passed"), 0)
            held[n] += 1
            if not n:
                left.append(k)
        print(f"{suite}: {len(counted) - len(left)} of {len(counted)} pass: {held[1]} against the server,",
              f"{held[2]} only without a server's URL, {held[3]} only with stand-ins for the internet")
        for k in left:
            print("  fails:", k)
        failed += len(left)
    return failed > 0


if sys.argv[1] == "failed-files":
    print("\n".join(sorted({"tests/" + k.split(" > ")[0] for k, s in js(sys.argv[2]).items() if s == "failed"})))
else:
    sys.exit(score(sys.argv[2], sys.argv[3:]))
