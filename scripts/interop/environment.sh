#!/usr/bin/env bash
# Makes the environment $1 with vLLM for CPUs: scripts/interop/environment.sh .venv-interop
set -euo pipefail
here="$(dirname "$0")"
"${PYTHON:-python3.11}" -m venv "$1"
"$here/torch_for_cpu.sh" "$1"
"$1/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
# The libraries for sound and pictures have compiled parts that need a GPU build of torch. vLLM imports them wherever
# they are installed; a language model needs neither them nor the parts of torchvision that fail.
"$1/bin/pip" uninstall --quiet --disable-pip-version-check --yes torchaudio torchcodec
"$1/bin/python" - <<'PYTHON'
import importlib.util
import re
from pathlib import Path

spec = importlib.util.find_spec("torchvision")
assert spec is not None and spec.origin is not None
init = Path(spec.origin)
imports = r"from torchvision import \([^)]*\)"
text, found = re.subn(imports, "from torchvision import io, transforms, utils", init.read_text(), count=1)
assert found == 1, f"{init} does not look like torchvision 0.28.0"
init.write_text(text)
PYTHON
echo "$SECONDS" >"$1/.installed" # how long it took, for the published figures
