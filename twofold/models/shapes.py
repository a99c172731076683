"""Shapes of well-known models, for measurements with random weights."""

from twofold.models.config import FULL, LINEAR, ModelConfig
from twofold.models.drafter import DraftShape

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
