"""Trained parts in the native format."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from outstride.core.graph import FloatArray, IntArray
from outstride.errors import UnsupportedModel
from outstride.ops.contract import GraftWeights, Shape
from outstride.ops.cpu import native
from outstride.ops.cpu.following import fitted
from outstride.ops.cpu.packed import Packed, rounded
from outstride.ops.cpu.weights import (
    Layer,
    Weights,
    into_large_pages,
    matrices_of,
    pack_layer,
    padded,
)


@dataclass(slots=True)
class Grafted:
    """A trained part: what makes its entries, its layers, and its part of the vocabulary."""

    taps: tuple[int, ...]
    first: int
    """The number of its first layer."""
    depth: int
    """The width of the states side by side."""
    scale: FloatArray
    mix: Packed
    mixed: FloatArray
    layers: list[Layer]
    norm: FloatArray
    head: Packed
    vocabulary: IntArray
    calls: list[native.Layer] = field(default_factory=list)
    """What tells the kernels how its layers make entries from the model's states."""

    @classmethod
    def pack(cls, weights: GraftWeights, shape: Shape, first: int, own: Weights) -> Grafted:
        """From float32, beside a model's own weights."""
        width = rounded(shape.hidden_size, 32)
        depth = rounded(len(weights.taps) * shape.hidden_size, 32)
        if weights.scale is None or weights.mix is None or weights.norm is None:
            raise UnsupportedModel("this trained part runs with --weights fp32")
        if weights.frequencies is not None:
            raise UnsupportedModel(
                "the heads of this part turn otherwise than the model's: it runs with --weights fp32"
            )
        if weights.head is not None:
            head = Packed.of(weights.head.numpy(), None, width)
        elif len(weights.vocabulary) == shape.vocab_size:
            head = own.vocabulary
        else:
            rows = own.vocabulary.rows(weights.vocabulary, shape.hidden_size)
            head = Packed.of(rows, None, width)
        mix = Packed.of(weights.mix.numpy(), None, depth)
        layers = [pack_layer(shape, fitted(layer, shape), 8) for layer in weights.layers]
        into_large_pages([mix, *matrices_of(layers), *([head] * (head is not own.vocabulary))])
        return cls(
            weights.taps,
            first,
            depth,
            padded(weights.scale, depth),
            mix,
            padded(weights.mixed, width),
            layers,
            padded(weights.norm, width),
            head,
            np.asarray(weights.vocabulary, dtype=np.int64),
        )
