"""The parts of a training loop that every training here is made of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

Weights = dict[str, torch.Tensor]
_REHEARSED = (3, 20)
"""Steps of a rehearsal: so many until everything is compiled, and at the most so many to time."""
_TIMED = 4.0
"""Seconds that a rehearsal takes the time for."""


def rate_at(step: int, steps: int, peak: float) -> float:
    """The learning rate: up in a line, down in a cosine."""
    warm = max(1, min(300, steps // 10))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def optimizer_of(
    weights: Weights, *, decay: float = 0.01, second: float = 0.99
) -> torch.optim.AdamW:
    """AdamW, which makes the weights leaves with gradients. Matrices decay, norms do not."""
    for value in weights.values():
        value.requires_grad_()
    thick = [value for value in weights.values() if value.dim() > 1]
    thin = [value for value in weights.values() if value.dim() <= 1]
    groups = [{"params": thick, "weight_decay": decay}, {"params": thin, "weight_decay": 0.0}]
    fused = all(value.is_cuda for value in weights.values())
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=0.0, betas=(0.9, second), fused=fused)


def advance(
    loss_of: Callable[[], torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    optimizer: torch.optim.AdamW,
    rate: float,
) -> torch.Tensor:
    """One step at a learning rate; the loss before it, which stays on its device."""
    some = next(iter(weights.values()))
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.autocast(some.device.type, torch.bfloat16, enabled=some.is_cuda):
        loss = loss_of()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def rehearsed(step: Callable[[], torch.Tensor]) -> float:
    """Seconds of a step, timed by taking some. What they change is the caller's to undo."""
    warm, most = _REHEARSED
    for _ in range(warm):
        step().item()
    start, count = time.monotonic(), 0
    while count < most and time.monotonic() - start < _TIMED:
        step().item()
        count += 1
    return (time.monotonic() - start) / count


def batches(count: int, batch: int, seed: int, first: int = 0) -> Iterator[torch.Tensor]:
    """Numbers of rows, batch by batch, from batch `first` on: each row once, in a new order each time.

    It is a function of the seed alone, so that a run that goes on sees what it would have seen.
    """
    order, place = torch.empty(0, dtype=torch.long), first * batch
    turn = place // count
    place -= turn * count
    while True:
        while len(order) < place + batch:
            numbers = torch.Generator().manual_seed((seed + 1) * 1_000_003 + turn)
            order = torch.cat([order, torch.randperm(count, generator=numbers)])
            turn += 1
        yield order[place : place + batch]
        order, place = order[place + batch :], 0


@dataclass(slots=True)
class Pace:
    """How fast a run is, and now and then a word about it."""

    steps: int
    every: float = 1.0
    """Seconds between two words."""
    _marks: list[tuple[float, int]] = field(default_factory=list)
    _told: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        """Whether it is time for a word; asked after each step."""
        now = time.monotonic()
        if not self._marks:
            self._marks.append((now, step))
        if step < self.steps and now - self._told < self.every:
            return False
        self._told = now
        self._marks = [*self._marks[-30:], (now, step)]
        return True

    def rate(self) -> float:
        """Steps per second of late; 0 while that is not known."""
        (before, first), (after, last) = self._marks[0], self._marks[-1]
        return (last - first) / (after - before) if after > before else 0.0

    def left(self) -> float:
        """Seconds that are left, about."""
        return (self.steps - self._marks[-1][1]) / rate if (rate := self.rate()) else 0.0
