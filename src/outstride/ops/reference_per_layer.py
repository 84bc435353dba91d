"""The embedding that each layer reads for itself (Gemma 4), in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outstride.ops.arithmetic import gelu_mul, linear, pad, rms_norm
from outstride.ops.contract import Span
from outstride.ops.weights import LayerWeights, ModelShape, PerLayerWeights


def per_layer_inputs(
    shape: ModelShape, weights: PerLayerWeights, spans: Sequence[Span], embedded: torch.Tensor
) -> torch.Tensor:
    """[rows, layers, width]: what each layer reads of each row, from its token and its embedding.

    embedded: [rows, hidden], whole tiles of rows.
    """
    tokens = np.concatenate([span.graph.tokens[span.first :] for span in spans])
    ids = torch.from_numpy(np.clip(tokens, 0, len(weights.embedding) - 1).astype(np.int64))
    size = len(embedded), shape.layers, -1
    context = linear(embedded, weights.projection).view(size).contiguous()
    context = rms_norm(context, weights.norm, shape.norm_eps)
    return context + pad(weights.embedding.index_select(0, ids)).view(size)


def per_layer_output(
    weights: LayerWeights, x: torch.Tensor, given: torch.Tensor, eps: float
) -> torch.Tensor:
    """What a layer adds to x [rows, hidden] because of its own input `given` [rows, width]."""
    assert weights.per_layer_gate is not None
    assert weights.per_layer_output is not None
    assert weights.per_layer_norm is not None
    gated = gelu_mul(linear(x, weights.per_layer_gate), given)
    product = linear(gated, weights.per_layer_output)
    return rms_norm(product, weights.per_layer_norm, eps)
