#!/usr/bin/env bash
# Builds templates base and code-interpreter from scratch on a server of its own, and uses them: sudo, apt,
# python, git; 200 ordinary commands and "casemate replay" of them; section F of the battery in profile standard; IPython, matplotlib, Node.js. Builds a Python service with
# apt and pip steps upon base, twice to the same.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d /tmp/casemate-base.XXXXXX)
export CASEMATE_URL=unix://$work/run/casemate.sock
cleanup() {
	bin/casemate down --run-dir "$work/run" --sandboxes >/dev/null 2>&1 || true
	rm -rf "$work"
}
trap cleanup EXIT

bin/casemate up --data-dir "$work/data" --run-dir "$work/run" --keys-dir "$work/keys" --listen 127.0.0.1:0
bin/casemate template build base
bin/casemate template list
check() { # EXPECTED COMMAND…
	local want=$1 got
	shift
	got=$(bin/casemate run --template base --profile standard -- "$@")
	[[ $got == "$want" ]] || { echo "base: '$*' gave '$got', not '$want'" >&2; exit 1; }
}
check user whoami
check root sudo whoami
check 42 python3 -c 'print(6*7)'
check 42 python -c 'print(6*7)'
check ok sh -c 'git --version >/dev/null && curl --version >/dev/null && echo ok'
check /home/user bash -l -c pwd
bin/casemate selftest --only F --profile standard
# What people run every day, and again.
bin/casemate create --template base --name ordinary --file-changes full >/dev/null
while IFS= read -r line <&3; do
	[[ -z $line || $line == '#'* ]] || bin/casemate exec ordinary -- sh -c "${line#! }" </dev/null &>/dev/null || true
done 3<test/replay/commands.txt
bin/casemate replay ordinary >"$work/replayed" || true
grep -A 3 -E '^(DIVERGED|unstable|not attempted) ' "$work/replayed" || true
tail -n 3 "$work/replayed"
good=$(sed -n 's/^\([0-9]*\) processes reproduced.*/\1/p' "$work/replayed")
all=$(grep -vc '^#' test/replay/commands.txt)
((100 * good >= 95 * all)) || { echo "base: $good of $all ordinary commands are reproduced" >&2; exit 1; }
bin/casemate rm ordinary
bin/casemate template build code-interpreter
check() { # EXPECTED COMMAND…
	local want=$1 got
	shift
	got=$(bin/casemate run --template code-interpreter -- "$@")
	[[ $got == "$want" ]] || { echo "code-interpreter: '$*' gave '$got', not '$want'" >&2; exit 1; }
}
check 6 python3 -c 'import IPython, numpy, pandas, matplotlib.pyplot; print(numpy.arange(4).sum())'
check 42 node -p '6*7'
check function node -p 'typeof require("module").stripTypeScriptTypes'
check ok sh -c 'npm --version >/dev/null && echo ok'
check '' sh -c 'ls /home/user'
left=$(bin/casemate run --template code-interpreter --profile standard -- sudo find / -xdev -uid 1878982656 -o -path /tmp/casemate-build)
[[ -z $left ]] || { echo "code-interpreter: its build left $left" >&2; exit 1; }

# A company's proxy may answer for the registries, at an address that a rule must name.
site=$(apt-get indextargets --format '$(SITE)' | head -n 1)
site=${site#*//}
address=$(getent ahostsv4 "${site%%/*}" | awk 'NR == 1 { print $1 }')
net=(--net registries)
case $address in
10.* | 172.1[6-9].* | 172.2?.* | 172.3[01].* | 192.168.* | 192.0.2.* | 198.51.100.* | 203.0.113.*) net+=(--allow "$address") ;;
esac
mkdir "$work/service"
cat >"$work/service/Dockerfile" <<'END'
FROM base
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv nginx-light dbus fontconfig && rm -rf /var/lib/apt/lists/*
WORKDIR /srv/app
COPY app.py .
RUN python3 -m venv /srv/venv && /srv/venv/bin/pip install flask gunicorn
RUN /srv/venv/bin/python -m compileall -q .
ENV PATH=/srv/venv/bin:$PATH
USER user
END
printf 'from flask import Flask\n\napp = Flask(__name__)\n' >"$work/service/app.py"
bin/casemate template build -t service --no-cache "${net[@]}" --requirements "$work/service/requirements.lock" "$work/service"
bin/casemate template build -t service --no-cache --locked "${net[@]}" --requirements "$work/service/requirements.lock" "$work/service"
mapfile -t builds < <(bin/casemate template history service | awk 'NR > 1 { print $1 }')
bin/casemate template diff "${builds[1]}" "${builds[0]}"
# With the digests, pip itself refuses an archive that is another.
cat >"$work/service/Dockerfile" <<'END'
FROM service
USER root
COPY requirements.lock .
RUN python3 -m venv /srv/second && /srv/second/bin/pip install -r requirements.lock
END
bin/casemate template build -t second "${net[@]}" "$work/service"
sed -i 's/sha256:......../sha256:00000000/' "$work/service/requirements.lock"
if bin/casemate template build -t third "${net[@]}" "$work/service"; then
	echo 'a build took an archive whose digest is another' >&2
	exit 1
fi
echo "base, code-interpreter, a service twice: ok"
