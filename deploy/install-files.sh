#!/usr/bin/env bash
# Puts the program and what goes with it in place.
#
#   deploy/install-files.sh PROGRAM DESTDIR PREFIX [COMPLETIONS]
#
# COMPLETIONS is a folder with casemate.bash, casemate.zsh and casemate.fish; without it the program
# writes them itself.
set -euo pipefail

program=$1 dest=$2 prefix=$3 completions=${4:-}
here=$(cd "$(dirname "$0")" && pwd)

if [[ -z $completions ]]; then
	completions=$(mktemp -d)
	trap 'rm -rf "$completions"' EXIT
	for shell in bash zsh fish; do
		"$program" completion "$shell" >"$completions/casemate.$shell"
	done
fi
share=$dest$prefix/share
install -D -m 0755 "$program" "$dest$prefix/bin/casemate"
install -D -m 0644 "$completions/casemate.bash" "$share/bash-completion/completions/casemate"
install -D -m 0644 "$completions/casemate.zsh" "$share/zsh/vendor-completions/_casemate"
install -D -m 0644 "$completions/casemate.fish" "$share/fish/vendor_completions.d/casemate.fish"

# systemd looks for units of hand-made installs below /etc, of packages below /usr/lib.
units=$dest/etc/systemd/system
[[ $prefix == /usr ]] && units=$dest/usr/lib/systemd/system
if [[ -n $dest || -d /run/systemd/system ]]; then
	install -d "$units"
	sed "s|/usr/bin/casemate|$prefix/bin/casemate|" "$here/casemate.service" >"$units/casemate.service"
	chmod 0644 "$units/casemate.service"
fi
