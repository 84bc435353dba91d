"""Block drafters in the native format, and what all draft heads with layers share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.ops.cpu.int8 import Int8Matrix, rounded
from outstride.ops.cpu.runtime import ExtraLayers, Runtime
from outstride.ops.cpu.weights import (
    PackedLayerWeights,
    into_huge_pages,
    matrices_of,
    pack_layer,
    padded,
)
from outstride.ops.weights import BlockDrafterWeights, EagleWeights, LayerWeights, ModelShape


def too_wide(layer: LayerWeights, shape: ModelShape) -> str | None:
    """Why the layer of a draft head does not fit into the buffers of the model; None if it does."""
    width = layer.down.shape[1]
    if width <= shape.intermediate_size:
        return None
    return f"its MLP is {width} wide, more than the model's {shape.intermediate_size}"


def with_padded_mlp(layer: LayerWeights, shape: ModelShape) -> LayerWeights:
    """The layer with an MLP as wide as the model's; the additional channels are zero."""
    lacking = shape.intermediate_size - layer.down.shape[1]
    if not lacking:
        return layer
    none = torch.zeros(lacking, layer.gate_up.shape[1])
    gate, up = layer.gate_up.chunk(2)
    return replace(
        layer,
        gate_up=torch.cat([gate, none, up, none]),
        down=torch.cat([layer.down, none.new_zeros(len(layer.down), lacking)], dim=1),
    )


def pack_lm_head(weights: BlockDrafterWeights | EagleWeights, runtime: Runtime) -> Int8Matrix:
    """[tokens, hidden]: the draft head's own LM head, or rows of the model's."""
    size, own = runtime.shape.hidden_size, runtime.weights.vocabulary
    if weights.lm_head is not None:
        return Int8Matrix.of(weights.lm_head.numpy(), None, rounded(size, 32))
    if len(weights.vocabulary) == runtime.shape.vocab_size:
        return own
    return Int8Matrix.of(own.rows(weights.vocabulary, size), None, rounded(size, 32))


@dataclass(slots=True)
class PackedBlockDrafter:
    """A block drafter; its layers are part of the runtime once it is attached."""

    aux_layers: tuple[int, ...]
    depth: int
    """The width of the concatenated hidden states of the auxiliary layers, padded."""
    aux_norm: FloatArray
    """[depth]"""
    fusion: Int8Matrix
    """[hidden, depth]"""
    layers: list[PackedLayerWeights]
    window: int | None
    kv_norm: FloatArray
    """[width]"""
    norm: FloatArray
    """[width]"""
    lm_head: Int8Matrix
    vocabulary: IntArray
    """[tokens]"""
    extra: ExtraLayers = field(init=False)

    @classmethod
    def pack(cls, weights: BlockDrafterWeights, runtime: Runtime) -> PackedBlockDrafter:
        """From float32."""
        shape, width = runtime.shape, runtime.width
        depth = rounded(len(weights.aux_layers) * shape.hidden_size, 32)
        lm_head = pack_lm_head(weights, runtime)
        fusion = Int8Matrix.of(weights.fusion.numpy(), None, depth)
        layers = [pack_layer(shape, with_padded_mlp(layer, shape), 8) for layer in weights.layers]
        shared = lm_head is runtime.weights.vocabulary
        into_huge_pages([fusion, *matrices_of(layers), *([] if shared else [lm_head])])
        return cls(
            aux_layers=weights.aux_layers,
            depth=depth,
            aux_norm=padded(weights.aux_norm, depth),
            fusion=fusion,
            layers=layers,
            window=weights.window,
            kv_norm=padded(weights.fusion_norm, width),
            norm=padded(weights.norm, width),
            lm_head=lm_head,
            vocabulary=np.asarray(weights.vocabulary, dtype=np.int64),
        )

    def attach(self, runtime: Runtime) -> None:
        """Adds the layers to the runtime, which stores the hidden states that they read from now on."""
        runtime.store_layers(self.aux_layers)
        self.extra = runtime.add_layers(self.layers, self.window, self.depth, self.kv_norm)
