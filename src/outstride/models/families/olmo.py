"""OLMo 2, OLMo 3 and OLMoE."""

from __future__ import annotations

from outstride.models import experts
from outstride.models.families.family import (
    Config,
    Family,
    Windows,
    head_norms_always,
    listed_windows,
    local_rope,
    two_ropes,
)
from outstride.ops.switches import Switches

_THETA = 5e5
_NAMES = {
    "attention_output_norm.": "post_attention_layernorm.",
    "mlp_output_norm.": "post_feedforward_layernorm.",
}


def _olmo_config(config: Config) -> Config:
    return {"rms_norm_eps": 1e-5, **config}


def _olmo2_switches(config: Config) -> Switches:
    del config
    return Switches(pre_norms=False, post_norms=True)


def _olmo3_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    size = config.get("sliding_window", 4096)
    sliding = listed_windows(config, layers)
    if sliding is None:
        sliding = [(layer + 1) % 4 != 0 for layer in range(layers)]
    return tuple(int(size) if flag and size is not None else None for flag in sliding)


def _olmo3_config(config: Config) -> Config:
    """Where the config has one RoPE, its scaling is for layers without a window alone."""
    local = {"rope_theta": config.get("rope_theta") or _THETA}
    return two_ropes(_olmo_config(config), local)


def _olmo3_switches(config: Config) -> Switches:
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Switches(
        pre_norms=False, post_norms=True, local_rope=local_rope(config, int(size), _THETA)
    )


FAMILIES = {
    "olmo2": Family(
        classes=("Olmo2ForCausalLM",),
        common_config=_olmo_config,
        tensor_names=_NAMES,
        rope_theta=_THETA,
        attention_bias=True,
        head_norms=head_norms_always,
        wide_norms=True,
        switches=_olmo2_switches,
    ),
    "olmo3": Family(
        classes=("Olmo3ForCausalLM",),
        common_config=_olmo3_config,
        tensor_names=_NAMES,
        rope_theta=_THETA,
        attention_bias=True,
        head_norms=head_norms_always,
        wide_norms=True,
        windows=_olmo3_windows,
        switches=_olmo3_switches,
    ),
    "olmoe": Family(
        classes=("OlmoeForCausalLM",),
        common_config=_olmo_config,
        attention_bias=True,
        clip_qkv=True,
        head_norms=head_norms_always,
        wide_norms=True,
        experts=experts.olmoe,
    ),
}
