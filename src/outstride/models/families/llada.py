"""LLaDA, LLaDA-MoE and LLaDA2: masked diffusion models."""

from __future__ import annotations

from outstride.errors import UnsupportedModel
from outstride.models import experts
from outstride.models.diffusion import Diffusion
from outstride.models.families.family import LAYER, Config, Family

_LLADA_ONLY = {
    "block_type": ("llama",),
    "block_group_size": (1,),
    "layer_norm_type": ("rms",),
    "activation_type": ("silu",),
    "rope": (True,),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "include_bias": (False,),
    "bias_for_layer_norm": (False, None),
}
"""Options of LLaDA's config, and the values that are supported: those of its published checkpoints."""
_LLADA_STATED = ("block_type", "layer_norm_type", "activation_type", "rope")
"""Options whose default in LLaDA's code is not supported, so that the config must state them."""


def _llada_config(config: Config) -> Config:
    for key, known in _LLADA_ONLY.items():
        value = config.get(key, None if key in _LLADA_STATED else known[0])
        if value not in known:
            raise UnsupportedModel(f"LLaDA with {key} {value!r} is not supported")
    heads = int(config["n_heads"])
    kv_heads = config.get("n_kv_heads")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query_attention") else heads
    inner = config.get("mlp_hidden_size")
    if inner is None:
        inner = int(config.get("mlp_ratio", 4)) * int(config["d_model"])
    return {
        "hidden_size": config["d_model"],
        "intermediate_size": inner,
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": config["max_sequence_length"],
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": config.get("rope_theta", 1e4),
        "tie_word_embeddings": config.get("weight_tying", True),
        "qkv_bias": bool(config.get("include_qkv_bias", False)),
        "mask_token_id": config.get("mask_token_id"),
    }


_LLADA_NAMES = {
    LAYER: "model.transformer.blocks.",
    "model.embed_tokens.": "model.transformer.wte.",
    "model.norm.": "model.transformer.ln_f.",
    "lm_head.": "model.transformer.ff_out.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ff_norm.",
    "self_attn.o_proj.": "attn_out.",
    "self_attn.": "",
    "mlp.gate_proj.": "ff_proj.",
    "mlp.up_proj.": "up_proj.",
    "mlp.down_proj.": "ff_out.",
}


def _lladamoe_config(config: Config) -> Config:
    dense = max(int(config.get("dense_intermediate_size") or 0), 0)
    return {"rms_norm_eps": 1e-5, **config, "intermediate_size": dense}


def _lladamoe_head_norms(config: Config) -> bool:
    return bool(config.get("qk_layernorm"))


def _llada2_config(config: Config) -> Config:
    if config.get("norm_head"):
        raise UnsupportedModel("LLaDA2 with norm_head is not supported")
    return {
        "rms_norm_eps": 1e-5,
        "intermediate_size": 0,
        "partial_rotary_factor": 0.5,
        **config,
        "qkv_bias": config.get("use_qkv_bias", False),
        "output_bias": config.get("use_bias", True),
    }


def _llada2_head_norms(config: Config) -> bool:
    return bool(config.get("use_qk_norm", True))


_LLADA2_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    "self_attn.q_proj.": "attention.query_key_value.",
    "self_attn.k_proj.": "attention.query_key_value.",
    "self_attn.v_proj.": "attention.query_key_value.",
    "self_attn.o_proj.": "attention.dense.",
    "self_attn.q_norm.": "attention.query_layernorm.",
    "self_attn.k_norm.": "attention.key_layernorm.",
}

FAMILIES = {
    "llada": Family(
        classes=("LLaDAModelLM",),
        common_config=_llada_config,
        tensor_names=_LLADA_NAMES,
        diffusion=Diffusion(),
    ),
    "lladamoe": Family(
        classes=("LLaDAMoEModel", "LLaDAMoEModelLM"),
        common_config=_lladamoe_config,
        tensor_names={
            "mlp.gate.expert_bias": "mlp.expert_bias",
            "mlp.shared_experts.": "shared_expert.",
        },
        attention_bias=True,
        clip_qkv=True,
        partial_rope=True,
        head_norms=_lladamoe_head_norms,
        experts=experts.lladamoe,
        diffusion=Diffusion(),
    ),
    "llada2_moe": Family(
        classes=("LLaDA2MoeModelLM",),
        common_config=_llada2_config,
        tensor_names=_LLADA2_NAMES,
        partial_rope=True,
        head_norms=_llada2_head_norms,
        experts=experts.llada2,
        diffusion=Diffusion(block=32),
    ),
}
