#!/usr/bin/env bash
# Installs the Debian packages that the tests need and that are missing: Chromium for the page's tests, git for the pack's.
set -euo pipefail

missing=()
for pair in chromium:chromium git:git; do
  command -v "${pair%:*}" > /dev/null || missing+=("${pair#*:}")
done
[ ${#missing[@]} -gt 0 ] || exit 0
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get -qq update
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get -qq install -y --no-install-recommends "${missing[@]}" > /dev/null
