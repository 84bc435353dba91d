"""Building blocks of every training loop in this package."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

Weights = dict[str, torch.Tensor]
_REHEARSED = (3, 20)
"""Steps before timing, until everything is compiled; and the largest number of timed steps."""
_TIMED = 4.0
"""Seconds of timing."""


def rate_at(step: int, steps: int, peak: float) -> float:
    """The learning rate: linear warm-up, then cosine decay."""
    warm = max(1, min(300, steps // 10))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def optimizer_of(
    weights: Weights, *, decay: float = 0.01, second: float = 0.99
) -> torch.optim.AdamW:
    """AdamW; it turns the weights into leaves with gradients. Matrices decay, norms do not."""
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
    """One step at a learning rate; returns the loss before it, still on its device."""
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


def seconds_per_step(step: Callable[[], torch.Tensor], warmup: int = 0) -> float:
    """Seconds of a step, timed by taking some. The caller must undo their changes.

    warmup: number of steps after which all batch shapes were seen.
    """
    warm, max_steps = _REHEARSED
    for _ in range(warm + warmup):
        step().item()
    start, count = time.monotonic(), 0
    while count < max_steps and time.monotonic() - start < _TIMED:
        step().item()
        count += 1
    return (time.monotonic() - start) / count


def batches(count: int, batch: int, seed: int, first: int = 0) -> Iterator[torch.Tensor]:
    """Row numbers batch by batch, from batch `first` on: each row once per epoch, in a new order
    each epoch.

    It is a function of the seed alone, so that a resumed run sees the same batches.
    """
    order, place = torch.empty(0, dtype=torch.long), first * batch
    epoch = place // count
    place -= epoch * count
    while True:
        while len(order) < place + batch:
            numbers = torch.Generator().manual_seed((seed + 1) * 1_000_003 + epoch)
            order = torch.cat([order, torch.randperm(count, generator=numbers)])
            epoch += 1
        yield order[place : place + batch]
        order, place = order[place + batch :], 0


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Rows of similar length, and their batch size."""

    rows: torch.Tensor
    length: int
    batch: int


_NARROW = 128
"""Rows are cut to no fewer tokens: shorter ones save no time."""


def length_buckets(stops: torch.Tensor, length: int, batch: int) -> list[LengthBucket]:
    """Buckets of rows by length: up to a quarter of the longest, a half, and the whole.

    Batches of shorter rows hold more of them, so that all batches have about as many tokens and
    little padding. Too few rows for a batch join the longer ones.
    """
    found, left = [], torch.ones_like(stops, dtype=torch.bool)
    for divisor in (4, 2, 1):
        chosen = (left & (stops <= length // divisor)).nonzero().flatten()
        narrow = length % divisor or length // divisor < _NARROW or len(chosen) < batch * divisor
        if divisor > 1 and narrow:
            continue
        left[chosen] = False
        if len(chosen):
            found.append(LengthBucket(chosen, length // divisor, batch * divisor))
    return found


def bucketed_batches(
    buckets: list[LengthBucket], seed: int, first: int = 0
) -> Iterator[tuple[torch.Tensor, int]]:
    """Row numbers and the length to cut them to, batch by batch, from batch `first` on.

    The next batch always comes from the bucket with the smallest share read so far.
    """
    counts = [0] * len(buckets)

    def epoch() -> int:
        shares = [
            (count + 0.5) * bucket.batch / len(bucket.rows)
            for count, bucket in zip(counts, buckets, strict=True)
        ]
        chosen = shares.index(min(shares))
        counts[chosen] += 1
        return chosen

    for _ in range(first):
        epoch()
    sources = [
        batches(len(bucket.rows), bucket.batch, seed, count)
        for bucket, count in zip(buckets, counts, strict=True)
    ]
    while True:
        chosen = epoch()
        yield buckets[chosen].rows[next(sources[chosen])], buckets[chosen].length


@dataclass(slots=True)
class StepRate:
    """Steps per second of a run, and when to report progress."""

    steps: int
    every: float = 1.0
    """Seconds between two reports."""
    _marks: list[tuple[float, int]] = field(default_factory=list)
    _reported: float = field(default_factory=time.monotonic)

    def due(self, step: int) -> bool:
        """Whether a report is due; called after each step."""
        now = time.monotonic()
        if not self._marks:
            self._marks.append((now, step))
        if step < self.steps and now - self._reported < self.every:
            return False
        self._reported = now
        self._marks = [*self._marks[-30:], (now, step)]
        return True

    def rate(self) -> float:
        """Recent steps per second; 0 while unknown."""
        (before, first), (after, last) = self._marks[0], self._marks[-1]
        return (last - first) / (after - before) if after > before else 0.0

    def left(self) -> float:
        """Estimated seconds left."""
        return (self.steps - self._marks[-1][1]) / rate if (rate := self.rate()) else 0.0
