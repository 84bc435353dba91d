"""Weights in float32: allocation, checks, and the layers that a decoder takes from them.

A decoder multiplies queries, keys and values (and the two halves of its MLP) in one product. Loaders
write straight into the joined matrices, so that no second copy of any weight exists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from outstride.errors import CorruptModel
from outstride.models.config import DecoderConfig, described
from outstride.models.recurrent_layers import take_mixer
from outstride.ops.weights import (
    ExpertWeights,
    LatentWeights,
    LayerWeights,
    PerLayerWeights,
)

_JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
)


def expert_parts(config: DecoderConfig) -> tuple[list[str], list[str]]:
    """The matrices of a layer's experts in the order in which they are joined: gate and up; down."""
    each = range(config.experts.count if config.experts else 0)
    gate_up = [f"mlp.experts.{i}.{name}_proj" for i in each for name in ("gate", "up")]
    return gate_up, [f"mlp.experts.{i}.down_proj" for i in each]


def allocate(config: DecoderConfig) -> dict[str, torch.Tensor]:
    """Uninitialised tensors under Llama's names; those to be joined are adjacent in memory."""
    shapes = config.shapes()
    result: dict[str, torch.Tensor] = {}
    joint = (*_JOINED, *(parts for parts in expert_parts(config) if parts))
    for layer in range(config.layers):
        for group in joint:
            for kind in ("weight", "bias"):
                all_names = [f"model.layers.{layer}.{name}.{kind}" for name in group]
                names = [name for name in all_names if name in shapes]
                if names:
                    sizes = [shapes[name][0] for name in names]
                    whole = torch.empty(sum(sizes), *shapes[names[0]][1:])
                    result.update(zip(names, torch.split(whole, sizes), strict=True))
    for name, shape in shapes.items():
        if name not in result:
            result[name] = torch.empty(shape)
    return result


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors concatenated by rows: a view if they are adjacent in memory, else a copy.

    The result is float32 in torch's own memory. Kernels may take other paths for data that is
    aligned differently, and the same weights must give the same bits after every start.
    """
    first = parts[0]
    if len(parts) > 1:
        rows = sum(len(part) for part in parts)
        if _adjacent(parts):
            first = first.as_strided((rows, *first.shape[1:]), first.stride())
        else:
            first = torch.cat(list(parts))
    if first.dtype == torch.float32 and first.is_contiguous() and first.data_ptr() % 64 == 0:
        return first
    return torch.empty(first.shape).copy_(first)


def rotated_first(heads: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """Rows of query or key heads in the order that RoPE over whole heads needs.

    RoPE rotates the first half of a head against the second. Where it rotates only the first
    dimensions of a head, the others are distributed over the ends of both halves and get an angle of
    zero. Where a checkpoint is made for RoPE over neighbouring dimensions, even ones come first.
    Queries and keys are reordered alike, so their products do not change.
    """
    size, rotated = config.head_dim, config.rotary or config.head_dim
    if rotated == size and not config.interleaved_rope:
        return heads
    order = torch.arange(size)
    with_rope, without = order[:rotated].view(2, -1), order[rotated:].view(2, -1)
    if config.interleaved_rope:
        with_rope = order[:rotated].view(-1, 2).t()
    order = torch.cat([with_rope, without], dim=1).reshape(-1)
    return heads.view(-1, size, *heads.shape[1:])[:, order].reshape(heads.shape)


def _adjacent(parts: Sequence[torch.Tensor]) -> bool:
    first, end = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        if (
            part.data_ptr() != end
            or part.untyped_storage().data_ptr() != storage
            or part.dtype != torch.float32
            or not part.is_contiguous()
        ):
            return False
        end += part.numel() * part.element_size()
    return True


def check(config: DecoderConfig, tensors: dict[str, torch.Tensor]) -> None:
    """An error that names the first tensor that is missing, unknown or of another shape."""
    shapes = config.shapes()
    if missing := sorted(set(shapes) - set(tensors)):
        raise CorruptModel(f"the tensor {missing[0]!r} is missing{_more(missing)}")
    if unknown := sorted(set(tensors) - set(shapes)):
        raise CorruptModel(f"the tensor {unknown[0]!r} is not part of the model{_more(unknown)}")
    for name, shape in shapes.items():
        check_shape(name, tuple(tensors[name].shape), shape)


def check_finite(tensors: dict[str, torch.Tensor]) -> None:
    """An error that names the first tensor with NaN or infinity: such a model generates garbage.

    Minimum and maximum show both, and take one pass over the weights.
    """
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        low, high = torch.aminmax(tensor)
        if not (bool(low.isfinite()) and bool(high.isfinite())):
            raise CorruptModel(
                f"the tensor {name!r} holds NaN or infinity, so the model cannot generate text; "
                "get the file again, or convert it from sound weights"
            )


def check_shape(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    """An error that names the tensor if its shape is not the one that the model needs."""
    if tuple(found) != tuple(wanted):
        raise CorruptModel(f"the tensor {name!r} is {tuple(found)}, but should be {tuple(wanted)}")


def digest_of(config: DecoderConfig, tensors: dict[str, torch.Tensor]) -> str:
    """A digest of the weights: the XOR of all bits of each tensor, and a sample of it in order."""
    digest = hashlib.sha256(described(config).encode())
    for name in sorted(tensors):
        words = tensors[name].contiguous().view(-1).numpy().view(np.uint32)
        sample = words[:: max(1, len(words) // 1024)]
        digest.update(f"{name}{tuple(tensors[name].shape)}".encode())
        digest.update(np.bitwise_xor.reduce(words).tobytes())
        digest.update(np.ascontiguousarray(sample).tobytes())
    return digest.hexdigest()


def final_norm_factor(config: DecoderConfig) -> float:
    """The factor of the final norm that stands for the scale of the logits.

    With tied embeddings the LM head holds the scale of the embeddings, which the norm takes back.
    """
    return config.logit_scale / (config.embedding_scale if config.tied else 1.0)


def take_model(config: DecoderConfig, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Everything but the layers, as `ModelWeights` names it; the tensors are removed."""

    def take(name: str, factor: float = 1.0, offset: float = 0.0) -> torch.Tensor:
        found = joined([tensors.pop(name)])
        return found if (factor, offset) == (1.0, 0.0) else (found + offset) * factor

    result: dict[str, Any] = {
        "embedding": take("model.embed_tokens.weight", config.embedding_scale),
        "norm": take("model.norm.weight", final_norm_factor(config), config.norm_offset),
        "head": None if config.tied else take("lm_head.weight"),
    }
    if width := config.switches.per_layer_inputs:
        # Projection and embedding are added and divided by the square root of 2: both hold that factor.
        result["per_layer"] = PerLayerWeights(
            embedding=take("model.embed_tokens_per_layer.weight", (width / 2) ** 0.5),
            projection=take("model.per_layer_model_projection.weight", config.hidden_size**-0.5),
            norm=take("model.per_layer_projection_norm.weight", 2**-0.5),
        )
    return result


