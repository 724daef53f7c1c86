#!/bin/sh
# install-locked.sh LOCK PATTERN: installs the packages of a lock file whose lines match (an ERE of awk), by hash, into the
# environment /opt/stoker. What is installed already stays; the tools for it do not. UV_OPTIONS: how packages are fetched.
set -eu
lock=$1 pattern=$2
tools=$(mktemp -d)
python3 -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --no-cache-dir --require-hashes -r "$(dirname "$0")/setup.txt"
awk -v pattern="$pattern" '/^[A-Za-z0-9]/ { chosen = $0 ~ pattern } chosen' "$lock" >"$tools/chosen.txt"
PYC_INVALIDATION_MODE=UNCHECKED_HASH "$tools/bin/uv" pip install --quiet --system-certs ${UV_OPTIONS:-} --link-mode copy \
    --compile-bytecode --require-hashes --no-deps --python /opt/stoker/bin/python -r "$tools/chosen.txt"
rm -rf "$tools"
