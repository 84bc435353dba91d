"""GLM-4: interleaved RoPE over half of each head, fused gate and up, norms after attention and MLP."""

from __future__ import annotations

from outstride.models.families.family import Config, Family
from outstride.ops.switches import Switches


def _config(config: Config) -> Config:
    return {
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        **config,
        "qkv_bias": config.get("attention_bias", True),
        "attention_bias": False,
    }


def _post_norms(config: Config) -> Switches:
    del config
    return Switches(post_norms=True)


_FUSED = {"mlp.gate_proj.": "mlp.gate_up_proj.", "mlp.up_proj.": "mlp.gate_up_proj."}
FAMILIES = {
    "glm": Family(
        classes=("GlmForCausalLM",),
        common_config=_config,
        tensor_names=_FUSED,
        kv_heads=2,
        head_dim=128,
        partial_rope=True,
        interleaved_rope=True,
    ),
    "glm4": Family(
        classes=("Glm4ForCausalLM",),
        common_config=_config,
        tensor_names={
            **_FUSED,
            "attention_output_norm.": "post_self_attn_layernorm.",
            "mlp_output_norm.": "post_mlp_layernorm.",
        },
        kv_heads=2,
        head_dim=128,
        partial_rope=True,
        interleaved_rope=True,
        switches=_post_norms,
    ),
}
