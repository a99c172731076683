"""Shapes of well-known models, for measurements with random weights."""

from dataclasses import dataclass, replace

from twofold.models.config import FULL, LINEAR, ModelConfig
from twofold.models.drafter_config import DraftShape
from twofold.quant.scheme import QuantScheme

QWEN3_5_4B = ModelConfig(
    vocab_size=248_320,
    hidden_size=2560,
    intermediate_size=9216,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL) * 8,
    num_heads=16,
    num_kv_heads=4,
    head_dim=256,
    rope_theta=1e7,
    rotary_dim=64,
    rms_norm_eps=1e-6,
    max_position_embeddings=262_144,
    tie_embeddings=True,
    norm_offset=1.0,
    qk_norm=True,
    output_gate=True,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_width=4,
    eos_token_ids=(248_044, 248_046),
)

# z-lab's drafter for it
QWEN3_5_4B_DRAFTER = DraftShape(mask_token_id=248_070, target_layer_ids=(1, 8, 15, 22, 29))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A target, the drafter for it, how both are quantized, and the window that the drafter gets."""

    target: ModelConfig
    drafter: DraftShape
    scheme: QuantScheme = QuantScheme(group_size=32)
    draft_scheme: QuantScheme = QuantScheme(group_size=128)
    window: int = 1024


SHAPES = {
    "qwen3.5-4b": Shape(target=QWEN3_5_4B, drafter=QWEN3_5_4B_DRAFTER),
    "tiny": Shape(
        target=replace(
            QWEN3_5_4B,
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            layer_types=(LINEAR, LINEAR, LINEAR, FULL),
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            rotary_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
        ),
        drafter=DraftShape(
            num_layers=2,
            intermediate_size=256,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            block_size=8,
            mask_token_id=3,
            target_layer_ids=(0, 2),
        ),
        window=32,
    ),
}


def find_shape(name: str) -> Shape:
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; shapes are: {', '.join(SHAPES)}")
    return SHAPES[name]
