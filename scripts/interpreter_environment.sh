#!/usr/bin/env bash
# Makes the environment $1 with Triton, whose interpreter fails with numpy 2.4, NVRTC, and all else out of the environment $2.
set -euo pipefail
"${PYTHON:-python3.11}" -m venv --clear "$1"
"$1/bin/pip" install --quiet --disable-pip-version-check triton==3.6.0 numpy==2.3.5 \
  cuda-bindings==13.0.3 nvidia-cuda-nvrtc==13.0.88
realpath "$2"/lib/python*/site-packages >"$(echo "$1"/lib/python*/site-packages)/all_else.pth"
touch "$1/.installed"
