#!/usr/bin/env bash
# gotest.sh "PACKAGE…" FLAG…: go test with these flags, in which up to three tests that fail are run once more,
# each alone and after the rest. Whatever failed is shown whole, and named at the end (test/reruns). RERUNS=0 runs
# nothing twice: so does the nightly, in which an unsteady test fails.
set -uo pipefail
cd "$(dirname "$0")/.."

packages=$1
shift
if [ "${RERUNS:-1}" = 0 ]; then
	# shellcheck disable=SC2086 # a list
	exec go test "$@" $packages
fi
events=$(mktemp /tmp/casemate-events.XXXXXX)
trap 'rm -f "$events"' EXIT
bin/tools/gotestsum --format standard-quiet --hide-summary skipped --no-color --jsonfile "$events" \
	--rerun-fails=1 --rerun-fails-max-failures=3 --rerun-fails-run-root-test --rerun-fails-abort-on-data-race \
	--packages "$packages" -- "$@"
code=$?
CGO_ENABLED=0 go run ./test/reruns "$events" || code=1
exit "$code"
