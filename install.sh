#!/usr/bin/env bash
# Installs Casemate.
#
#   ./install.sh                    from the tarball that this script lies in, or else builds (needs Go)
#   ./install.sh casemate-….tar.gz  from a tarball, checked against SHA256SUMS where that lies beside it
#
#   --prefix DIR   where to (default /usr/local)
#   --start        start the service too, where systemd runs
set -euo pipefail

prefix=/usr/local start= tarball=
while (($#)); do
	case $1 in
	--prefix) prefix=${2:?--prefix takes a directory}; shift 2 ;;
	--start) start=1; shift ;;
	-h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
	-*) echo "install: unknown option $1" >&2; exit 2 ;;
	*) tarball=$1; shift ;;
	esac
done
[[ $prefix == /* ]] || prefix=$PWD/$prefix # it stands in the unit
here=$(cd "$(dirname "$0")" && pwd)

if [[ -n $tarball ]]; then
	sums=$(dirname "$tarball")/SHA256SUMS
	if [[ -e $sums ]]; then
		(cd "$(dirname "$tarball")" && grep -F " $(basename "$tarball")" SHA256SUMS | sha256sum --check --quiet --strict -) ||
			{ echo "install: $tarball does not match SHA256SUMS" >&2; exit 1; }
	else
		echo "install: no SHA256SUMS beside $tarball; it is not checked" >&2
	fi
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	tar -xzf "$tarball" -C "$work" --strip-components=1 --no-same-owner
	here=$work
fi

if [[ -x $here/casemate && -d $here/completions ]]; then
	# Before anything of an earlier version goes: a tarball for another machine would take its place.
	"$here/casemate" version >/dev/null ||
		{ echo "install: this casemate does not run here ($(uname -m)); take the tarball for this machine" >&2; exit 1; }
	"$here/deploy/install-files.sh" "$here/casemate" "" "$prefix" "$here/completions"
else
	PATH=$PATH:/usr/local/go/bin
	command -v go >/dev/null || { echo "install: no tarball given and no Go here to build with" >&2; exit 1; }
	"$here/deploy/setup.sh"
	command -v make >/dev/null || { echo "install: make is missing; sudo apt-get install make" >&2; exit 1; }
	make -C "$here" build >&2
	"$here/deploy/install-files.sh" "$here/bin/casemate" "" "$prefix"
fi

echo "installed $("$prefix/bin/casemate" version | head -n 1) in $prefix/bin"
if [[ -d /run/systemd/system ]]; then
	systemctl daemon-reload
	if [[ -n $start ]]; then
		systemctl enable --now casemate.service
	else
		echo "start it with: systemctl enable --now casemate"
	fi
else
	echo "start it with: casemate up"
fi
