"""Qwen2, Qwen2-MoE, Qwen3, Qwen3-MoE, and the text part of Qwen3-VL."""

from __future__ import annotations

from outstride.models import experts
from outstride.models.families.family import (
    TEXT_PREFIXES,
    VISION,
    Config,
    Family,
    Windows,
    head_norms_always,
    listed_windows,
    text_config,
    window_size,
)


def _qwen_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    if (size := window_size(config, 4096)) is None:
        return (None,) * layers
    sliding = listed_windows(config, layers)
    if sliding is None:
        first = int(config.get("max_window_layers", 28))
        sliding = [layer >= first for layer in range(layers)]
    return tuple(size if flag else None for flag in sliding)


def _qwen3_moe_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    return (window_size(config, 4096),) * layers


def _qwen2_moe_config(config: Config) -> Config:
    return {"qkv_bias": True, **config}


def _qwen2_moe_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    if (size := window_size(config, 4096)) is None:
        return (None,) * layers
    sliding = listed_windows(config, layers)
    if sliding is None:
        first = int(config.get("max_window_layers", 28))
        sliding = [layer % 2 == 0 and layer < first for layer in range(layers)]
    return tuple(size if flag else None for flag in sliding)


FAMILIES = {
    "qwen2": Family(classes=("Qwen2ForCausalLM",), qkv_bias=True, windows=_qwen_windows),
    "qwen2_moe": Family(
        classes=("Qwen2MoeForCausalLM",),
        common_config=_qwen2_moe_config,
        tensor_names={"mlp.shared_experts.": "mlp.shared_expert."},
        windows=_qwen2_moe_windows,
        experts=experts.qwen2_moe,
    ),
    "qwen3": Family(
        classes=("Qwen3ForCausalLM",),
        head_dim=128,
        attention_bias=True,
        head_norms=head_norms_always,
        windows=_qwen_windows,
    ),
    "qwen3_vl": Family(
        classes=("Qwen3VLForConditionalGeneration",),
        common_config=text_config,
        prefixes=TEXT_PREFIXES,
        skipped=VISION,
        head_dim=128,
        rope_theta=5e6,
        attention_bias=True,
        head_norms=head_norms_always,
    ),
    "qwen3_moe": Family(
        classes=("Qwen3MoeForCausalLM",),
        attention_bias=True,
        head_norms=head_norms_always,
        windows=_qwen3_moe_windows,
        experts=experts.qwen3_moe,
    ),
}
