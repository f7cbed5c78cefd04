#!/usr/bin/env bash
# Runs scenarios with E2B's own SDKs, unmodified, against a server of its own: test/e2b/run.sh [SUITE…]
# Suites: js-2.51, js-2.45, python. The SDKs are pinned, and installed into test/e2b/.cache.
set -euo pipefail
cd "$(dirname "$0")"
casemate=${CASEMATE:-$(cd ../.. && pwd)/bin/casemate}
suites=("${@:-}")
[[ -n ${suites[0]} ]] || suites=(js-2.51 js-2.45 python)

# install DIR FILE COMMAND…: runs the command in a fresh DIR unless it was run for this FILE before.
install() {
	local dir=$1 file=$2
	shift 2
	if ! cmp -s "$file" "$dir/.installed-for"; then
		rm -rf "$dir"
		mkdir -p "$dir"
		"$@"
		cp "$file" "$dir/.installed-for"
	fi
}
npm_ci() {
	cp "js/$1/package.json" "js/$1/package-lock.json" ".cache/js-$1/"
	npm ci --prefix ".cache/js-$1" --ignore-scripts --no-audit --no-fund --loglevel=error
}
pip_install() {
	python3 -m venv .cache/python
	.cache/python/bin/pip install --quiet --disable-pip-version-check -r python/requirements.txt
}
mkdir -p .cache
for s in "${suites[@]}"; do
	case $s in
	js-*) install ".cache/$s" "js/${s#js-}/package-lock.json" npm_ci "${s#js-}" ;;
	python) install .cache/python python/requirements.txt pip_install ;;
	*)
		echo "no suite $s: use js-2.51, js-2.45 or python" >&2
		exit 2
		;;
	esac
done

work=$(mktemp -d /tmp/casemate-e2b.XXXXXX)
cleanup() {
	"$casemate" down --run-dir "$work/run" --sandboxes >/dev/null 2>&1 || true
	rm -rf "$work"
}
trap cleanup EXIT
"$casemate" up --data-dir "$work/data" --run-dir "$work/run" --keys-dir "$work/keys" --listen 127.0.0.1:0 \
	--store-size 2g >/dev/null
url=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["urls"][0])' "$work/run/server.json")
E2B_API_KEY=$(CASEMATE_URL=unix://$work/run/casemate.sock "$casemate" keys create --e2b sdk 2>/dev/null | tail -n 1)
"$casemate" --url "unix://$work/run/casemate.sock" ca >"$work/ca.pem" 2>/dev/null
cat /etc/ssl/certs/ca-certificates.crt "$work/ca.pem" >"$work/bundle.pem"
export E2B_API_KEY E2B_API_URL=$url E2B_SANDBOX_URL=$url
export NODE_EXTRA_CA_CERTS=$work/ca.pem SSL_CERT_FILE=$work/bundle.pem

failed=0
for s in "${suites[@]}"; do
	echo "== $s"
	case $s in
	js-*) E2B_MODULE=$PWD/.cache/$s/node_modules/e2b/dist/index.mjs node --require ./js/local-names.cjs --test js/*.test.mjs || failed=1 ;;
	python) .cache/python/bin/python -m unittest discover -s python -p '*_test.py' || failed=1 ;;
	esac
done
exit $failed
