#!/usr/bin/env bash
# Runs inside the machine of test/systemd.sh: installs the package, uses the service, restarts it under
# a running sandbox, and removes the package.
set -euo pipefail
export HOME=/root
ip link set lo up 2>/dev/null || busybox ip link set lo up 2>/dev/null || true
fail() {
	echo "FAILED: $*"
	journalctl -u casemate --no-pager | tail -n 30
	exit 1
}
wait_until() { # WHAT COMMAND…
	local what=$1 i
	shift
	for ((i = 0; i < 240; i++)); do
		"$@" >/dev/null 2>&1 && return
		sleep 0.5
	done
	fail "$what"
}
mainpid() { systemctl show --property MainPID --value casemate; }

echo "=== install"
dpkg -i /opt/casemate.deb >/dev/null
casemate version | head -n 1
systemd-analyze verify casemate.service
systemctl is-enabled casemate 2>/dev/null && fail "installing must not enable the service"

echo "=== start"
systemctl enable --now --quiet casemate
wait_until "the service does not answer" casemate ls
casemate doctor
# On a busy machine the first one, emulated, takes longer than a create may.
wait_until "no sandbox starts" casemate run --disk 100m -- true
wait_until "no sandbox is created" casemate create --name kept --disk 100m
casemate exec kept -- sh -c 'echo "inside: $(id -un), $(nproc) CPU"'
casemate exec --detach kept -- sh -c 'i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.2; done'
wait_until "the counter does not count" casemate exec kept -- test -s /tmp/count

echo "=== restart: sandboxes go on"
before=$(casemate exec kept -- cat /tmp/count)
systemctl restart casemate
wait_until "the service does not come back" casemate ls
after() { [[ $(casemate exec kept -- cat /tmp/count) -gt $before ]]; }
wait_until "the counter did not go on over the restart" after

echo "=== kill -9: systemd starts it again"
pid=$(mainpid)
kill -9 "$pid"
again() { [[ $(mainpid) != 0 && $(mainpid) != "$pid" ]] && casemate ls; }
wait_until "the service was not started again" again
casemate exec kept -- true || fail "the sandbox is lost after kill -9"
[[ $(casemate run --disk 100m -- sh -c 'echo $((6*7))') == 42 ]] || fail "run"

echo "=== remove, which ends the sandbox, too"
dpkg -r casemate >/dev/null
[[ $(mainpid) == 0 ]] || fail "the service still runs after the package is gone"
! pgrep -f casemate-guest >/dev/null 2>&1 || fail "a guest is left"
[[ -z $(losetup -a) ]] || echo "note: $(losetup -a)"
echo "all held"
