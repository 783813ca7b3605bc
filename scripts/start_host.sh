#!/usr/bin/env bash
# Runs the ComfyUI that setup_host.sh installed, on the CPU, with this checkout in it, until it is stopped.
#
#   scripts/start_host.sh FOLDER PORT [more arguments of ComfyUI's main.py]
#
# Environment: BASE, a folder with custom_nodes, models, output and so on; default FOLDER/base, into whose custom_nodes
# this checkout is linked.
set -euo pipefail

folder=$(cd "$1" && pwd)
port=$2
shift 2
[ -n "${BASE:-}" ] || ln -sfn "$(cd "$(dirname "$0")/.." && pwd)" "$folder/base/custom_nodes/specar"

# --disable-api-nodes keeps the page from asking for anything on the internet.
cd "$folder/ComfyUI"
exec "$folder/venv/bin/python" main.py --cpu --port "$port" --base-directory "${BASE:-$folder/base}" \
  --disable-auto-launch --disable-api-nodes --database-url sqlite:///:memory: "$@"
