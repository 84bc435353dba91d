"""Gemma 4, text: shared KV, an embedding per layer, heads of two sizes."""

from __future__ import annotations

from outstride.errors import UnsupportedModel
from outstride.models.families.family import (
    TEXT_PREFIXES,
    VISION,
    Config,
    Family,
    Windows,
    head_norms_always,
    local_rope,
    two_ropes,
)
from outstride.models.families.gemma import NAMES, gemma_config, softcap
from outstride.ops.switches import FullAttention, Switches

_FULL_ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
_EVERY = 6


def _config(config: Config) -> Config:
    text = {"max_position_embeddings": 131072, **gemma_config(config)}
    if text.get("enable_moe_block"):
        raise UnsupportedModel("Gemma 4 with a mixture of experts is not supported")
    text["hidden_size_per_layer_input"] = text.get("hidden_size_per_layer_input", 256)
    layers = int(text["num_hidden_layers"])
    kinds = text.get("layer_types") or [
        "full_attention" if (layer + 1) % _EVERY == 0 else "sliding_attention"
        for layer in range(layers)
    ]
    text["layer_types"] = [*kinds[: layers - 1], "full_attention"]
    text["rope_parameters"] = text.get("rope_parameters") or {"full_attention": _FULL_ROPE}
    return two_ropes(text, {"rope_theta": 1e4})


def _windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    size = int(config.get("sliding_window") or 512)
    kinds = config["layer_types"][:layers]
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def _full_attention(config: Config) -> FullAttention:
    """The sizes of heads in layers without a window."""
    last = str(int(config["num_hidden_layers"]) - 1)
    stated = (config.get("per_layer_config") or {}).get(last) or {
        "head_dim": config.get("global_head_dim") or 512,
        "num_key_value_heads": config.get("num_global_key_value_heads")
        if config.get("attention_k_eq_v")
        else None,
    }
    kv_heads = stated.get("num_key_value_heads") or config.get("num_key_value_heads") or 4
    return FullAttention(int(stated.get("head_dim") or config["head_dim"]), int(kv_heads))


def _kv_layers(config: Config) -> tuple[int, ...] | None:
    """The last layers read the KV of the last layer before them of the same kind."""
    kinds, shared = config["layer_types"], int(config.get("num_kv_shared_layers") or 0)
    if not shared:
        return None
    first = len(kinds) - shared
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))


def _switches(config: Config) -> Switches:
    return Switches(
        attention_scale=1.0,
        logit_softcap=softcap(config, "final_logit_softcapping", None),
        post_norms=True,
        local_rope=local_rope(config, int(config.get("head_dim") or 256), 1e4),
        value_norms=True,
        full_attention=_full_attention(config),
        kv_layers=_kv_layers(config),
        per_layer_inputs=int(config["hidden_size_per_layer_input"] or 0),
        layer_scales=True,
    )


FAMILIES = {
    "gemma4_text": Family(
        classes=("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
        common_config=_config,
        tensor_names=NAMES,
        prefixes=TEXT_PREFIXES,
        skipped=VISION,
        optional=(
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
            "self_attn.k_norm.weight",
        ),
        kv_heads=4,
        head_dim=256,
        tied=True,
        attention_bias=True,
        head_norms=head_norms_always,
        windows=_windows,
        switches=_switches,
    ),
}
