"""The final norm of a model, for embeddings: hidden states leave a pass before it."""

from __future__ import annotations

from typing import Any

import numpy as np

from outstride.core.contracts import Model
from outstride.core.graph import FloatArray


def normalized(model: Model, hidden: FloatArray) -> FloatArray:
    """Hidden states that left the layers, after the final norm; [rows, hidden_size].

    Raises UnsupportedModel where the backend does not return the weights of that norm. A model
    without operations of its own, such as the toy, has no such norm.
    """
    ops: Any = getattr(model, "ops", None)
    config: Any = getattr(model, "config", None)
    if ops is None or config is None:
        return hidden
    weight = ops.draft_heads.final_norm().float().cpu().numpy()
    squares = np.mean(np.square(hidden, dtype=np.float64), axis=-1, keepdims=True)
    found: FloatArray = (hidden / np.sqrt(squares + config.norm_eps) * weight).astype(np.float32)
    return found
