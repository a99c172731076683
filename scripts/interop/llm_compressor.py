"""A W4A16 checkpoint of the pocket model by llm-compressor's GPTQ, for the import: python llm_compressor.py DEST

Runs in an environment of its own, see `make llm-compressor`; needs nothing of Twofold but the folder of the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer

POCKET = Path(__file__).parents[2] / "twofold" / "assets" / "pocket"
ROWS, LENGTH, GROUP = 64, 256, 32


def main(destination: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(POCKET)
    model = AutoModelForCausalLM.from_pretrained(POCKET, dtype="bfloat16")
    lines = (POCKET / "prompts.jsonl").read_text().splitlines()[:ROWS]
    texts = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    rows = [tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=True) for text in texts]
    data = Dataset.from_list([{"input_ids": list(row["input_ids"])[:LENGTH]} for row in rows])
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    recipe = GPTQModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        # in_proj_a and in_proj_b steer the state; engines join them, as they join q/k/v, gate/up and qkv/z.
        ignore=["lm_head", "re:.*in_proj_[ab]$"],
    )
    oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=len(data), max_seq_length=LENGTH)
    model.save_pretrained(destination, save_compressed=True)
    tokenizer.save_pretrained(destination)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
