"""Mistral, Ministral, Mistral 3 and Mixtral."""

from __future__ import annotations

from typing import Any

from outstride.models import experts
from outstride.models.families.family import (
    TEXT_PREFIXES,
    VISION,
    Config,
    Family,
    Windows,
    listed_windows,
    text_config,
)
from outstride.ops.switches import QueryGrowth, Switches

_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What the code of Ministral 3 has by default."""


def _mistral_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    size = config.get("sliding_window", 4096)
    sliding = listed_windows(config, layers) or [True] * layers
    return tuple(int(size) if flag and size is not None else None for flag in sliding)


def _mistral3_config(config: Config) -> Config:
    text: dict[str, Any] = {
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_key_value_heads": 8,
        **text_config(config),
    }
    kind = text.get("model_type")
    if kind == "ministral3" and not (text.get("rope_parameters") or text.get("rope_scaling")):
        text["rope_parameters"] = _MINISTRAL3_ROPE
    return text


def _mistral3_switches(config: Config) -> Switches:
    values = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    beta = values.get("llama_4_scaling_beta")
    if beta is None:
        return Switches()
    return Switches(
        query_growth=QueryGrowth(float(beta), int(values["original_max_position_embeddings"]))
    )


def _mixtral_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    return _mistral_windows({"sliding_window": None, **config}, layers, rope_layers)


def _mixtral_config(config: Config) -> Config:
    return {"rms_norm_eps": 1e-5, **config}


FAMILIES = {
    "mistral": Family(classes=("MistralForCausalLM",), kv_heads=8, windows=_mistral_windows),
    "ministral": Family(classes=("MinistralForCausalLM",), kv_heads=8, windows=_mistral_windows),
    "mistral3": Family(
        classes=("Mistral3ForConditionalGeneration", "Ministral3ForCausalLM"),
        common_config=_mistral3_config,
        prefixes=TEXT_PREFIXES,
        skipped=VISION,
        head_dim=128,
        windows=_mistral_windows,
        switches=_mistral3_switches,
    ),
    "mixtral": Family(
        classes=("MixtralForCausalLM",),
        common_config=_mixtral_config,
        tensor_names={"mlp.": "block_sparse_moe."},
        expert_names={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        kv_heads=8,
        rope_theta=1e6,
        windows=_mixtral_windows,
        experts=experts.mixtral,
    ),
}
