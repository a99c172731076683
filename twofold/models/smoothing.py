"""Smoothing: scales move from what makes an input to what takes it, and nothing changes (AWQ, arXiv:2306.00978).

D hidden size; a linear layer has K inputs; what makes them has P channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twofold.models.causal_lm import CausalLM
from twofold.models.config import FULL, ModelConfig
from twofold.models.layers import RMSNorm
from twofold.quant.awq import fold_into_norm


@dataclass(frozen=True)
class InputGroup:
    """Linear layers of one input and the module that makes it; input k is a multiple of channel owner[k] of that."""

    producer: str
    quantized: tuple[str, ...]
    dense: tuple[str, ...]
    owner_K: Tensor


def input_groups(config: ModelConfig, index: int) -> list[InputGroup]:
    """The groups of layer `index` in computing order. Names are those of the model.

    Values pass attention and its gate channel by channel, so v_proj makes the inputs of o_proj: a value channel
    makes one for each query head of its key head. A channel of Gated DeltaNet's norm makes one for each head.
    """

    def names(parts: str) -> tuple[str, ...]:
        return tuple(f"layers.{index}.{part}" for part in parts.split())

    def group(producer: str, quantized: str, owner_K: Tensor, dense: str = "") -> InputGroup:
        return InputGroup(f"layers.{index}.{producer}", names(quantized), names(dense), owner_K)

    hidden_D = torch.arange(config.hidden_size)
    if config.layer_types[index] == FULL:
        values_GD = torch.arange(config.num_kv_heads * config.head_dim).view(config.num_kv_heads, -1)
        owner_K = values_GD.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0).flatten()
        mixer = [
            group("input_layernorm", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", hidden_D),
            group("self_attn.v_proj", "self_attn.o_proj", owner_K),
        ]
    else:
        owner_K = torch.arange(config.linear_value_dim) % config.linear_value_head_dim
        steering = "linear_attn.in_proj_b linear_attn.in_proj_a"
        mixer = [
            group("input_layernorm", "linear_attn.in_proj_qkv linear_attn.in_proj_z", hidden_D, steering),
            group("linear_attn.norm", "linear_attn.out_proj", owner_K),
        ]
    return [
        *mixer,
        group("post_attention_layernorm", "mlp.gate_proj mlp.up_proj", hidden_D),
        group("mlp.up_proj", "mlp.down_proj", torch.arange(config.intermediate_size)),
    ]


@torch.no_grad()
def apply_smoothing(model: CausalLM, smoothing: Mapping[str, Tensor]) -> None:
    """Folds the scales of a `Calibration` into a dense model, in place; what it computes stays the same.

    ValueError, before anything is changed, for scales that do not belong to such a model.
    """
    groups = [group for i in range(model.config.num_layers) for group in input_groups(model.config, i)]
    widths = {group.producer: int(group.owner_K.max()) + 1 for group in groups}
    for name, scale_P in smoothing.items():
        if widths.get(name) != len(scale_P):
            raise ValueError(f"smoothing of {name} by {len(scale_P)} scales does not fit this model; quantize it again")
    for group in groups:
        if group.producer in smoothing:
            fold(model, group, smoothing[group.producer])


def fold(model: CausalLM, group: InputGroup, scale_P: Tensor) -> Tensor:
    """Moves s from the producer to the consumers; returns the s that they got."""
    producer = model.get_submodule(group.producer)
    if isinstance(producer, RMSNorm):
        weight_P, scale_P = fold_into_norm(producer.weight.cpu(), scale_P, producer.offset)
        producer.weight.copy_(weight_P)
    else:
        linear = linear_at(model, group.producer)
        linear.weight.div_(scale_P.to(linear.weight)[:, None])
        if linear.bias is not None:
            linear.bias.div_(scale_P.to(linear.bias))
    for name in (*group.quantized, *group.dense):
        weight_NK = linear_at(model, name).weight
        weight_NK.mul_(scale_P[group.owner_K].to(weight_NK))
    return scale_P


def linear_at(model: CausalLM, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear), f"{name} is no dense linear layer"
    return layer
