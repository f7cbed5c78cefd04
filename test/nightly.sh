#!/usr/bin/env bash
# The tests that take long, for every night: all tests in another order and without a second try for what fails,
# fuzzing, soak, building template base, other people's clients, and what only another machine shows, in QEMU:
# cgroup v2, and the service on a fresh Debian. PARTS names which of them to run (default all).
# Each part runs; the exit code tells whether all held.
set -uo pipefail
cd "$(dirname "$0")/.."

failed=() results=()
part() {
	local name=$1
	shift
	case " ${PARTS:-$name} " in *" $name "*) ;; *) return ;; esac
	printf '\n=== %s\n' "$name"
	local begun=$SECONDS result=ok
	"$@" || result=FAILED
	[[ $result == ok ]] || failed+=("$name")
	results+=("$(printf '%-9s  %-6s  %5d s' "$name" "$result" $((SECONDS - begun)))")
	printf '=== %s took %d s\n' "$name" $((SECONDS - begun))
}

# having PATTERN: the packages with a test that it names.
having() { grep -rlE --include='*_test.go' "^func $1" . | xargs -n1 dirname | sort -u; }

fuzz() {
	local ok=0 package target
	while read -r package target; do
		echo "fuzz $package $target"
		go test -run '^$' -fuzz "^$target\$" -fuzztime "${FUZZTIME:-60s}" -fuzzminimizetime 10x "$package" || ok=1
	done < <(having Fuzz | while read -r dir; do
		grep -hoE '^func Fuzz[A-Za-z0-9_]+' "$dir"/*_test.go | sed "s|func |$dir |"
	done)
	return $ok
}

soak() {
	# shellcheck disable=SC2046 # a list
	CASEMATE_SOAK=1 go test -count=1 -timeout 180m -run 'Soak|Stress' $(having 'Test[A-Za-z0-9]*(Soak|Stress)')
}

part unit env RERUNS=0 CASEMATE_TEST_NIGHTLY=1 test/gotest.sh ./... -count=1 -shuffle=on -timeout 30m
# What passed in an earlier night is run again: -count=1. All packages but one, whose tests start the gateway as it is in the released
# program, without cgo, and the race detector needs cgo.
part race make race RACE="$(go list ./... | grep -v '/test/network$' | xargs)" RERUNS=0 TESTTIMEOUT=30m GOFLAGS="${GOFLAGS:+$GOFLAGS }-count=1"
part fuzz fuzz
part soak soak
part base test/base.sh
part e2b test/e2b/run.sh
part riders test/riders/run.sh
part cgroup-v2 test/qemu.sh
part systemd test/systemd.sh

printf '\n'
printf '%s\n' "${results[@]}"
printf '%d parts failed%s\n' "${#failed[@]}" "${failed[*]:+: ${failed[*]}}"
exit $((${#failed[@]} > 0))
