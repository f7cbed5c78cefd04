#!/usr/bin/env bash
# Runs E2B's own suites, unmodified, against a server of its own: test/e2b/suites.sh CHECKOUT [js|python]
# CHECKOUT is one of github.com/e2b-dev/E2B (the scores in docs/e2b.md are of b802997). Needs root, npm and PyPI, and a
# base that is built, which the first run does. Each suite is run in three passes, and a test holds if it passes in one:
#   1. against the server, on the machine's own network;
#   2. what failed, with no server's URL set: many tests answer their own requests, and assume that;
#   3. what still failed, in a network namespace where stand-ins answer for the internet (test/e2b/internet).
# What failed in all of them is printed, and makes the exit code 1. With ISOLATION=gvisor the server's sandboxes have that one.
set -euo pipefail
cd "$(dirname "$0")"
here=$PWD
# shellcheck source=../clients.sh
. ../clients.sh
checkout=$(realpath "$1")/packages
only=${2:-}
cache=$here/.cache/suites
isolation=${ISOLATION:-namespace}
out=$cache/$isolation # what the passes report
mkdir -p "$out"
use_node "$here/.cache/node"

install_js() {
	rm -rf "$cache/js/src" "$cache/js/tests" "$cache/js/away"
	cp -r "$checkout/js-sdk/src" "$checkout/js-sdk/tests" "$checkout/js-sdk/tsconfig.json" "$cache/js/"
	cp suites/vitest.mts suites/package.json "$cache/js/"
	(cd "$cache/js" && npm install --ignore-scripts --no-audit --no-fund --loglevel=error)
}

install_python() {
	rm -rf "$cache/tests"
	cp -r "$checkout/python-sdk/tests" "$cache/tests"
	cp suites/pytest.ini suites/local_names.py "$cache/tests/"
	[[ -x $cache/py/bin/pytest ]] || pip_install "$cache/py" suites/requirements.txt
}

# prepared: a data directory with template base, which is built once.
prepared() {
	[[ ! -d $cache/data ]] || return 0
	start_server --image-alias ubuntu:22.04=base
	"$casemate" --url "unix://$work/run/casemate.sock" template build base
	"$casemate" down --run-dir "$work/run" --sandboxes
	mkdir -p "$cache/data/rootfs"
	cp -a "$work/data/rootfs/templates" "$cache/data/rootfs/"
	rm -rf "$work"
}

# serve_base [FLAG…]: start_server with base in it.
serve_base() {
	casemate=${CASEMATE:-$(git rev-parse --show-toplevel)/bin/casemate}
	work=$(mktemp -d /tmp/casemate-suites.XXXXXX)
	trap stop_server EXIT
	mkdir -p "$work/data/rootfs"
	cp -a "$cache/data/rootfs/templates" "$work/data/rootfs/"
	"$casemate" up --data-dir "$work/data" --run-dir "$work/run" --keys-dir "$work/keys" --store-size 4g \
		--image-alias ubuntu:22.04=base --isolation "$isolation" "$@" >/dev/null
	url=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["urls"][0])' "$work/run/server.json")
	key=$("$casemate" --url "unix://$work/run/casemate.sock" keys create --e2b suites 2>/dev/null | tail -n 1)
	"$casemate" --url "unix://$work/run/casemate.sock" ca >"$work/ca.pem" 2>/dev/null
	cat /etc/ssl/certs/ca-certificates.crt "$work/ca.pem" >"$work/bundle.pem"
	export E2B_API_URL=$url E2B_SANDBOX_URL=$url E2B_API_KEY=$key NODE_EXTRA_CA_CERTS=$work/ca.pem SSL_CERT_FILE=$work/bundle.pem
}

# What talks to a server: of JavaScript's the files in js-files.txt, of Python's these. What replaces functions of the SDK
# that its newest version calls otherwise is left out.
python_tests=(
	sync/api_sync sync/sandbox_sync sync/template_sync async/api_async async/sandbox_async async/template_async
	--deselect sync/template_sync/test_stacktrace.py --deselect async/template_async/test_stacktrace.py
	--deselect sync/sandbox_sync/test_connect.py::test_connect_normalizes_unset_tokens
	--deselect async/sandbox_async/test_connect.py::test_connect_normalizes_unset_tokens
)

