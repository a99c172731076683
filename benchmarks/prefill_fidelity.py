"""What a prefill with 8-bit floats costs in KL, on held-out answers that a run made.

    python benchmarks/prefill_fidelity.py RUN --out prefill_fidelity.json

RUN is the folder of a recipe's run. Its packed target is compared with itself, multiplied with 8-bit floats: on a GPU
by the prefill's kernels, in bfloat16; elsewhere by their reference, in float32. Beside it the KL of that target, in 16
or 32 bits, to the teacher.
"""

import argparse
import json
from pathlib import Path

import torch

from twofold.data.conversations import load_conversations, pack
from twofold.evaluation.fidelity import fidelity, prefill_fidelity
from twofold.models.causal_lm import CausalLM
from twofold.models.checkpoint import load_target
from twofold.ops.kernels import Kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels = Kernels.auto(device)
    eight_bits = kernels.with_fp8_prefill(device)
    if eight_bits is None:
        raise SystemExit("this GPU has no products of 8-bit floats: sm_89 and newer do")

    def load(folder: Path, chosen: Kernels) -> CausalLM:
        return load_target(folder, dtype, chosen).to(device)

    rows = pack(load_conversations(given.run / "generate" / "heldout.safetensors"), 512)
    target = load(given.run / "pack", kernels)
    found = {"fp8": prefill_fidelity(target, load(given.run / "pack", eight_bits), rows)}
    teacher = json.loads((given.run / "recipe.json").read_text())["model"]
    found["teacher"] = fidelity(target, load(Path(teacher), kernels).freeze(), rows)
    for name, to in (("fp8", "the target without it"), ("teacher", "the teacher, the target without it")):
        print(f"KL to {to}: {found[name]['kl']:.5f} nats, same first choice {found[name]['top1']:.2%}")
    if given.out is not None:
        given.out.write_text(json.dumps({"device": device.type, "precision": str(dtype), **found}, indent=1))


if __name__ == "__main__":
    main()
