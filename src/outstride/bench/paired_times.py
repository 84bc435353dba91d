"""Speed-ups from paired times: medians over rounds, and a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Protocol

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000


class TimedRun(Protocol):
    """One batch of prompts, answered by one method in one round."""

    group: str
    prompts: tuple[str, ...]
    seconds: float


Times = dict[tuple[str, tuple[str, ...]], npt.NDArray[np.float64]]
"""Seconds of the baseline and of another method, by group and prompts: [rounds, 2]."""


def paired_times(base: Sequence[TimedRun], mine: Sequence[TimedRun]) -> Times:
    rows: dict[tuple[str, tuple[str, ...]], list[tuple[float, float]]] = {}
    for first, other in zip(base, mine, strict=True):
        rows.setdefault((first.group, first.prompts), []).append((first.seconds, other.seconds))
    return {portion: np.array(pairs) for portion, pairs in rows.items()}


def _middle(pairs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Median seconds of the baseline, and of the other method by the median ratio of its pairs.

    Other work on the machine slows whole answers down, some of them many times over: sums then
    differ by a third from run to run, while medians over five rounds stay within a few percent. Slow
    phases last, so runs that follow each other directly are compared with each other.
    """
    first = np.median(pairs[..., 0], axis=-1)
    return np.stack([first, first / np.median(pairs[..., 0] / pairs[..., 1], axis=-1)], axis=-1)


def speedup(times: Times, groups: Sequence[str]) -> float:
    """Speed-up over the baseline: the mean over groups of the ratio of times.

    Of several rounds, each batch counts with the median of its pairs: see `_middle`.
    """
    ratios = []
    for group in groups:
        chosen = [_middle(pairs) for (name, _), pairs in times.items() if name == group]
        if chosen:
            first, other = np.sum(chosen, axis=0)
            ratios.append(float(first / other))
    return mean(ratios) if ratios else 1.0


def speedup_bound(times: Times, groups: Sequence[str]) -> float:
    """Lower end of the two-sided 95% bootstrap interval of the ratio, over batches and rounds."""
    numbers = np.random.default_rng(0)
    found = np.zeros(RESAMPLES)
    for group in groups:
        drawn = []
        for (name, _), pairs in times.items():
            if name == group:
                rounds = numbers.integers(len(pairs), size=(RESAMPLES, len(pairs)))
                drawn.append(_middle(pairs[rounds]))
        medians = np.stack(drawn, axis=1)
        chosen = numbers.integers(len(drawn), size=(RESAMPLES, len(drawn)))
        sums = np.take_along_axis(medians, chosen[:, :, None], axis=1).sum(axis=1)
        found += sums[:, 0] / sums[:, 1] / len(groups)
    return float(np.quantile(found, 0.025))