def take_layer(config: DecoderConfig, tensors: dict[str, torch.Tensor], index: int) -> LayerWeights:
    """The weights of a layer; its tensors are removed from the dictionary."""

    at, switches = f"model.layers.{index}.", config.switches

    def take(*names: str) -> torch.Tensor:
        return joined([tensors.pop(at + name) for name in names])

    def optional(present: bool, *names: str) -> torch.Tensor | None:
        return take(*names) if present else None

    def norm(name: str, present: bool) -> torch.Tensor | None:
        found = optional(present, name)
        return found + config.norm_offset if found is not None and config.norm_offset else found

    latent = _take_latent(config, tensors, index) if switches.latent is not None else None
    experts = config.experts if config.experts and config.experts.layers[index] else None
    mlp, present = ("mlp.shared_experts", experts.shared > 0) if experts else ("mlp", True)
    inner = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    nothing, per_layer = torch.empty(0), switches.per_layer_inputs > 0
    before = [
        norm(f"{name}_layernorm.weight", switches.pre_norms) for name in ("input", "post_attention")
    ]
    recurrent = switches.recurrent
    if recurrent is not None and recurrent.layers[index]:
        mixer = take_mixer(recurrent, take)
    else:
        mixer = _take_attention(config, tensors, at)
    return LayerWeights(
        attention_norm=nothing if before[0] is None else before[0],
        **mixer,
        mlp_norm=nothing if before[1] is None else before[1],
        gate_up=take(*(f"{name}.weight" for name in inner)) if present else torch.empty(0, 0),
        gate_up_bias=optional(config.mlp_bias, *(f"{name}.bias" for name in inner)),
        down=take(f"{mlp}.down_proj.weight") if present else torch.empty(0, 0),
        down_bias=optional(config.mlp_bias, f"{mlp}.down_proj.bias"),
        experts=_take_experts(config, tensors, index) if experts else None,
        clip=config.clip,
        attention_post_norm=norm("attention_output_norm.weight", switches.post_norms),
        mlp_post_norm=norm("mlp_output_norm.weight", switches.post_norms),
        sinks=optional(switches.sinks, "self_attn.sinks"),
        per_layer_gate=optional(per_layer, "per_layer_input_gate.weight"),
        per_layer_output=optional(per_layer, "per_layer_projection.weight"),
        per_layer_norm=norm("post_per_layer_input_norm.weight", per_layer),
        scale=float(take("layer_scalar")) if switches.layer_scales else 1.0,
        latent=latent,
    )


