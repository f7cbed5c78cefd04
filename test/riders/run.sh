#!/usr/bin/env bash
# Runs what is built on E2B's SDKs, unmodified and each with a task of its own, against a server of its
# own: test/riders/run.sh [SUITE…]. Suites: computesdk, mastra, openai-js, langchain, openai-python,
# mcp-js, mcp-python (the official clients of the Model Context Protocol), examples. What they need is pinned,
# and installed into test/riders/.cache (half a gigabyte).
set -euo pipefail
cd "$(dirname "$0")"
# shellcheck source=../clients.sh
. ../clients.sh
suites=("${@:-}")
[[ -n ${suites[0]} ]] || suites=(computesdk mastra openai-js langchain openai-python mcp-js mcp-python examples)

declare -A script=(
	[computesdk]=js/computesdk.test.mjs [mastra]=js/mastra.test.mjs [openai-js]=js/openai.test.mjs
	[langchain]=python/test_langchain.py [openai-python]=python/test_openai_agents.py
	[mcp-js]=js/mcp.test.mjs [mcp-python]=python/test_mcp.py [examples]=examples
)
install_js() { install_npm .cache/js js; }
install_python() { install_pip .cache/python python/requirements.txt; }
for s in "${suites[@]}"; do
	case ${script[$s]:-} in
	js/*)
		install_js
		cp "${script[$s]}" .cache/js/ # packages are found beside the program
		;;
	python/*) install_python ;;
	examples)
		install_js
		install_python
		cp ../../examples/typescript/*.ts .cache/js/
		;;
	*)
		echo "no suite $s: use ${!script[*]}" >&2
		exit 2
		;;
	esac
done

# examples: runs each one and compares what it prints.
examples() {
	local file name run bad=0
	for file in ../../examples/python/*.py .cache/js/*.ts; do
		name=$(basename "${file%.*}")
		run=("$node")
		[[ $file == *.ts ]] || run=(.cache/python/bin/python)
		if diff "examples/$name.txt" <(timeout 600 "${run[@]}" "$file" 2>&1); then
			echo "ok $name"
		else
			echo "FAILED $name"
			bad=1
		fi
	done
	return $bad
}

start_server
export PATH=$(dirname "$casemate"):$PATH
# Mastra needs a newer Node.js than Debian's, which npm serves too.
node=$(echo "$PWD"/.cache/js/node_modules/node-linux-*/bin/node)
failed=0
for s in "${suites[@]}"; do
	echo "== $s"
	case ${script[$s]} in
	js/*) "$node" --test ".cache/js/$(basename "${script[$s]}")" || failed=1 ;;
	python/*) (cd python && ../.cache/python/bin/python -m pytest -q "$(basename "${script[$s]}")") || failed=1 ;;
	examples) examples || failed=1 ;;
	esac
done
exit $failed
