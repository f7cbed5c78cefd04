#!/usr/bin/env bash
# Installs the Debian packages that Casemate needs, and only those that are missing.
#
#   deploy/setup.sh           what a server uses
#   deploy/setup.sh --tests   also what tests and benchmarks use
set -euo pipefail

# program:package pairs; a package counts as there when its program is.
need=(mkfs.btrfs:btrfs-progs mount:mount python3:python3)
if [[ "${1:-}" == --tests ]]; then
	need+=(make:make git:git curl:curl gcc:gcc bwrap:bubblewrap runc:runc debootstrap:debootstrap pgrep:procps node:nodejs npm:npm)
fi

missing=()
for pair in "${need[@]}"; do
	# A shim in /usr/local is not what a sandbox sees: look where Debian installs.
	PATH=/usr/sbin:/usr/bin:/sbin:/bin command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
# The race detector and the measuring programs in C need the C library's headers too.
if [[ "${1:-}" == --tests && ! -e /usr/include/stdio.h ]]; then
	missing+=(libc6-dev)
fi
# A Python environment of the tests' own.
if [[ "${1:-}" == --tests ]] && ! /usr/bin/python3 -c 'import ensurepip' 2>/dev/null; then
	missing+=(python3-venv)
fi
((${#missing[@]})) || exit 0

if [[ $EUID -ne 0 ]]; then
	echo "setup: missing ${missing[*]}; run as root, or: sudo apt-get install ${missing[*]}" >&2
	exit 1
fi
if ! command -v apt-get >/dev/null; then
	echo "setup: no apt-get here; install what provides: ${missing[*]}" >&2
	exit 1
fi
echo "installing ${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
	tail -n 20 "$log" >&2
	exit 1
fi
