"""Gemma 2 and Gemma 3: norms with 1 + w on both sides, GELU, scaled embeddings, soft caps, windows."""

from __future__ import annotations

from outstride.models.families.family import (
    TEXT_PREFIXES,
    VISION,
    Config,
    Family,
    Windows,
    head_norms_always,
    listed_windows,
    local_rope,
    text_config,
    two_ropes,
)
from outstride.ops.switches import Switches

NAMES = {
    "attention_output_norm.": "post_attention_layernorm.",
    "post_attention_layernorm.": "pre_feedforward_layernorm.",
    "mlp_output_norm.": "post_feedforward_layernorm.",
}


def gemma_config(config: Config) -> Config:
    """What all versions have in common. Those with vision have the text part in `text_config`."""
    text = text_config(config)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        **text,
        "embedding_scale": float(text["hidden_size"]) ** 0.5,
    }


def softcap(config: Config, key: str, default: float | None) -> float | None:
    """A soft cap of the config; null switches it off."""
    value = config.get(key, default)
    return None if value is None else float(value)


def _gemma2_switches(config: Config) -> Switches:
    return Switches(
        attention_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        attention_softcap=softcap(config, "attn_logit_softcapping", 50.0),
        logit_softcap=softcap(config, "final_logit_softcapping", 30.0),
        post_norms=True,
    )


def _gemma2_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    return _windows(config, layers, 2)


def _windows(config: Config, layers: int, every: int) -> Windows:
    """By default each layer has a window, except for every second or sixth one."""
    size = int(config.get("sliding_window") or 4096)
    sliding = listed_windows(config, layers)
    if sliding is None:
        sliding = [(layer + 1) % every != 0 for layer in range(layers)]
    return tuple(size if flag else None for flag in sliding)


# --- Gemma 3: two RoPE bases ----------------------------------------------------------------------


def _gemma3_config(config: Config) -> Config:
    text = {"max_position_embeddings": 131072, "vocab_size": 262208, **text_config(config)}
    return two_ropes(gemma_config(text), {"rope_theta": text.get("rope_local_base_freq", 1e4)})


def _gemma3_switches(config: Config) -> Switches:
    return Switches(
        attention_scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
        post_norms=True,
        local_rope=local_rope(config, int(config.get("head_dim") or 256), 1e4),
        attention_softcap=softcap(config, "attn_logit_softcapping", None),
        logit_softcap=softcap(config, "final_logit_softcapping", None),
    )


def _gemma3_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    return _windows(config, layers, int(config.get("sliding_window_pattern") or 6))


FAMILIES = {
    "gemma2": Family(
        classes=("Gemma2ForCausalLM",),
        common_config=gemma_config,
        tensor_names=NAMES,
        kv_heads=4,
        head_dim=256,
        tied=True,
        attention_bias=True,
        norm_offset=1.0,
        windows=_gemma2_windows,
        switches=_gemma2_switches,
    ),
    "gemma3_text": Family(
        classes=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        common_config=_gemma3_config,
        tensor_names=NAMES,
        prefixes=TEXT_PREFIXES,
        skipped=VISION,
        kv_heads=4,
        head_dim=256,
        rope_theta=1e6,
        tied=True,
        attention_bias=True,
        norm_offset=1.0,
        head_norms=head_norms_always,
        windows=_gemma3_windows,
        switches=_gemma3_switches,
    ),
}
