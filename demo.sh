#!/usr/bin/env bash
# Shows Casemate at work: installs what is missing, builds, starts a server on loopback, runs a small
# agent's task in a sandbox, and tells what happened. Everything lives in a temporary folder and is gone
# afterwards. Needs Debian 12 (or alike), root, and Go.
set -euo pipefail
cd "$(dirname "$0")"
export PATH="$PATH:/usr/local/go/bin"

if [[ -t 1 && -z ${NO_COLOR:-} ]]; then bold=$'\e[1m' faint=$'\e[2m' off=$'\e[0m'; else bold='' faint='' off=''; fi
say() { printf '\n%s%s%s\n' "$bold" "$*" "$off"; }
show() { printf '%s$ %s%s\n' "$faint" "$*" "$off"; }
die() { printf 'demo: %s\n' "$*" >&2; exit 1; }
now() { date +%s%N; }

[[ $EUID -eq 0 ]] || die "needs root: sudo ./demo.sh"
command -v go >/dev/null || die "needs Go $(awk '$1 == "go" {print $2}' go.mod) or newer: https://go.dev/dl"

say "1. What this machine lacks"
deploy/setup.sh
# make is the one program of the build that a bare Debian does not have.
command -v make >/dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends make; } >/dev/null
echo "ready"

say "2. Build"
[[ -d $(go env GOMODCACHE)/modernc.org ]] || echo "the first time this takes some minutes"
make build >/dev/null
bin/casemate version | head -n 1

work=$(mktemp -d /tmp/casemate-demo.XXXXXX)
server=(--data-dir "$work/data" --run-dir "$work/run" --keys-dir "$work/keys")
export CASEMATE_URL=unix://$work/run/casemate.sock
cleanup() {
	status=$?
	trap - EXIT
	bin/casemate down --run-dir "$work/run" --sandboxes >/dev/null 2>&1 || true
	[[ $status -eq 0 ]] || tail -n 20 "$work/run/casemate.log" 2>/dev/null || true
	rm -rf "$work"
	exit $status
}
trap cleanup EXIT

say "3. A server on loopback, with a data directory of its own"
show "casemate up --data-dir … --listen 127.0.0.1:0 --store-size 2g"
bin/casemate up "${server[@]}" --listen 127.0.0.1:0 --store-size 2g

say "4. A sandbox from the built-in template: this machine's /usr, and nothing else of it"
start=$(now)
show "casemate create --name agent --memory 512m --cpus 1 --pids 64 --disk 200m"
bin/casemate create --name agent --memory 512m --cpus 1 --pids 64 --disk 200m
created=$((($(now) - start) / 1000000))

say "5. What an agent might do"
look='echo "I am $(whoami) on $(hostname) in $PWD, with $(nproc) CPU and $(ls -d /proc/[0-9]* | wc -l) processes"'
show "casemate exec agent -- sh -c '$look'"
start=$(now)
bin/casemate exec agent -- sh -c "$look"
first=$((($(now) - start) / 1000000))

show "casemate exec -i agent -- python3 -   (a script that writes a file)"
bin/casemate exec -i agent -- python3 - <<'PYTHON'
import json, pathlib
primes = [n for n in range(2, 60) if all(n % d for d in range(2, n))]
pathlib.Path("primes.json").write_text(json.dumps({"count": len(primes), "primes": primes}))
print(f"found {len(primes)} primes, wrote {pathlib.Path('primes.json').resolve()}")
PYTHON

show "casemate cp agent:primes.json -"
bin/casemate cp agent:primes.json -
echo

say "6. What the walls refuse"
show "casemate exec -i agent -- python3 -   (a script that tries to get out)"
bin/casemate exec -i agent -- python3 - <<'PYTHON' || echo "(exit code $?)"
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)

def attempt(what, act):
    try:
        print(f"  REACHED  {what}: {act()!r}")
        return 1
    except OSError as e:
        print(f"  refused  {what}: {e.strerror}")
        return 0

def call(number, *args):
    if libc.syscall(number, *args) < 0:
        n = ctypes.get_errno()
        raise OSError(n, os.strerror(n))

def reach(host, port):
    s = socket.socket()
    s.settimeout(2)
    s.connect((host, port))

reached = sum([
    attempt("read the host's password hashes", lambda: open("/etc/shadow").read(20)),
    attempt("read root's SSH keys", lambda: os.listdir("/root/.ssh")),
    attempt("write a kernel setting", lambda: open("/proc/sys/kernel/core_pattern", "w")),
    attempt("write to a system program", lambda: open("/usr/bin/env", "wb")),
    attempt("open a raw disk", lambda: os.open("/dev/sda", os.O_RDONLY)),
    attempt("make a user namespace", lambda: os.unshare(0x10000000) if hasattr(os, "unshare") else call(272, 0x10000000)),
    attempt("mount a file system", lambda: call(165, b"none", b"/mnt", b"tmpfs", 0, None)),
    attempt("load an eBPF program", lambda: call(321, 5, None, 0)),
    attempt("reach the internet", lambda: reach("1.1.1.1", 443)),
    attempt("reach the server's own port", lambda: reach("127.0.0.1", 22)),
])
raise SystemExit(reached)
PYTHON

show "casemate exec --timeout 1s agent -- sh -c 'setsid sleep 60 & sleep 60'"
bin/casemate exec --timeout 1s agent -- sh -c 'setsid sleep 60 & sleep 60' || echo "(exit code $?)"

show "casemate exec agent -- python3 -c 'x = bytearray(8 << 30)'"
bin/casemate exec agent -- python3 -c 'x = bytearray(8 << 30)' || echo "(exit code $?)"

say "7. What holds it"
show "casemate inspect agent"
bin/casemate inspect agent

say "8. Which files it changed"
show "casemate diff agent"
bin/casemate diff agent

say "9. What happened, as recorded outside the sandbox"
show "casemate journal agent"
bin/casemate journal agent

say "10. Gone"
start=$(now)
show "casemate rm agent"
bin/casemate rm agent
removed=$((($(now) - start) / 1000000))
start=$(now)
show "casemate run -- python3 -c 'print(6*7)'"
bin/casemate run -- python3 -c 'print(6*7)'
ran=$((($(now) - start) / 1000000))

say "Timings, with the start of the command line each time"
printf '%6s ms  %s\n' "$created" "create" "$first" "first command" "$removed" "delete" "$ran" "create, python3, delete in one"
printf '\nNext: %scasemate up%s starts a server that stays (bin/casemate, or make install first).\n' "$bold" "$off"
