#!/usr/bin/env bash
# Measures what E2B's SDK (npm, newest) gets from a server of its own, beside bubblewrap: test/e2b/speed.sh
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=../clients.sh
. ../clients.sh
install_npm .cache/js-2.51 js/2.51
start_server
SERVER_PID=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["pid"])' "$work/run/server.json")
export SERVER_PID
uptime
E2B_MODULE=$PWD/.cache/js-2.51/node_modules/e2b/dist/index.mjs node js/speed.mjs
