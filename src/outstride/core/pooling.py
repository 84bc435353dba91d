"""`PooledStates`: one vector for a prompt, from the last hidden states of its tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray, IntArray

POOLINGS = ("mean", "last")


class PooledStates:
    """Collects hidden states in the order of positions, in however many passes they come.

    Rows are added one by one, so the result does not depend on how the prompt was cut into chunks.
    """

    def __init__(self, pooling: str, prompt_length: int) -> None:
        self._pooling = pooling
        self._length = prompt_length
        self._next = 0 if pooling == "mean" else prompt_length - 1
        self._sum: npt.NDArray[np.float64] | None = None

    def add(self, positions: IntArray, rows: FloatArray) -> None:
        """Adds the hidden states of tokens, [nodes, hidden_size]; known positions are left out."""
        for position, row in zip(positions.tolist(), rows, strict=False):
            if position == self._next < self._length:
                found = row.astype(np.float64)
                self._sum = found if self._sum is None else self._sum + found
                self._next += 1

    def vector(self) -> FloatArray | None:
        """The pooled state with length 1, [hidden_size]; None while states are missing."""
        if self._sum is None or self._next < self._length:
            return None
        norm = float(np.sqrt(np.dot(self._sum, self._sum)))
        vector: FloatArray = (self._sum / norm if norm > 0 else self._sum).astype(np.float32)
        return vector
