#!/usr/bin/env bash
# Runs "casemate bench" with a server of its own: test/bench.sh [FLAGS OF BENCH]
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d /tmp/casemate-bench.XXXXXX)
export CASEMATE_URL=unix://$work/run/casemate.sock
cleanup() {
	bin/casemate down --run-dir "$work/run" --sandboxes >/dev/null 2>&1 || true
	rm -rf "$work"
}
trap cleanup EXIT
bin/casemate up --data-dir "$work/data" --run-dir "$work/run" --keys-dir "$work/keys" --listen none >/dev/null
bin/casemate bench "$@"
