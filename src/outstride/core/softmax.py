"""Softmax, log-softmax and entropy of raw logits, in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from outstride.core.graph import FloatArray

Logits = npt.NDArray[np.floating[Any]]


def softmax(logits: Logits) -> FloatArray:
    """The probabilities of a row of raw logits."""
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    probabilities: FloatArray = weights / weights.sum()
    return probabilities


def log_softmax(logits: Logits) -> FloatArray:
    """The log-probabilities of a row of raw logits."""
    x = logits.astype(np.float64) - float(logits.max())
    shifted: FloatArray = x - np.log(np.exp(x).sum())
    return shifted


def entropy(probabilities: FloatArray) -> float:
    """The entropy of a distribution, in nats."""
    return float(-(probabilities * np.log(np.maximum(probabilities, 1e-30))).sum())
