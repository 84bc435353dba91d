"""Phi-3 and Phi-4: fused projections, LongRoPE, partial rotary embeddings."""

from __future__ import annotations

from outstride.models.families.family import Config, Family, Windows


def _config(config: Config) -> Config:
    scaling = dict(config.get("rope_scaling") or {})
    if scaling.get("type") in ("su", "yarn"):  # older names of LongRoPE in Phi-3's configs
        scaling["type"] = "longrope"
    return {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        **config,
        **({"rope_scaling": scaling} if scaling else {}),
    }


def _windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    size = config.get("sliding_window")
    return (None if size is None else int(size),) * layers


FAMILIES = {
    "phi3": Family(
        classes=("Phi3ForCausalLM",),
        common_config=_config,
        tensor_names={
            "self_attn.q_proj.": "self_attn.qkv_proj.",
            "self_attn.k_proj.": "self_attn.qkv_proj.",
            "self_attn.v_proj.": "self_attn.qkv_proj.",
            "mlp.gate_proj.": "mlp.gate_up_proj.",
            "mlp.up_proj.": "mlp.gate_up_proj.",
        },
        partial_rope=True,
        windows=_windows,
    ),
}