def _take_attention(
    config: DecoderConfig, tensors: dict[str, torch.Tensor], at: str
) -> dict[str, Any]:
    """Projections and head norms of attention, as fields of `LayerWeights`; the tensors are removed."""

    def heads(kind: str) -> torch.Tensor:
        names = [f"{at}self_attn.{name}_proj.{kind}" for name in ("q", "k", "v", "gate")]
        parts = [tensors.pop(name) for name in names if name in tensors]
        if len(parts) == 2:  # keys and values have one projection
            parts.append(parts[1])
        return joined([rotated_first(p, config) if i < 2 else p for i, p in enumerate(parts)])

    def head_norm(name: str) -> torch.Tensor | None:
        found = tensors.pop(f"{at}self_attn.{name}", None)
        if found is None:
            return None
        offset = config.norm_offset
        return joined([rotated_first(found + offset if offset else found, config)])

    biased, latent = config.output_bias, config.switches.latent is not None
    return {
        "qkv": torch.empty(0, 0) if latent else heads("weight"),
        "qkv_bias": heads("bias") if config.qkv_bias else None,
        "query_norm": head_norm("q_norm.weight"),
        "key_norm": head_norm("k_norm.weight"),
        "output": joined([tensors.pop(f"{at}self_attn.o_proj.weight")]),
        "output_bias": joined([tensors.pop(f"{at}self_attn.o_proj.bias")]) if biased else None,
    }


def _take_latent(
    config: DecoderConfig, tensors: dict[str, torch.Tensor], index: int
) -> LatentWeights:
    """The projections of latent attention; their tensors are removed from the dictionary."""
    latent = config.switches.latent
    assert latent is not None

    def take(name: str) -> torch.Tensor:
        return joined([tensors.pop(f"model.layers.{index}.self_attn.{name}.weight")])

    def reordered(rows: torch.Tensor) -> torch.Tensor:
        """[.., rope_dim, in]: even dimensions first, where RoPE is over neighbouring ones."""
        if not config.interleaved_rope:
            return rows
        return torch.cat([rows[..., 0::2, :], rows[..., 1::2, :]], dim=-2)

    low = latent.query_rank is not None
    queries = take("q_b_proj" if low else "q_proj")
    by_head = queries.view(config.heads, -1, queries.shape[1])
    split = [latent.nope_dim, latent.rope_dim]
    without, with_rope = by_head.split_with_sizes(split, dim=1)
    down = take("kv_a_proj_with_mqa")
    up = take("kv_b_proj").view(config.heads, -1, latent.rank)
    keys_up, values_up = up.split_with_sizes([latent.nope_dim, latent.value_dim], dim=1)
    return LatentWeights(
        queries=torch.cat([without, reordered(with_rope)], dim=1).reshape(queries.shape),
        query_down=take("q_a_proj") if low else None,
        query_norm=take("q_a_layernorm") if low else None,
        kv_down=torch.cat([down[: latent.rank], reordered(down[latent.rank :])]),
        kv_norm=take("kv_a_layernorm"),
        keys_up=keys_up.transpose(1, 2).contiguous(),
        values_up=values_up.contiguous(),
    )


def _take_experts(
    config: DecoderConfig, tensors: dict[str, torch.Tensor], index: int
) -> ExpertWeights:
    """The experts of a layer; their tensors are removed from the dictionary."""

    def take(*names: str) -> torch.Tensor:
        return joined([tensors.pop(f"model.layers.{index}.{name}") for name in names])

    experts = config.experts
    assert experts is not None
    inner, outer = expert_parts(config)
    size, hidden, biased = experts.size, config.hidden_size, experts.projection_bias
    return ExpertWeights(
        routing=experts.routing,
        router=take("mlp.gate.weight"),
        bias=take("mlp.gate.expert_bias") if experts.bias else None,
        gate_up=take(*(f"{name}.weight" for name in inner)).view(-1, 2 * size, hidden),
        down=take(*(f"{name}.weight" for name in outer)).view(-1, hidden, size),
        shared_gate=take("mlp.shared_expert_gate.weight")[0] if experts.shared_gate else None,
        router_bias=take("mlp.gate.bias") if experts.router_bias else None,
        gate_up_bias=take(*(f"{n}.bias" for n in inner)).view(-1, 2 * size) if biased else None,
        down_bias=take(*(f"{n}.bias" for n in outer)).view(-1, hidden) if biased else None,
        activation=config.switches.expert_activation,
    )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
