#!/bin/sh
# Generates the Go code and docs/openapi.yaml from the schema. Needs the tools in bin/tools
# (make tools); downloads nothing. With a directory as argument it writes there instead, laid out
# as from the repository's root.
set -eu
cd "$(dirname "$0")"
root=$(cd .. && pwd)
out=${1:-$root}
tools=${CASEMATE_TOOLS:-$root/bin/tools}
PATH="$tools:$PATH"
export PATH
mkdir -p "$out/proto" "$out/docs"
buf lint
buf generate --path casemate --path e2b -o "$out/proto"
buf build --path casemate -o -#format=binpb | go run ./openapi >"$out/docs/openapi.yaml.new"
mv "$out/docs/openapi.yaml.new" "$out/docs/openapi.yaml"
