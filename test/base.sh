#!/usr/bin/env bash
# Builds templates base and code-interpreter from scratch on a server of its own, and uses them: sudo, apt,
# python, git; section F of the battery in profile standard; IPython, matplotlib, Node.js.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d /tmp/casemate-base.XXXXXX)
export CASEMATE_URL=unix://$work/run/casemate.sock
cleanup() {
	bin/casemate down --run-dir "$work/run" --sandboxes >/dev/null 2>&1 || true
	rm -rf "$work"
}
trap cleanup EXIT

bin/casemate up --data-dir "$work/data" --run-dir "$work/run" --keys-dir "$work/keys" --listen 127.0.0.1:0
bin/casemate template build base
bin/casemate template list
check() { # EXPECTED COMMAND…
	local want=$1 got
	shift
	got=$(bin/casemate run --template base --profile standard -- "$@")
	[[ $got == "$want" ]] || { echo "base: '$*' gave '$got', not '$want'" >&2; exit 1; }
}
check user whoami
check root sudo whoami
check 42 python3 -c 'print(6*7)'
check ok sh -c 'git --version >/dev/null && curl --version >/dev/null && echo ok'
check /home/user bash -l -c pwd
bin/casemate selftest --only F --profile standard
bin/casemate template build code-interpreter
check() { # EXPECTED COMMAND…
	local want=$1 got
	shift
	got=$(bin/casemate run --template code-interpreter -- "$@")
	[[ $got == "$want" ]] || { echo "code-interpreter: '$*' gave '$got', not '$want'" >&2; exit 1; }
}
check 6 python3 -c 'import IPython, numpy, pandas, matplotlib.pyplot; print(numpy.arange(4).sum())'
check 42 node -p '6*7'
check function node -p 'typeof require("module").stripTypeScriptTypes'
check ok sh -c 'npm --version >/dev/null && echo ok'
check '' sh -c 'find / -xdev -uid 1878982656 -o -path /tmp/casemate-build'
check '' sh -c 'ls /home/user'
echo "base, code-interpreter: ok"
