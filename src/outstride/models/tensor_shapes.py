"""The tensors of a decoder and their shapes, under the names of Llama checkpoints.

Parts that Llama does not have are named here: `attention_output_norm` and `mlp_output_norm` (norms
after attention and MLP), `self_attn.sinks`, `self_attn.gate_proj` (output gate), `per_layer_*`
(Gemma 4), `mlp.gate.bias` (router).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from outstride.models.recurrent_layers import recurrent_shapes
from outstride.ops.switches import Latent
from outstride.ops.weights import head_sizes

if TYPE_CHECKING:
    from outstride.models.config import DecoderConfig

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def tensor_shapes(config: DecoderConfig) -> Shapes:
    """Every tensor that the model needs, and its shape."""
    hidden, width = config.hidden_size, config.switches.per_layer_inputs
    result: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        result["lm_head.weight"] = (config.vocab_size, hidden)
    if width:
        packed = config.layers * width
        result["model.embed_tokens_per_layer.weight"] = (config.per_layer_vocab_size, packed)
        result["model.per_layer_model_projection.weight"] = (packed, hidden)
        result["model.per_layer_projection_norm.weight"] = (width,)
    for layer in range(config.layers):
        own = {**_norms(config), **_attention(config, layer), **_mlp(config, layer)}
        result.update({f"model.layers.{layer}.{name}": shape for name, shape in own.items()})
    return result


def _norms(config: DecoderConfig) -> Shapes:
    """The norms of a layer, and what a layer of Gemma 4 has at its end."""
    hidden, switches = config.hidden_size, config.switches
    result: Shapes = {}
    if switches.pre_norms:
        result["input_layernorm.weight"] = (hidden,)
        result["post_attention_layernorm.weight"] = (hidden,)
    if switches.post_norms:
        result["attention_output_norm.weight"] = (hidden,)
        result["mlp_output_norm.weight"] = (hidden,)
    if width := switches.per_layer_inputs:
        result["per_layer_input_gate.weight"] = (width, hidden)
        result["per_layer_projection.weight"] = (hidden, width)
        result["post_per_layer_input_norm.weight"] = (hidden,)
    if switches.layer_scales:
        result["layer_scalar"] = (1,)
    return result


def _latent_attention(config: DecoderConfig, latent: Latent) -> Shapes:
    hidden, heads, rank = config.hidden_size, config.heads, latent.rank
    queries = heads * (latent.nope_dim + latent.rope_dim)
    result: Shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (rank + latent.rope_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (heads * (latent.nope_dim + latent.value_dim), rank),
        "self_attn.o_proj.weight": (hidden, heads * latent.value_dim),
    }
    if latent.query_rank is None:
        result["self_attn.q_proj.weight"] = (queries, hidden)
    else:
        result["self_attn.q_a_proj.weight"] = (latent.query_rank, hidden)
        result["self_attn.q_a_layernorm.weight"] = (latent.query_rank,)
        result["self_attn.q_b_proj.weight"] = (queries, latent.query_rank)
    return result


def _attention(config: DecoderConfig, layer: int) -> Shapes:
    hidden, switches = config.hidden_size, config.switches
    if switches.recurrent is not None and switches.recurrent.layers[layer]:
        return recurrent_shapes(switches.recurrent, hidden)
    if switches.latent is not None:
        return _latent_attention(config, switches.latent)
    kv_heads, size = head_sizes(config, layer)
    wide, narrow = config.heads * size, kv_heads * size
    result: Shapes = {}
    parts = [("q", wide)]
    if own_kv := switches.kv_layers is None or switches.kv_layers[layer] == layer:
        parts.append(("k", narrow))
        if not config.keys_are_values(layer):
            parts.append(("v", narrow))
    if switches.attention_gate:
        parts.append(("gate", wide))
    for name, rows in parts:
        result[f"self_attn.{name}_proj.weight"] = (rows, hidden)
        if config.qkv_bias:
            result[f"self_attn.{name}_proj.bias"] = (rows,)
    result["self_attn.o_proj.weight"] = (hidden, wide)
    if config.output_bias:
        result["self_attn.o_proj.bias"] = (hidden,)
    if switches.sinks:
        result["self_attn.sinks"] = (config.heads,)
    if config.head_norms:
        sizes = (wide, narrow) if config.wide_norms else (size, size)
        result["self_attn.q_norm.weight"] = sizes[:1]
        if own_kv:
            result["self_attn.k_norm.weight"] = sizes[1:]
    return result


def _mlp(config: DecoderConfig, layer: int) -> Shapes:
    hidden, experts = config.hidden_size, config.experts
    parts, biased = {"mlp.": config.inner_size(layer)}, config.mlp_bias
    result: Shapes = {}
    if experts is not None and experts.layers[layer]:
        parts = {f"mlp.experts.{i}.": experts.size for i in range(experts.count)}
        biased = biased or experts.projection_bias
        if experts.shared:
            parts["mlp.shared_experts."] = experts.shared
        result["mlp.gate.weight"] = (experts.count, hidden)
        if experts.shared_gate:
            result["mlp.shared_expert_gate.weight"] = (1, hidden)
        if experts.bias:
            result["mlp.gate.expert_bias"] = (experts.count,)
        if experts.router_bias:
            result["mlp.gate.bias"] = (experts.count,)
    for part, inner in parts.items():
        for name, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        ):
            result[f"{part}{name}_proj.weight"] = shape
            if biased:
                result[f"{part}{name}_proj.bias"] = shape[:1]
    return result
