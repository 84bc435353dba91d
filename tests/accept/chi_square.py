"""The chi-square test: how likely it is that counts come from a distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def p_value(seen: npt.NDArray[Any], due: npt.NDArray[Any]) -> float:
    """Chi-square: the probability of a deviation at least this large; rare outcomes are pooled.

    `due` are expected counts. An outcome that is impossible and occurred gives 0.
    """
    seen, due = np.ravel(seen).astype(np.float64), np.ravel(due).astype(np.float64)
    if seen[due <= 0].any():
        return 0.0
    often, rare = due >= 8, (due < 8) & (due > 0)
    pairs = np.stack([seen[often], due[often]])
    if due[rare].sum() >= 8:
        pairs = np.concatenate([pairs, [[seen[rare].sum()], [due[rare].sum()]]], axis=1)
    if pairs.shape[1] < 2:
        return 1.0
    statistic = float(((pairs[0] - pairs[1]) ** 2 / pairs[1]).sum())
    half = torch.tensor((pairs.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))
