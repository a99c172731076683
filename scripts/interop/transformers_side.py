"""What transformers says: `python transformers_side.py JOB.json ANSWER.json LOGITS.safetensors`, in its environment.

A job is {"target", "prompts": [[id, ...], ...]}. The answer is {"transformers", "compressed_tensors", "misplaced"}, the
last the names that transformers missed, did not expect or found of another shape. Logits are [T, V] a prompt, named by
its number.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


@torch.inference_mode()
def answer(job: dict[str, Any], logits: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, info = AutoModelForCausalLM.from_pretrained(
        job["target"], dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    rows = {str(i): model(torch.tensor([ids])).logits[0] for i, ids in enumerate(job["prompts"])}
    save_file(rows, logits)
    return {
        "transformers": version("transformers"),
        "compressed_tensors": version("compressed-tensors"),
        "misplaced": sorted({str(name) for kind in info.values() for name in kind}),
    }


if __name__ == "__main__":
    given, written, logits = (Path(path) for path in sys.argv[1:])
    written.write_text(json.dumps(answer(json.loads(given.read_text()), logits)))
