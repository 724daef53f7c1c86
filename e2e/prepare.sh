#!/usr/bin/env bash
# Debian packages that the nodes of `make cluster`, the image builds and the console's tests need. Installs only what is missing; needs root for that.
set -euo pipefail

wanted=(runc iptables conntrack busybox-static socat iproute2 buildah containers-storage mmdebstrap skopeo chromium)
missing=()
for package in "${wanted[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
command -v promtool >/dev/null || missing+=(promtool)
if ((${#missing[@]} == 0)); then exit 0; fi
if [[ $EUID -ne 0 ]]; then
    echo "missing packages, and only root can install them: ${missing[*]}" >&2
    exit 1
fi
apt-get update -qq
for package in "${missing[@]}"; do
    if [[ $package != promtool ]]; then
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "$package"
        continue
    fi
    # Only the program: the package prometheus would start a server.
    folder=$(mktemp -d)
    (cd "$folder" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && install usr/bin/promtool /usr/local/bin/)
    rm -r "$folder"
done
