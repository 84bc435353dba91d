"""The tensors of recurrent layers: their names and shapes, and the weights that a backend takes.

Names are those of Qwen3.5, whatever the family; the channels of the convolution are queries, keys and
values in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from outstride.ops.recurrent import RecurrentKind, RecurrentShape, RecurrentWeights

if TYPE_CHECKING:
    import torch

MIXER = "linear_attn."


def projections(shape: RecurrentShape) -> dict[str, int]:
    """The input projections of a layer, in the order in which they are joined, and their rows."""
    if shape.kind is RecurrentKind.CONV:
        return {MIXER + "in_proj": 3 * shape.channels}
    found = {MIXER + "in_proj_qkv": shape.channels, MIXER + "in_proj_z": shape.inner}
    if shape.kind is RecurrentKind.DELTA:
        found[MIXER + "in_proj_b"] = shape.heads
    return {**found, MIXER + "in_proj_a": shape.heads}


def recurrent_shapes(shape: RecurrentShape, hidden: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a recurrent layer besides its norms and its MLP."""
    result: dict[str, tuple[int, ...]] = {
        MIXER + "conv1d.weight": (shape.channels, 1, shape.kernel),
        MIXER + "out_proj.weight": (hidden, shape.inner),
    }
    for name, rows in projections(shape).items():
        result[name + ".weight"] = (rows, hidden)
        if shape.bias:
            result[name + ".bias"] = (rows,)
    if shape.bias:
        result[MIXER + "out_proj.bias"] = (hidden,)
    if shape.conv_bias:
        result[MIXER + "conv1d.bias"] = (shape.channels,)
    if shape.heads:
        delta = shape.kind is RecurrentKind.DELTA
        result[MIXER + "A_log"] = result[MIXER + "dt_bias"] = (shape.heads,)
        result[MIXER + "norm.weight"] = (shape.value_dim if delta else shape.inner,)
        if not delta:
            result[MIXER + "D"] = (shape.heads,)
    return result


def take_mixer(shape: RecurrentShape, take: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """The mixer of a recurrent layer, as fields of `LayerWeights`.

    take: removes tensors of the layer by their names and returns them, joined by rows.
    """
    names, heads = list(projections(shape)), shape.heads > 0
    skip = shape.kind is RecurrentKind.SSM
    return {
        "qkv": take(*(name + ".weight" for name in names)),
        "qkv_bias": take(*(name + ".bias" for name in names)) if shape.bias else None,
        "query_norm": None,
        "key_norm": None,
        "output": take(MIXER + "out_proj.weight"),
        "output_bias": take(MIXER + "out_proj.bias") if shape.bias else None,
        "recurrent": RecurrentWeights(
            conv=take(MIXER + "conv1d.weight").view(shape.channels, shape.kernel),
            conv_bias=take(MIXER + "conv1d.bias") if shape.conv_bias else None,
            decay=take(MIXER + "A_log").exp().neg() if heads else None,
            step_bias=take(MIXER + "dt_bias") if heads else None,
            skip=take(MIXER + "D") if skip else None,
            norm=take(MIXER + "norm.weight") if heads else None,
        ),
    }
