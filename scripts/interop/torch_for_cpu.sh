#!/usr/bin/env bash
# Installs the CPU build of torch 2.13.0 in the environment $1. Without it pip may find the CUDA build under the same
# version, which with its libraries is several GB; that one is never taken.
set -euo pipefail
torch="torch==2.13.0+cpu"
install=("$1/bin/pip" install --quiet --disable-pip-version-check --retries 1 "$torch")
if ! "${install[@]}"; then
    echo "pip's index has no $torch; trying PyTorch's own" >&2
    if ! "${install[@]}" --extra-index-url https://download.pytorch.org/whl/cpu; then
        echo "no index has $torch: point pip at one that has (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS)" >&2
        exit 1
    fi
fi
