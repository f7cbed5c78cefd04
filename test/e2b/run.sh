#!/usr/bin/env bash
# Runs scenarios with E2B's own SDKs, unmodified, against servers of its own: test/e2b/run.sh [SUITE…]
# Suites: js-2.51, js-2.45, python, interpreter-js, interpreter-python, and gvisor: those of pauses, forks and snapshots, on a
# server whose sandboxes run on gVisor. The SDKs are pinned, and installed into test/e2b/.cache.
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=../clients.sh
. ../clients.sh
suites=("${@:-}")
[[ -n ${suites[0]} ]] || suites=(js-2.51 js-2.45 python interpreter-js interpreter-python gvisor)

use_node .cache/node
for s in "${suites[@]}"; do
	case $s in
	js-*) install_npm ".cache/$s" "js/${s#js-}" ;;
	gvisor) install_npm .cache/js-2.51 js/2.51 ;;
	python) install_pip .cache/python python/requirements.txt ;;
	interpreter-js) install_npm .cache/interpreter-js interpreter ;;
	interpreter-python) install_pip .cache/interpreter-python interpreter/requirements.txt ;;
	*)
		echo "no suite $s: use js-2.51, js-2.45, python, interpreter-js, interpreter-python or gvisor" >&2
		exit 2
		;;
	esac
done

# serve_for SUITE: has a server that a suite is for, which ends the one before if that is for others.
serving=
serve_for() {
	local isolation=namespace
	[[ $1 != gvisor ]] || isolation=gvisor
	[[ $serving != "$isolation" ]] || return 0
	[[ -z $serving ]] || stop_server
	start_server --isolation "$isolation"
	serving=$isolation
}

failed=0
for s in "${suites[@]}"; do
	serve_for "$s"
	echo "== $s"
	case $s in
	js-*) E2B_MODULE=$PWD/.cache/$s/node_modules/e2b/dist/index.mjs node --require ./js/local-names.cjs --test --test-concurrency=1 js/*.test.mjs || failed=1 ;;
	gvisor) E2B_MODULE=$PWD/.cache/js-2.51/node_modules/e2b/dist/index.mjs node --test --test-concurrency=1 gvisor/*.test.mjs js/state.test.mjs || failed=1 ;;
	interpreter-js) E2B_MODULE=$PWD/.cache/$s/node_modules/@e2b/code-interpreter/dist/index.mjs node --test interpreter/*.test.mjs || failed=1 ;;
	interpreter-python) .cache/$s/bin/python -m unittest discover -s interpreter -p '*_test.py' || failed=1 ;;
	python) .cache/python/bin/python -m unittest discover -s python -p '*_test.py' || failed=1 ;;
	esac
done
exit $failed
