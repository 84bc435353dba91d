"""Weights in float32: allocation, checks, and the layers that a decoder takes from them.

A decoder multiplies queries, keys and values (and the two halves of its MLP) in one product. Loaders
write straight into the joined matrices, so that no second copy of any weight exists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from outstride.errors import CorruptModel
from outstride.models.config import DecoderConfig
from outstride.ops.weights import ExpertWeights, LayerWeights

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
                names = [f"model.layers.{layer}.{name}.{kind}" for name in group]
                if names[0] in shapes:
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
    zero. Queries and keys are reordered alike, so their products do not change.
    """
    size, rotated = config.head_dim, config.rotary
    if rotated is None or rotated == size:
        return heads
    order = torch.arange(size)
    with_rope, without = order[:rotated].view(2, -1), order[rotated:].view(2, -1)
    order = torch.cat([with_rope, without], dim=1).view(-1)
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
    digest = hashlib.sha256(repr(config).encode())
    for name in sorted(tensors):
        words = tensors[name].contiguous().view(-1).numpy().view(np.uint32)
        sample = words[:: max(1, len(words) // 1024)]
        digest.update(f"{name}{tuple(tensors[name].shape)}".encode())
        digest.update(np.bitwise_xor.reduce(words).tobytes())
        digest.update(np.ascontiguousarray(sample).tobytes())
    return digest.hexdigest()


def take_layer(config: DecoderConfig, tensors: dict[str, torch.Tensor], index: int) -> LayerWeights:
    """The weights of a layer; its tensors are removed from the dictionary."""

    at = f"model.layers.{index}."

    def take(*names: str) -> torch.Tensor:
        return joined([tensors.pop(at + name) for name in names])

    def optional(present: bool, *names: str) -> torch.Tensor | None:
        return take(*names) if present else None

    def heads(kind: str) -> torch.Tensor:
        q, k, v = (tensors.pop(f"{at}self_attn.{name}_proj.{kind}") for name in "qkv")
        return joined([*(rotated_first(part, config) for part in (q, k)), v])

    def norm(name: str) -> torch.Tensor | None:
        if not config.head_norms:
            return None
        return joined([rotated_first(tensors.pop(f"{at}self_attn.{name}"), config)])

    experts = config.experts if config.experts and config.experts.layers[index] else None
    mlp, present = ("mlp.shared_experts", experts.shared > 0) if experts else ("mlp", True)
    inner = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    return LayerWeights(
        attention_norm=take("input_layernorm.weight"),
        qkv=heads("weight"),
        qkv_bias=heads("bias") if config.qkv_bias else None,
        query_norm=norm("q_norm.weight"),
        key_norm=norm("k_norm.weight"),
        output=take("self_attn.o_proj.weight"),
        output_bias=optional(config.output_bias, "self_attn.o_proj.bias"),
        mlp_norm=take("post_attention_layernorm.weight"),
        gate_up=take(*(f"{name}.weight" for name in inner)) if present else torch.empty(0, 0),
        gate_up_bias=optional(config.mlp_bias, *(f"{name}.bias" for name in inner)),
        down=take(f"{mlp}.down_proj.weight") if present else torch.empty(0, 0),
        down_bias=optional(config.mlp_bias, f"{mlp}.down_proj.bias"),
        experts=_take_experts(config, tensors, index) if experts else None,
        clip=config.clip,
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
    size, hidden = experts.size, config.hidden_size
    return ExpertWeights(
        routing=experts.routing,
        router=take("mlp.gate.weight"),
        bias=take("mlp.gate.expert_bias") if experts.bias else None,
        gate_up=take(*(f"{name}.weight" for name in inner)).view(-1, 2 * size, hidden),
        down=take(*(f"{name}.weight" for name in outer)).view(-1, hidden, size),
    )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
