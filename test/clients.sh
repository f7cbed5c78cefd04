# Sourced by the tests that run other people's clients against a server: installs the clients, pinned,
# and starts the server.

# installed DIR FILE COMMAND…: runs the command in a fresh DIR unless it was run for this FILE before.
installed() {
	local dir=$1 file=$2
	shift 2
	if ! cmp -s "$file" "$dir/.installed-for"; then
		rm -rf "$dir"
		mkdir -p "$dir"
		"$@"
		cp "$file" "$dir/.installed-for"
	fi
}

# install_npm DIR SOURCE: installs what SOURCE/package-lock.json pins into DIR/node_modules.
install_npm() {
	installed "$1" "$2/package-lock.json" npm_ci "$1" "$2"
}

npm_ci() {
	cp "$2/package.json" "$2/package-lock.json" "$1/"
	npm ci --prefix "$1" --ignore-scripts --no-audit --no-fund --loglevel=error
}

# node_version is what is fetched where the system's Node.js is too old for E2B's SDK, as Debian 12's is.
node_version=22.23.5

# use_node DIR: puts a Node.js that E2B's SDK takes (20.18.1 or newer) first in PATH: the system's, or one from
# the registry in DIR.
use_node() {
	local arch=x64
	if ! node -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 20 || a === 20 && b > 18 ? 0 : 1)' 2>/dev/null; then
		[[ $(uname -m) == aarch64 ]] && arch=arm64
		if [[ ! -x $1/node_modules/node-linux-$arch/bin/node ]]; then
			npm install --prefix "$1" --ignore-scripts --no-audit --no-fund --loglevel=error "node-linux-$arch@$node_version"
		fi
		PATH=$PWD/$1/node_modules/node-linux-$arch/bin:$PATH
	fi
}

# install_pip DIR REQUIREMENTS: makes a virtual environment in DIR with what the file pins.
install_pip() {
	installed "$1" "$2" pip_install "$1" "$2"
}

pip_install() {
	python3 -m venv "$1"
	"$1/bin/pip" install --quiet --disable-pip-version-check -r "$2"
}

# start_server [FLAG…]: starts a server of its own, which ends with this shell, and exports where it is, its process,
# a key of the shape that E2B's SDKs check, and trust in the certificates that the server makes.
start_server() {
	casemate=${CASEMATE:-$(git rev-parse --show-toplevel)/bin/casemate}
	work=$(mktemp -d /tmp/casemate-clients.XXXXXX)
	trap stop_server EXIT
	"$casemate" up --data-dir "$work/data" --run-dir "$work/run" --keys-dir "$work/keys" --listen 127.0.0.1:0 \
		--store-size 2g "$@" >/dev/null
	CASEMATE_URL=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["urls"][0])' "$work/run/server.json")
	CASEMATE_API_KEY=$("$casemate" --url "unix://$work/run/casemate.sock" keys create --e2b clients 2>/dev/null | tail -n 1)
	CASEMATE_PID=$(python3 -c 'import json,sys; print(json.load(open(sys.argv[1]))["pid"])' "$work/run/server.json")
	export CASEMATE_URL CASEMATE_API_KEY CASEMATE_PID
	export E2B_API_URL=$CASEMATE_URL E2B_SANDBOX_URL=$CASEMATE_URL E2B_API_KEY=$CASEMATE_API_KEY
	"$casemate" --url "unix://$work/run/casemate.sock" ca >"$work/ca.pem" 2>/dev/null
	cat /etc/ssl/certs/ca-certificates.crt "$work/ca.pem" >"$work/bundle.pem"
	export NODE_EXTRA_CA_CERTS=$work/ca.pem SSL_CERT_FILE=$work/bundle.pem
}

stop_server() {
	"$casemate" down --run-dir "$work/run" --sandboxes >/dev/null 2>&1 || true
	rm -rf "$work"
}
