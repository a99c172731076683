"""The real stages on a model of no size; `python -m tests.pipeline.line RECIPE OUT STAGE STEP` runs them and kills
itself when STAGE has saved the checkpoint of STEP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tests import pocket
from tests.models.tiny import HYBRID, build
from twofold.models.checkpoint import save_target
from twofold.models.folder import TOKENIZER_FILES
from twofold.pipeline.checkpoint import Checkpoints
from twofold.pipeline.recipe import load_recipe
from twofold.pipeline.run import run_pipeline
from twofold.pipeline.stages import STAGES

RECIPE = """
name = "line"
model = "model"
seed = 3
[prompts]
train = "train.jsonl"
heldout = "heldout.jsonl"
[generate]
max_new_tokens = 20
[quantize]
group_size = 16
[distill]
batch_rows = 2
row_length = 64
optimizer = { steps = 4, learning_rate = 1e-3, checkpoint_every = 1, validate_every = 2 }
[regenerate]
max_new_tokens = 20
[draft]
num_layers = 2
intermediate_size = 48
num_heads = 4
num_kv_heads = 2
head_dim = 16
block_size = 4
mask_token_id = 3
target_layer_ids = [0, 2]
[draft_pretrain]
batch_rows = 2
row_length = 64
anchors = 8
optimizer = { steps = 3, learning_rate = 1e-3, checkpoint_every = 1 }
[draft_finetune]
loss = { hard = 0.1, soft = 0.3, total_variation = 0.6 }
positions = "dpace"
store_features = true
batch_rows = 2
row_length = 64
anchors = 8
optimizer = { steps = 3, learning_rate = 1e-3, checkpoint_every = 1 }
[draft_quantize]
group_size = 16
rows = 2
anchors = 8
sliding_window = 8
head = { bits = 8, rows = 4000 }
[evaluate]
prompts = 2
max_tokens = 10
lossless_prompts = 2
[bench]
short = [8, 4]
medium = [16, 4]
long = [40, 4]
prompts = 1
runs = 1
chat_prompts = 1
chat_tokens = 4
[gates]
kl_recovery = -1000
top1 = 0
accept_length = 1
speedup = 0
"""


def write_recipe(folder: Path) -> Path:
    """The recipe with its model and prompts; returns its file."""
    config = replace(HYBRID, vocab_size=8192, eos_token_ids=(0, 2))
    save_target(build(config), folder / "model")
    for name in TOKENIZER_FILES:
        if (pocket.FOLDER / name).exists():
            shutil.copyfile(pocket.FOLDER / name, folder / "model" / name)
    for name, texts in (
        ("train", ("Hello.", "What is a tree?", "Count to ten.", "Say no.", "Where is Rome?", "Write a poem.")),
        ("heldout", ("Hi.", "Who was Bach?")),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    file = folder / "line.toml"
    file.write_text(RECIPE)
    return file


def kill_after(stage: str, step: int) -> Callable[[Checkpoints, int, Callable[[Path], object]], None]:
    """A `Checkpoints.save` that is the last thing the process does."""
    save = Checkpoints.save

    def save_and_die(self: Checkpoints, at: int, write: Callable[[Path], object]) -> None:
        save(self, at, write)
        if at == step and self.folder.parent.name == f".{stage}.partial":
            os.kill(os.getpid(), signal.SIGKILL)

    return save_and_die


if __name__ == "__main__":
    torch.set_num_threads(1)
    Checkpoints.save = kill_after(sys.argv[3], int(sys.argv[4]))  # type: ignore[method-assign]
    run_pipeline(load_recipe(sys.argv[1]), Path(sys.argv[2]), STAGES, sys.stdout)
