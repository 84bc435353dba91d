"""DeepSeek-V2 and V3, and GLM-4.7-Flash: latent attention (MLA) and experts."""

from __future__ import annotations

import math

from outstride.models import experts
from outstride.models.families.family import Config, Family
from outstride.ops.switches import Latent, Switches

_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def _config(config: Config) -> Config:
    """Attention is over one KV head: a latent row and the rotated part of the key."""
    text = {**_DEFAULTS, **config}
    size = int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"])
    return {**text, "num_key_value_heads": 1, "head_dim": size}


def _switches(config: Config) -> Switches:
    latent = Latent(
        rank=int(config["kv_lora_rank"]),
        rope_dim=int(config["qk_rope_head_dim"]),
        nope_dim=int(config["qk_nope_head_dim"]),
        value_dim=int(config["v_head_dim"]),
        query_rank=None if config["q_lora_rank"] is None else int(config["q_lora_rank"]),
    )
    scale = float(latent.nope_dim + latent.rope_dim) ** -0.5
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default" and rope.get("mscale_all_dim") and float(rope["factor"]) > 1:
        scale *= (0.1 * float(rope["mscale_all_dim"]) * math.log(float(rope["factor"])) + 1) ** 2
    return Switches(attention_scale=scale, latent=latent)


def _family(name: str, *, bias: bool) -> Family:
    return Family(
        classes=(name,),
        common_config=_config,
        tensor_names={"mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias"} if bias else {},
        experts=experts.deepseek,
        switches=_switches,
        interleaved_rope=True,
        extra_layers=True,
    )


FAMILIES = {
    "deepseek_v2": _family("DeepseekV2ForCausalLM", bias=False),
    "deepseek_v3": _family("DeepseekV3ForCausalLM", bias=True),
    "glm4_moe_lite": _family("Glm4MoeLiteForCausalLM", bias=True),
}
