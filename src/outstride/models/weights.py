"""Where weights live: one place for matrices that share their input, filled in place by loaders.

A decoder multiplies queries, keys and values (and the two halves of its MLP) in one product. If
loaders write straight into the joined matrix, the model never exists twice, not even in part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outstride.errors import CorruptModel
from outstride.models.config import DecoderConfig

_JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
)


def expert_parts(config: DecoderConfig) -> tuple[list[str], list[str]]:
    """The matrices of a layer's experts in the order in which they are joined: in, and out."""
    each = range(config.experts.count if config.experts else 0)
    within = [f"mlp.experts.{i}.{name}_proj" for i in each for name in ("gate", "up")]
    return within, [f"mlp.experts.{i}.down_proj" for i in each]


def allocate(config: DecoderConfig) -> dict[str, torch.Tensor]:
    """Uninitialised tensors under their common names; those to be joined are neighbours."""
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
    """Tensors below each other: a view of what they share, or a copy.

    The result is float32 in torch's own memory. Kernels may take other paths for data that is
    aligned differently, and the same weights must give the same bits after every start.
    """
    first = parts[0]
    if len(parts) > 1:
        rows = sum(len(part) for part in parts)
        if _neighbours(parts):
            first = first.as_strided((rows, *first.shape[1:]), first.stride())
        else:
            first = torch.cat(list(parts))
    if first.dtype == torch.float32 and first.is_contiguous() and first.data_ptr() % 64 == 0:
        return first
    return torch.empty(first.shape).copy_(first)


def turned_first(heads: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """Rows of heads in an order in which the halves of each are turned against each other.

    Where only the first dimensions of a head are turned, the others are dealt to both halves, to
    rest there. Queries and keys are reordered alike, which no product of the two notices.
    """
    size, turned = config.head_dim, config.rotary
    if turned is None or turned == size:
        return heads
    order = torch.arange(size)
    moving, resting = order[:turned].view(2, -1), order[turned:].view(2, -1)
    order = torch.cat([moving, resting], dim=1).view(-1)
    return heads.view(-1, size, *heads.shape[1:])[:, order].reshape(heads.shape)


def _neighbours(parts: Sequence[torch.Tensor]) -> bool:
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
    """Every parameter filled, every tensor used, every shape right; or an error that names one."""
    shapes = config.shapes()
    if missing := sorted(set(shapes) - set(tensors)):
        raise CorruptModel(f"the tensor {missing[0]!r} is missing{_more(missing)}")
    if unknown := sorted(set(tensors) - set(shapes)):
        raise CorruptModel(f"the tensor {unknown[0]!r} has no place in the model{_more(unknown)}")
    for name, shape in shapes.items():
        check_shape(name, tuple(tensors[name].shape), shape)


def check_shape(name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    """An error that names the tensor if its shape is not the one that the model needs."""
    if tuple(found) != tuple(wanted):
        raise CorruptModel(f"the tensor {name!r} is {tuple(found)}, but should be {tuple(wanted)}")


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
