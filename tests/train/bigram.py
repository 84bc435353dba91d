"""A recipe that is trained in milliseconds: which token follows which, from texts with a pattern."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as fn

from outstride.train import fit as fitting
from outstride.train.corpus_files import TrainingRows
from outstride.train.fit import TrainingResult, TrainingSchedule, fit
from outstride.train.recipe import Measurement, Recipe

SIZE = 24
"""Tokens of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Stub:
    """As much of a target as the loop wants to know."""

    device: str = "cpu"
    name: str = "stub"

    def about(self) -> Mapping[str, int | str]:
        return {"name": self.name, "vocab_size": SIZE}


class Bigram(Recipe):
    """Which token follows which.

    Paper: none
    Makes: nothing that decodes
    """

    name = "bigram"

    def __init__(self, target: Any, *, spread: float = 0.1, drop: float = 0.2) -> None:
        if spread < 0:
            raise ValueError("spread is not below 0")
        self.target, self.drop = target, drop
        self.weights = {"after.weight": spread * torch.randn(SIZE, SIZE)}

    def prepare(self, rows: TrainingRows) -> None:
        counts = torch.bincount(rows.tokens.flatten(), minlength=SIZE).float()
        self.counts = counts.int()
        self.weights["bias"] = counts.log1p()

    def _scores(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weights["after.weight"][tokens] + self.weights["bias"]

    def loss(self, rows: TrainingRows, numbers: torch.Generator) -> torch.Tensor:
        keep = torch.rand(rows.tokens[:, 1:].shape, generator=numbers) >= self.drop
        scores = self._scores(rows.tokens[:, :-1]).transpose(1, 2)
        each = fn.cross_entropy(scores, rows.tokens[:, 1:], reduction="none")
        return (each * keep).sum() / keep.sum().clamp(min=1)

    @torch.no_grad()
    def measure(self, held: TrainingRows) -> Measurement:
        right = (self._scores(held.tokens[:, :-1]).argmax(-1) == held.tokens[:, 1:]).float().mean()
        return Measurement(1.0 + float(right), [float(right)], figures={"texts": float(len(held))})

    def config(self) -> dict[str, Any]:
        return {"size": SIZE}

    def state(self) -> dict[str, torch.Tensor]:
        return {"counts": self.counts}


def rows(count: int = 60, length: int = 16, seed: int = 0) -> TrainingRows:
    """Texts that count upwards from anywhere, with a few slips."""
    numbers = torch.Generator().manual_seed(seed)
    first = torch.randint(SIZE, (count, 1), generator=numbers)
    tokens = (first + torch.arange(length)) % SIZE
    slips = torch.rand(tokens.shape, generator=numbers) < 0.05
    tokens = torch.where(slips, torch.randint(SIZE, tokens.shape, generator=numbers), tokens)
    whole = torch.full((count,), length)
    return TrainingRows(
        tokens=tokens,
        starts=torch.ones_like(whole),
        stops=whole,
        sampled=torch.zeros(count, dtype=torch.bool),
        keys=torch.randint(1 << 40, (count,), generator=numbers),
    )


def run(
    out: Path, *, target: Stub | None = None, spread: float = 0.1, **course: Any
) -> TrainingResult:
    """A training; the same arguments, the same training."""
    chosen = TrainingSchedule(**{"steps": 40, "batch": 8, "peak": 0.1, "held": 0.1, **course})
    torch.manual_seed(chosen.seed)
    recipe = Bigram(target or Stub(), spread=spread)
    return fit(recipe, rows(), out, chosen, options={"spread": spread}, data={"model": "stub"})


def _wait_to_be_killed(run: fitting._TrainingRun) -> TrainingResult:
    time.sleep(3600)
    raise AssertionError("nothing killed this process")


if __name__ == "__main__":  # a process to be killed: it saves a checkpoint after each step
    fitting.KEEP = 0.0
    fitting._TrainingRun._finish = _wait_to_be_killed  # type: ignore[method-assign, assignment]
    print("ready", flush=True)
    run(Path(sys.argv[1]), steps=int(sys.argv[2]))
