"""A drafter that starts at the target's layers computes what they do, and learns from there."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.models.tiny import HYBRID, PLAIN, build, tokens
from twofold.models.config import ModelConfig
from twofold.models.drafter import Drafter
from twofold.models.drafter_config import DrafterConfig, DraftShape
from twofold.models.drafter_start import start_from_target


def shape_of(config: ModelConfig, num_layers: int) -> DraftShape:
    return DraftShape(
        num_layers=num_layers,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=4,
        mask_token_id=5,
        target_layer_ids=(0, 1),
    )


def started(config: ModelConfig, num_layers: int, **changes: int) -> tuple[Drafter, list[str]]:
    shape = replace(shape_of(config, num_layers), **changes)
    drafter = Drafter.initialized(DrafterConfig.for_target(config, shape), 0)
    return drafter, start_from_target(drafter, build(config))


def test_a_lone_token_goes_through_the_layers_as_in_the_target() -> None:
    """It attends to itself alone, whatever queries and keys are: both add o_proj(v), then the MLP, then the norm."""
    target, (drafter, _) = build(PLAIN), started(PLAIN, 2)
    ids = tokens(3, 1)
    wanted, _ = target(ids)
    x = target.embed_tokens(ids)
    nothing = torch.zeros(3, 0, PLAIN.num_kv_heads, PLAIN.head_dim)
    seen = torch.ones(3, 1, 1, dtype=torch.bool)
    found = drafter(x, torch.zeros(3, 1, dtype=torch.long), [(nothing, nothing)] * 2, seen)
    torch.testing.assert_close(found, wanted)


def test_the_last_attention_layers_are_taken_without_their_gates() -> None:
    target, (drafter, taken) = build(HYBRID), started(HYBRID, 2)
    source, layer = target.layers[2], drafter.layers[1]
    x = torch.randn(5, HYBRID.hidden_size, generator=torch.Generator().manual_seed(1))
    q_with_gate = source.self_attn.q_proj(x).unflatten(-1, (HYBRID.num_heads, -1))
    torch.testing.assert_close(
        layer.self_attn.q_proj(x).unflatten(-1, (HYBRID.num_heads, -1)), q_with_gate[..., : HYBRID.head_dim]
    )
    heads = torch.randn(5, HYBRID.head_dim, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(layer.self_attn.k_norm(heads), source.self_attn.k_norm(heads))
    torch.testing.assert_close(drafter.norm(x), target.norm(x))
    assert not any(name.startswith("layers.0.") for name in taken)  # the target has one attention layer


def test_the_feature_is_about_the_last_tap() -> None:
    drafter, _ = started(PLAIN, 2)
    taps = [torch.randn(1, 50, PLAIN.hidden_size, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    feature = drafter.fc(torch.cat(taps, dim=-1))
    assert torch.nn.functional.cosine_similarity(feature, taps[-1], dim=-1).min() > 0.95


def test_what_does_not_fit_stays_random() -> None:
    drafter, taken = started(PLAIN, 2, intermediate_size=40)
    noise = Drafter.initialized(drafter.config, 0)
    assert not any("mlp" in name for name in taken)
    torch.testing.assert_close(drafter.layers[0].mlp.up_proj.weight, noise.layers[0].mlp.up_proj.weight)
    assert "layers.0.self_attn.v_proj.weight" in taken


def test_attention_of_other_heads_stays_random_though_its_matrices_have_the_size() -> None:
    """8 heads of 8 for 4 of 16: what was one pattern of attention would be two."""
    drafter, taken = started(PLAIN, 2, num_heads=8, num_kv_heads=4, head_dim=8)
    assert drafter.layers[0].self_attn.q_proj.weight.shape == build(PLAIN).layers[0].self_attn.q_proj.weight.shape
    assert not any("self_attn" in name for name in taken)
    assert "layers.0.mlp.up_proj.weight" in taken