no_url() { env -u E2B_API_URL -u E2B_SANDBOX_URL E2B_API_KEY=e2b_0000000000000000000000000000000000000000 "$@"; }

js() { # REPORT [FILE…]
	local report=$1
	shift
	(cd "$cache/js" && NODE_OPTIONS="--require $here/js/local-names.cjs" npx vitest run --config vitest.mts --no-file-parallelism \
		--reporter=json --outputFile="$report" "$@") >"$report.log" 2>&1 || true
}

python() { # REPORT ARG…
	local report=$1
	shift
	(cd "$cache/tests" && "$cache/py/bin/python" -m pytest -p local_names -q -n 2 --timeout 180 --junitxml "$report" "$@") >"$report.log" 2>&1 || true
}

passes() { # SUITE: the first two
	case $1 in
	js)
		mapfile -t files <suites/js-files.txt
		js "$out/js-1.json" "${files[@]}"
		mapfile -t files < <(python3 suites/score.py failed-files "$out/js-1.json")
		# Without undici the SDK takes the global fetch, in whose place msw answers for the tests that want that.
		mkdir -p "$cache/js/away"
		mv "$cache"/js/node_modules/undici* "$cache/js/away/"
		[[ ${#files[@]} -eq 0 ]] || no_url bash -c "$(declare -f js); cache=$cache here=$here; js \"\$@\"" - "$out/js-2.json" "${files[@]}"
		mv "$cache"/js/away/undici* "$cache/js/node_modules/"
		;;
	python)
		python "$out/py-1.xml" "${python_tests[@]}"
		no_url bash -c "$(declare -f python); cache=$cache; python \"\$@\"" - "$out/py-2.xml" --last-failed --last-failed-no-failures none "${python_tests[@]}"
		;;
	esac
}

# in_internet runs in the namespace, with FAKE_RESOLVER: a server to which stand-ins lead, and the third pass.
in_internet() { # CA-FILE SUITE…
	local ca=$1
	shift
	serve_base --listen 127.0.0.1:443 --domain boxes.test --dns "$FAKE_RESOLVER" # for its authority
	cp "$work/ca.pem" "$work/own.pem"
	"$casemate" down --run-dir "$work/run" --sandboxes >/dev/null
	# The stand-ins' authority is one that the internet would have: sandboxes trust it, and so does the gateway.
	cat "$ca" >>"$(echo "$work"/data/rootfs/templates/base-*/root/etc/ssl/certs/ca-certificates.crt)"
	"$casemate" up --data-dir "$work/data" --run-dir "$work/run" --keys-dir "$work/keys" --listen 127.0.0.1:443 --domain boxes.test \
		--isolation "$isolation" --dns "$FAKE_RESOLVER" --extra-ca "$ca" --extra-ca "$work/own.pem" >/dev/null
	CASEMATE_URL=http://127.0.0.1:443 CASEMATE_API_KEY=$E2B_API_KEY "$casemate" template build -t httpbin --no-lock \
		--start 'python3 /srv/httpbin.py' --ready 'curl -sf http://127.0.0.1:8080/headers' suites/httpbin >"$cache/httpbin.log" 2>&1
	export SUITES_DOMAIN=.boxes.test
	for s in "$@"; do
		case $s in
		js) js "$out/js-3.json" tests/sandbox/network.test.ts tests/sandbox/internetAccess.test.ts ;;
		python) python "$out/py-3.xml" sync/sandbox_sync/test_network.py sync/sandbox_sync/test_internet_access.py async/sandbox_async/test_network.py async/sandbox_async/test_internet_access.py ;;
		esac
	done
	stop_server
	trap - EXIT
}

if [[ $only == --in-internet ]]; then
	shift 2
	in_internet "$@"
	exit
fi
suites=(js python)
[[ -z $only ]] || suites=("$only")
mkdir -p "$cache/js"
rm -f "$out"/*.json "$out"/*.xml
for s in "${suites[@]}"; do "install_$s"; done
prepared
serve_base --listen 127.0.0.1:0
for s in "${suites[@]}"; do passes "$s"; done
stop_server
trap - EXIT
CGO_ENABLED=0 go build -trimpath -o "$cache/internet" ./internet
unshare --net "$cache/internet" "$cache/internet-ca.pem" "$here/suites.sh" "$1" --in-internet "$cache/internet-ca.pem" "${suites[@]}"
python3 suites/score.py score "$out" "${suites[@]}"
