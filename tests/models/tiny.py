"""Tiny models of every family, with weights large enough that a mistake anywhere moves the logits."""

import torch

from twofold.models.causal_lm import CausalLM
from twofold.models.config import FULL, LINEAR, ModelConfig
from twofold.ops.kernels import Kernels

VOCABULARY = 97

PLAIN = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    layer_types=(FULL, FULL),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    rotary_dim=16,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    tie_embeddings=False,
    eos_token_ids=(1, 2),
)

HYBRID = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    layer_types=(LINEAR, LINEAR, FULL, LINEAR),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope_theta=10_000.0,
    rotary_dim=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    tie_embeddings=True,
    norm_offset=1.0,
    qk_norm=True,
    output_gate=True,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_conv_width=4,
    eos_token_ids=(1,),
)


def perturb(model: torch.nn.Module, seed: int = 0) -> None:
    """Moves every parameter, those that start at 0 or 1 included; logits get a deviation of 1 or more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            # more than this, and float32 itself is off by over 1e-4
            scale = 0.15 if "embed" in name or "head" in name else 0.08
            parameter.add_(scale * noise.to(parameter.dtype))


def build(
    config: ModelConfig, kernels: Kernels | None = None, dtype: torch.dtype = torch.float32, seed: int = 0
) -> CausalLM:
    """A model with seeded weights, the same in every dtype."""
    torch.manual_seed(seed)
    model = CausalLM(config, kernels)
    torch.nn.init.normal_(model.embed_tokens.weight, std=0.2)
    perturb(model, seed)
    return model.to(dtype)


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator)
