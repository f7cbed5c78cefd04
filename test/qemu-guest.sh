#!/usr/bin/env bash
# Runs inside the machine of test/qemu.sh: the tests of the kernel's topics, then the product itself.
set -euo pipefail
repo=$1 tests=$2 part=${3:-all}
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root REQUIRE=all
cd "$repo"

echo "Linux $(uname -r), control groups: $(cat /sys/fs/cgroup/cgroup.controllers)"
failed=()
for t in "$tests"/*.test; do
	[[ $part == all ]] || break
	package=$(<"${t%.test}.dir")
	echo "=== $package"
	# How much processor time a loop gets says nothing where the processor itself is emulated. Linux 6.1 has no scopes of
	# Landlock (6.12), and maps no ids of a tmpfs (6.3).
	(cd "$package" && "$t" -test.timeout 30m -test.skip '^(TestCPULimit|TestScope|TestIDMap)$') || failed+=("$package")
done

echo "=== the product"
casemate=$repo/bin/casemate
export CASEMATE_URL=unix:///run/cm/casemate.sock
# Not "up": the first start looks at every library of the machine, which takes minutes here.
"$casemate" serve --data-dir /tmp/data --run-dir /run/cm --keys-dir /tmp/keys --listen none --store-size 768m 2>/tmp/log &
for ((i = 0; i < 600; i++)); do
	[[ ! -e /run/cm/server.json ]] && kill -0 $! 2>/dev/null || break
	sleep 1
done
[[ -e /run/cm/server.json ]] || { cat /tmp/log; exit 1; }
"$casemate" doctor
# The first sandbox reads its programs from a disk of another machine, which on a busy one takes longer than a create may.
warm() {
	local i
	for ((i = 0; i < 10; i++)); do
		"$casemate" run --disk 100m "$@" -- true && break
	done
}
warm
finish() {
	"$casemate" down --run-dir /run/cm --sandboxes
	if ((${#failed[@]})); then
		printf 'failed: %s\n' "${failed[@]}"
		exit 1
	fi
	exit 0
}
check() { # EXIT-CODE FLAGS… -- COMMAND…
	local want=$1 got=0
	shift
	"$casemate" run --disk 100m "$@" || got=$?
	[[ $got == "$want" ]] || { echo "'$*' gave $got, not $want"; failed+=("$*"); }
}
if [[ $part == all ]]; then
	check 0 -- sh -c 'grep -q 0::/ /proc/self/cgroup'
	check 42 -- sh -c 'exit 42'
	check 0 --cpus 1 -- sh -c 'test "$(nproc)" = 1'
	check 137 --memory 128m -- python3 -c 'x = bytearray(1 << 30)'
	check 124 --timeout 5s -- sh -c 'setsid sleep 600 & sleep 600'
	check 2 --pids 40 -- sh -c 'i=0; while [ $i -lt 100 ]; do sleep 600 & i=$((i+1)); done 2>/dev/null' # dash's word for "can't fork"
fi
if [[ $part != contexts ]]; then
	echo "=== gVisor"
	warm --isolation gvisor
	check 0 --isolation gvisor -- sh -c "test \$(uname -r) != $(uname -r)"
	check 42 --isolation gvisor -- sh -c 'exit 42'
	check 137 --isolation gvisor --memory 256m -- python3 -c 'x = bytearray(1 << 30)'
	check 124 --isolation gvisor --timeout 20s -- sh -c 'setsid sleep 600 & sleep 600'
	check 2 --isolation gvisor --pids 60 -- sh -c 'i=0; while [ $i -lt 100 ]; do sleep 600 & i=$((i+1)); done 2>/dev/null'
	"$casemate" create --isolation gvisor --name g --disk 100m
	"$casemate" inspect g | grep -E 'cgroup +v2'
	"$casemate" exec g -- sh -c 'echo kept >/home/user/kept'
	"$casemate" pause g && "$casemate" resume g
	[[ $("$casemate" exec g -- cat /home/user/kept) == kept ]] || failed+=('gVisor: paused and resumed')
	"$casemate" rm g
fi
[[ $part != gvisor ]] || finish
"$casemate" create --name q --disk 100m
"$casemate" inspect q | grep -E 'cgroup +v2'
"$casemate" pause q && "$casemate" resume q && "$casemate" exec q -- echo 'paused and resumed'
python3 test/qemu-contexts.py /run/cm/casemate.sock q || failed+=(contexts)
# Without the cases that race the machine: everything is slow here.
[[ $part == contexts ]] || "$casemate" selftest --profile locked --only A,B,C,X02,X03,X04,X05,X06,X07,X08,X09 || failed+=(selftest)
finish
