"""Our models against transformers, in float32, to 1e-4 on the logits."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.models.tiny import VOCABULARY, perturb, tokens
from twofold.models.causal_lm import CausalLM
from twofold.models.config import ModelConfig
from twofold.ops.kernels import Kernels

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
LINEAR_SHAPE = {"linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_num_value_heads": 4}

FAMILIES: dict[str, tuple[type, PreTrainedConfig]] = {
    "hybrid-tied": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            **SHAPE,
            **LINEAR_SHAPE,
            num_hidden_layers=4,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=2,
            tie_word_embeddings=True,
        ),
    ),
    "hybrid-untied": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig(
            **SHAPE,
            **LINEAR_SHAPE,
            num_hidden_layers=3,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            num_key_value_heads=1,
            head_dim=48,
            linear_num_key_heads=4,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5},
        ),
    ),
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, num_hidden_layers=3, num_key_value_heads=2)),
    "llama-bias": (
        LlamaForCausalLM,
        LlamaConfig(
            **SHAPE,
            num_hidden_layers=2,
            num_key_value_heads=4,
            head_dim=24,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**SHAPE, num_hidden_layers=3, num_key_value_heads=1, head_dim=32, tie_word_embeddings=True),
    ),
}
KERNELS = {"reference": Kernels.reference(), "cpu": Kernels.cpu()}


@dataclass
class Expected:
    model: PreTrainedModel
    token_ids: Tensor
    logits: Tensor
    hidden_states: tuple[Tensor, ...]


@cache
def expected(family: str) -> Expected:
    torch.manual_seed(1)
    architecture, config = FAMILIES[family]
    model = architecture(config).eval().float()
    perturb(model)
    token_ids = tokens(2, 100)
    with torch.no_grad():
        result = model(token_ids, output_hidden_states=True)
    return Expected(model, token_ids, result.logits, result.hidden_states)


def ours(family: str, kernels: str) -> CausalLM:
    model = expected(family).model
    twin = CausalLM(ModelConfig.from_hf(model.config.to_dict()), KERNELS[kernels])
    twin.load_state_dict({name.removeprefix("model."): x for name, x in model.state_dict().items()})
    return twin.freeze()


def largest(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_whole_rows(family: str, kernels: str) -> None:
    reference, model = expected(family), ours(family, kernels)
    assert reference.logits.std() >= 1
    hidden, taps = model(reference.token_ids, taps=(0, model.config.num_layers - 2))
    assert largest(model.logits(hidden), reference.logits) <= 1e-4
    # hidden_states[0] is the embedding, so a tap of layer i is entry i + 1
    assert largest(taps[0], reference.hidden_states[1]) <= 1e-4
    assert largest(taps[1], reference.hidden_states[-2]) <= 1e-4
    assert largest(hidden, reference.hidden_states[-1]) <= 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [[1] * 40, [33, 1, 16, 2, 48]], ids=["token by token", "uneven chunks"])
def test_logits_with_a_state(family: str, kernels: str, sizes: list[int]) -> None:
    reference, model = expected(family), ours(family, kernels)
    state = model.new_state(2, sum(sizes))
    start = 0
    for size in sizes:
        hidden, _ = model(reference.token_ids[:, start : start + size], state=state)
        state.commit(size)
        assert largest(model.logits(hidden), reference.logits[:, start : start + size]) <= 1e-4
        start += size
    assert state.lengths_B.tolist() == [start, start]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_comparison_would_notice_a_mistake(family: str) -> None:
    """Swapping the halves of one head's queries, or dropping one norm's weight, moves logits by over 1e-2."""
    reference, model = expected(family), ours(family, "reference")
    attention = next(layer.self_attn for layer in model.layers if hasattr(layer, "self_attn"))
    head_dim = model.config.head_dim
    weight = attention.q_proj.weight.data[:head_dim]
    attention.q_proj.weight.data[:head_dim] = weight.roll(head_dim // 2, dims=0)
    model.freeze()
    hidden, _ = model(reference.token_ids)
    assert largest(model.logits(hidden), reference.logits) > 1e-2

    model = ours(family, "reference")
    model.layers[0].input_layernorm.offset = 1 - model.layers[0].input_layernorm.offset
    model.freeze()
    hidden, _ = model(reference.token_ids)
    assert largest(model.logits(hidden), reference.logits) > 1e-2


@pytest.mark.parametrize("family", ["hybrid-tied", "llama-bias"])
def test_gradients(family: str) -> None:
    reference = expected(family)
    twin = CausalLM(ModelConfig.from_hf(reference.model.config.to_dict()))
    twin.load_state_dict(ours(family, "reference").state_dict())
    token_ids = reference.token_ids[:1, :20]
    logits = twin.logits(twin(token_ids)[0])
    torch.nn.functional.cross_entropy(logits[0, :-1], token_ids[0, 1:]).backward()
    reference.model.zero_grad()
    reference.model(token_ids, labels=token_ids).loss.backward()
    theirs = {name.removeprefix("model."): p.grad for name, p in reference.model.named_parameters()}
    own = {name: p.grad for name, p in twin.named_parameters()}
    assert own.keys() == theirs.keys()
    for name, gradient in own.items():
        assert gradient is not None, name
        assert largest(gradient, theirs[name]) <= 1e-4 * max(1.0, float(theirs[name].abs().max())), name
