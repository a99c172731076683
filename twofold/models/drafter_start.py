"""Where a new drafter starts: at the target's own last layers, not at noise, as far as the shapes agree.

A draft layer is a layer of the target that looks at another context. Those of the target that stand next to the head
already turn a state that knows the last token into one that guesses the next, and write it where the head reads.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.models.layers import RMSNorm, dense_weight
from twofold.models.mixers import Attention
from twofold.quant.linear import FakeQuantLinear, PackedLinear

NOISE = 0.1  # what is left of the fusion's random weights, so that no tap is without gradient


@torch.no_grad()
def start_from_target(drafter: Drafter, target: CausalLM) -> list[str]:
    """Draft layers take the weights of the target's last attention layers, in order; returns the names of those taken.

    A matrix of another shape, or of other heads, stays as it is. Queries come without the gate that stands beside them
    in some families. A norm w on (offset + w) becomes offset + w. The context's feature starts as the last tap,
    W_fc = [0 ... 0 I] + 0.1 times what it was, and the final norm as the target's, whose head reads behind it.
    What it brings: docs/drafter.md.
    """
    mine, its = drafter.config, target.config
    same_heads = (mine.num_heads, mine.num_kv_heads, mine.head_dim) == (its.num_heads, its.num_kv_heads, its.head_dim)
    taken: list[str] = []

    def take(name: str, value: Tensor) -> None:
        parameter = drafter.get_parameter(name)
        if parameter.shape == value.shape and (same_heads or "self_attn" not in name):
            parameter.copy_(value)
            taken.append(name)

    sources = [layer for layer in target.layers if isinstance(getattr(layer, "self_attn", None), Attention)]
    count = min(len(sources), len(drafter.layers))
    for number, source in enumerate(sources[len(sources) - count :], start=len(drafter.layers) - count):
        for name, part in source.named_modules():
            weight = f"layers.{number}.{name}.weight"
            if isinstance(part, RMSNorm):
                take(weight, part.scale().weight_K)
            elif name == "self_attn.q_proj" and its.output_gate:
                both_NK = dense_weight(part, torch.float32)
                take(weight, both_NK.unflatten(0, (-1, 2, its.head_dim))[:, 0].flatten(0, 1))
            elif isinstance(part, nn.Linear | FakeQuantLinear | PackedLinear):
                take(weight, dense_weight(part, torch.float32))
    take("norm.weight", target.norm.scale().weight_K)
    size = mine.hidden_size
    drafter.fc.weight.mul_(NOISE)
    drafter.fc.weight[:, -size:] += torch.eye(size, device=drafter.device)
    return [*taken, "fc.weight"]


@torch.no_grad()
def with_markov_head(drafter: Drafter, rank: int, seed: int) -> Drafter:
    """The same drafter with a new Markov head (see `markov_head`), whose bias is zero: it guesses what it did before.

    `drafter` has no Markov head and no draft head, and its layers are not packed.
    """
    made = Drafter.initialized(replace(drafter.config, markov_rank=rank), seed, drafter.kernels).to(drafter.device)
    lacking, unknown = made.load_state_dict(drafter.state_dict(), strict=False)
    assert all(name.startswith("markov_head.") for name in lacking)
    assert not unknown
    return made
