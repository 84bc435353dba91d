"""Float32 weights in memory as rows to be packed."""

from __future__ import annotations

import numpy as np

from outstride.ops.cpu.experts import EXPERT_MATRICES
from outstride.ops.matrix_rows import (
    DenseRows,
    LayerRows,
    ModelRows,
    alternating_rows,
    expert_rows,
)
from outstride.ops.weights import LayerWeights, ModelWeights

MATRICES = ("qkv", "output", "gate_up", "down")
VECTORS: tuple[str, ...] = ("attention_norm", "query_norm", "key_norm", "mlp_norm")
VECTORS += ("attention_post_norm", "mlp_post_norm", "sinks")  # of some families
"""Names of the matrices and vectors of a layer, besides those of experts."""


def dense_model(model: ModelWeights) -> ModelRows:
    """Float32 weights in memory; each layer is dropped once it is packed."""
    layers, count = model.layers, len(model.layers)
    optional = {name for layer in layers for name in dense_layer(layer).optional}
    return ModelRows(
        layers=(dense_layer(layers.pop(0)) for _ in range(count)),
        optional=optional,
        embedding=DenseRows(model.embedding.numpy()),
        norm=model.norm.numpy(),
        head=None if model.head is None else DenseRows(model.head.numpy()),
    )


def dense_layer(layer: LayerWeights) -> LayerRows:
    """One layer in memory, as it is packed."""
    order = alternating_rows(len(layer.gate_up) // 2)
    biases = {name: getattr(layer, f"{name}_bias") for name in MATRICES}
    found = {name: bias.numpy() for name, bias in biases.items() if bias is not None}
    if "gate_up" in found:
        found["gate_up"] = np.where(order < 0, np.float32(0), found["gate_up"][order])
    vectors = {name: getattr(layer, name) for name in VECTORS}
    matrices = {
        name: DenseRows(getattr(layer, name).numpy(), order if name == "gate_up" else None)
        for name in MATRICES
        if len(getattr(layer, name))
    }
    if (experts := layer.experts) is not None:
        count, hidden, inner = experts.down.shape
        orders = expert_rows(count, inner, hidden)
        weights = (experts.gate_up, experts.gate_up_bias), (experts.down, experts.down_bias)
        for name, (weight, bias), rows in zip(EXPERT_MATRICES, weights, orders, strict=True):
            matrices[name] = DenseRows(weight.reshape(-1, weight.shape[-1]).numpy(), rows)
            if bias is not None:
                found[name] = np.where(rows < 0, np.float32(0), bias.reshape(-1).numpy()[rows])
        vectors |= {
            "experts.router": experts.router,
            "experts.router_bias": experts.router_bias,
            "experts.bias": experts.bias,
            "experts.shared_gate": experts.shared_gate,
        }
    return LayerRows(
        matrices=matrices,
        vectors={name: vector.numpy() for name, vector in vectors.items() if vector is not None},
        biases=found,
    )
