"""Dialects: families that name the parts of the same decoder in their own words.

Everything else here speaks the common one, that of Llama and Qwen checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from outstride.errors import UnsupportedModel

HEAD = "lm_head.weight"
_LAYER = "model.layers."


def common(config: Mapping[str, Any], architecture: str) -> Mapping[str, Any]:
    """The config of a checkpoint in common words."""
    if architecture == "llada":
        return _llada_config(config)
    if architecture == "olmoe":
        return {"rms_norm_eps": 1e-5, **config}
    if architecture == "lladamoe":
        dense = max(int(config.get("dense_intermediate_size") or 0), 0)
        return {"rms_norm_eps": 1e-5, **config, "intermediate_size": dense}
    if architecture == "llada2_moe":
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
    return config


def places(shapes: Iterable[str], architecture: str) -> dict[str, list[str]]:
    """Tensors of a checkpoint by their own names, and which of ours each holds, in order.

    A file may hold queries, keys and values as one matrix; then it has several places here.
    """
    result: dict[str, list[str]] = {}
    for name in shapes:
        result.setdefault(published(name, architecture), []).append(name)
    return result


def published(name: str, architecture: str) -> str:
    """The name that a family's checkpoints use for a tensor."""
    words = _WORDS.get(architecture)
    if words is None:
        return name
    layer, part = "", name
    if name.startswith(_LAYER):
        number, part = name.removeprefix(_LAYER).split(".", 1)
        layer = f"{words.get(_LAYER, _LAYER)}{number}."
    for ours, theirs in words.items():
        if part.startswith(ours):
            part = theirs + part.removeprefix(ours)
            break
    return layer + part


_WORDS = {
    "llada": {
        _LAYER: "model.transformer.blocks.",
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
    },
    "lladamoe": {
        "mlp.gate.expert_bias": "mlp.expert_bias",
        "mlp.shared_experts.": "shared_expert.",
    },
    "llada2_moe": {
        "model.embed_tokens.": "model.word_embeddings.",
        "self_attn.q_proj.": "attention.query_key_value.",
        "self_attn.k_proj.": "attention.query_key_value.",
        "self_attn.v_proj.": "attention.query_key_value.",
        "self_attn.o_proj.": "attention.dense.",
        "self_attn.q_norm.": "attention.query_layernorm.",
        "self_attn.k_norm.": "attention.key_layernorm.",
    },
}
"""How a family's names begin where ours begin otherwise; the first that fits counts."""


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
"""Switches of LLaDA's config that its published checkpoints set, and what they set them to."""
_LLADA_OFF = ("block_type", "layer_norm_type", "activation_type", "rope")
"""Those whose default in its code is another one, so that they must be stated."""


def _llada_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for key, known in _LLADA_ONLY.items():
        value = config.get(key, None if key in _LLADA_OFF else known[0])
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
