#!/usr/bin/env bash
# Installs the Debian packages that the tests need and that are missing: Chromium and Firefox for the pages' tests, the
# library that Firefox plays H.264 with, git for the pack's.
set -euo pipefail

missing=()
for pair in chromium:chromium firefox-esr:firefox-esr git:git; do
  command -v "${pair%:*}" > /dev/null || missing+=("${pair#*:}")
done
codec=
/sbin/ldconfig -p | grep -q libavcodec.so || codec='^libavcodec[0-9]+$'  # its number is that of the release
[ ${#missing[@]} -gt 0 ] || [ -n "$codec" ] || exit 0
as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get -qq update
[ -z "$codec" ] || missing+=("$(apt-cache search --names-only "$codec" | cut -d ' ' -f 1 | grep -E "$codec")")
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get -qq install -y --no-install-recommends "${missing[@]}" > /dev/null
