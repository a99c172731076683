#!/usr/bin/env bash
# Makes the environment $1 with transformers $2 (5.17), and torch, alone of all packages, out of the environment $3.
set -euo pipefail
"${PYTHON:-python3.11}" -m venv --clear "$1"
ours="$(realpath "$3"/lib/python*/site-packages)"
mkdir "$1/torch"
ln -s "$ours"/{torch,torchgen,functorch,torch-*.dist-info} "$1/torch"
realpath "$1/torch" >"$(echo "$1"/lib/python*/site-packages)/torch.pth"
"$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$2.*" "compressed-tensors>=0.17,<0.21"
touch "$1/.installed"
