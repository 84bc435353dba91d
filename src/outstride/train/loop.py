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


def rehearsed(step: Callable[[], torch.Tensor], fresh: int = 0) -> float:
    """Seconds of a step, timed by taking some. What they change is the caller's to undo.

    fresh: the number of steps after which all kinds of batches were seen.
    """
    warm, most = _REHEARSED
    for _ in range(warm + fresh):
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


@dataclass(frozen=True, slots=True)
class Shelf:
    """Rows of about one length, of which a batch has as many as fit."""

    rows: torch.Tensor
    length: int
    batch: int


_NARROW = 128
"""Rows are cut to no fewer tokens: shorter ones save nothing."""


def shelves(stops: torch.Tensor, length: int, batch: int) -> list[Shelf]:
    """Rows by their length: a quarter of the longest, a half, and the whole.

    Batches of shorter rows hold more of them, so that all batches have about as many tokens and few
    of those are padding. Too few rows for a batch go with the longer ones.
    """
    found, left = [], torch.ones_like(stops, dtype=torch.bool)
    for part in (4, 2, 1):
        chosen = (left & (stops <= length // part)).nonzero().flatten()
        narrow = length % part or length // part < _NARROW or len(chosen) < batch * part
        if part > 1 and narrow:
            continue
        left[chosen] = False
        if len(chosen):
            found.append(Shelf(chosen, length // part, batch * part))
    return found


def shelved(shelves: list[Shelf], seed: int, first: int = 0) -> Iterator[tuple[torch.Tensor, int]]:
    """Numbers of rows and the tokens to cut them to, batch by batch, from batch `first` on.

    It is always the turn of the shelf of which the least was read.
    """
    counts = [0] * len(shelves)

    def turn() -> int:
        shares = [
            (count + 0.5) * shelf.batch / len(shelf.rows)
            for count, shelf in zip(counts, shelves, strict=True)
        ]
        chosen = shares.index(min(shares))
        counts[chosen] += 1
        return chosen

    for _ in range(first):
        turn()
    sources = [
        batches(len(shelf.rows), shelf.batch, seed, count)
        for shelf, count in zip(shelves, counts, strict=True)
    ]
    while True:
        chosen = turn()
        yield shelves[chosen].rows[next(sources[chosen])], shelves[chosen].length


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
