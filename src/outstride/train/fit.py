"""`fit`: trains a recipe and leaves a folder with the result.

The training is a function of the recipe with its options, the seed, the rows and the number of
steps, up to the rounding of the device. A run that is interrupted and resumed gives the same weights
as one that is not. `minutes` chooses the number of steps by timing a few first.
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import outstride
from outstride.errors import InvalidData, InvalidParams, OutstrideError
from outstride.train import checkpoint
from outstride.train.checkpoint import TrainingProgress
from outstride.train.corpus_files import TrainingRows, replacing
from outstride.train.interrupt import deferred_interrupt
from outstride.train.loop import (
    LengthBucket,
    StepRate,
    advance,
    bucketed_batches,
    length_buckets,
    optimizer_of,
    rate_at,
    seconds_per_step,
)
from outstride.train.loss_plot import loss_plot
from outstride.train.recipe import Measurement, Recipe

KEEP = 60.0
"""Seconds between checkpoints."""
_MEASURES = 8
"""Default number of measurements on held-out texts."""


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """How long and how a recipe is trained."""

    steps: int | None = None
    minutes: float | None = None
    batch: int = 32
    peak: float = 1e-3
    seed: int = 0
    held: float = 0.02
    every: int = 0
    """Steps between measurements; 0: eight in all."""
    int8: bool = False

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.minutes is None):
            raise InvalidParams("say how long to train: a number of steps or of minutes")
        long = self.minutes if self.steps is None else self.steps
        if long is None or long <= 0 or self.batch < 1 or self.every < 0:
            raise InvalidParams("steps, minutes and batch are above 0, and every is not below")
        if not 0.0 < self.peak < 1.0 or not 0.0 < self.held < 1.0:
            raise InvalidParams("the peak learning rate and the held-out share lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The state of a run, for progress displays."""

    step: int
    steps: int
    loss: float
    """Mean of the last 50 steps."""
    tokens_per_second: float
    left: float
    """Estimated seconds left."""
    measured: Measurement | None = None
    """The measurement, if one was just made."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a training run."""

    folder: Path
    steps: int
    untrained: dict[str, Any]
    trained: dict[str, Any]
    size: int
    """Bytes of the weights."""
    was_finished: bool = False
    """Whether the run had finished before."""


Say = Callable[[TrainingState], None]


def fit(
    recipe: Recipe,
    rows: TrainingRows,
    out: Path,
    schedule: TrainingSchedule,
    *,
    options: Mapping[str, Any],
    data: Mapping[str, Any],
    show: Say = lambda standing: None,
) -> TrainingResult:
    """Trains, or resumes the run in the folder."""
    if recipe.changes_target and schedule.int8:
        raise InvalidParams(f"{recipe.name} writes a model in 16 bits; --int8 is for draft heads")
    train, held = rows.split(schedule.held)
    if not len(train) or not len(held):
        raise InvalidData(f"{len(rows)} texts are too few to train on and to hold some out")
    identity = _identity(recipe, rows, schedule, options)
    if (said := checkpoint.finished(out, identity)) is not None:
        over = said["measured"]
        return TrainingResult(
            out, said["steps"], over[0], over[-1], said["bytes"], was_finished=True
        )
    run = _TrainingRun(recipe, train, held, out, schedule, identity, dict(data), show)
    return run()


def _identity(
    recipe: Recipe, rows: TrainingRows, schedule: TrainingSchedule, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that must be equal for a run to resume."""
    keys = rows.keys.cpu().numpy().tobytes() + rows.stops.cpu().numpy().tobytes()
    return {
        "recipe": recipe.name,
        "options": dict(options),
        "target": dict(recipe.target.about()),
        "rows": list(rows.tokens.shape),
        "corpus": hashlib.sha256(keys).hexdigest()[:16],
        "steps": schedule.steps,
        "minutes": schedule.minutes,
        "batch": schedule.batch,
        "peak": schedule.peak,
        "seed": schedule.seed,
        "held": schedule.held,
        "every": schedule.every,
        "int8": schedule.int8,
    }


@dataclass(slots=True)
class _TrainingRun:
    """One training run from its preparation to its result."""

    recipe: Recipe
    train: TrainingRows
    held: TrainingRows
    out: Path
    schedule: TrainingSchedule
    identity: dict[str, Any]
    data: dict[str, Any]
    show: Say
    numbers: torch.Generator = field(init=False)
    optimizer: torch.optim.AdamW = field(init=False)
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    _fresh: list[torch.Tensor] = field(default_factory=list)
    """Losses that are still on the device."""
    _since: float = 0.0
    _buckets: list[LengthBucket] = field(default_factory=list)

    def __call__(self) -> TrainingResult:
        self._prepare()
        self._since = time.monotonic()
        with deferred_interrupt() as asked:
            self._loop(asked)
        return self._finish()

    def _prepare(self) -> None:
        recipe, course, device = self.recipe, self.schedule, self.recipe.target.device
        torch.manual_seed(course.seed)
        recipe.prepare(self.train)
        self._buckets = length_buckets(
            self.train.stops.cpu(), self.train.tokens.shape[1], course.batch
        )
        self.train, self.held = self.train.to(device), self.held.to(device)
        self.numbers = torch.Generator(device).manual_seed(course.seed)
        self.optimizer = optimizer_of(recipe.weights)
        found = checkpoint.restore(
            self.out, self.identity, recipe.weights, self.optimizer, self.numbers
        )
        if found is not None:
            self.progress = found
            return
        start = time.monotonic()
        self._measure()
        self.progress.steps = course.steps or self._affordable(time.monotonic() - start)
        checkpoint.write_json(self.out / checkpoint.RECIPE, self._about())

    def _batch(self, rows: torch.Tensor, length: int) -> TrainingRows:
        return self.train.take(rows.to(self.recipe.target.device)).cut(length)

    def _affordable(self, measuring: float) -> int:
        """Number of steps that fit into the minutes. The timing steps change no weights."""
        course, recipe = self.schedule, self.recipe
        numbers = torch.Generator(recipe.target.device).manual_seed(course.seed)
        order = bucketed_batches(self._buckets, course.seed)
        rows, lengths = bucketed_batches(self._buckets, course.seed), set[int]()
        fresh = 0
        while len(lengths) < len(self._buckets):
            lengths.add(next(order)[1])
            fresh += 1

        def step() -> torch.Tensor:
            given = self._batch(*next(rows))
            return advance(lambda: recipe.loss(given, numbers), recipe.weights, self.optimizer, 0.0)

        each = seconds_per_step(step, fresh)
        self.optimizer = optimizer_of(recipe.weights)
        return max(1, int((60.0 * (course.minutes or 0.0) - _MEASURES * measuring) / each))

    def _loop(self, asked: Callable[[], bool]) -> None:
        recipe, course, now = self.recipe, self.schedule, self.progress
        every = course.every or max(1, math.ceil(now.steps / _MEASURES))
        rows = bucketed_batches(self._buckets, course.seed, now.step)
        pace, kept = StepRate(now.steps), time.monotonic()
        while now.step < now.steps:
            given = self._batch(*next(rows))
            recipe.progress = now.step / now.steps
            loss = advance(
                lambda given=given: recipe.loss(given, self.numbers),  # type: ignore[misc]
                recipe.weights,
                self.optimizer,
                rate_at(now.step, now.steps, course.peak),
            )
            self._fresh.append(loss)
            now.step += 1
            due, measured = pace.due(now.step), None
            if now.step % every == 0 or now.step == now.steps:
                measured = self._measure()
            if due or measured:
                self._collect()
                width = course.batch * self.train.tokens.shape[1]
                late = now.losses[-50:]
                speed = width * pace.rate()
                mean = sum(late) / len(late)
                self.show(TrainingState(now.step, now.steps, mean, speed, pace.left(), measured))
            if now.step < now.steps and (asked() or time.monotonic() - kept > KEEP):
                self._save_checkpoint()
                kept = time.monotonic()
                if asked():
                    raise KeyboardInterrupt

    def _measure(self) -> Measurement:
        self._collect()
        found = self.recipe.measure(self.held)
        self.progress.measured.append({"step": self.progress.step, **found.to_dict()})
        return found

    def _collect(self) -> None:
        """Copies losses from the device; raises an error on NaN before anything is saved."""
        if not self._fresh:
            return
        losses = torch.stack(self._fresh).double().cpu().tolist()
        self._fresh = []
        if not all(map(math.isfinite, losses)):
            raise OutstrideError(
                f"the loss is no longer a number near step {self.progress.step}; give a lower "
                "--peak and another folder, or delete this one"
            )
        self.progress.losses += losses

    def _save_checkpoint(self) -> None:
        now = self.progress
        self._collect()
        now.seconds += time.monotonic() - self._since
        self._since = time.monotonic()
        checkpoint.save(
            self.out, self.identity, now, self.recipe.weights, self.optimizer, self.numbers
        )
        self._plot()

    def _plot(self) -> None:
        now = self.progress
        points = [(entry["step"], entry["tokens_per_pass"]) for entry in now.measured]
        with replacing(self.out / checkpoint.LOSS_PLOT) as fresh:
            fresh.write_text(loss_plot(now.losses, points, self.recipe.name), encoding="utf-8")

    def _finish(self) -> TrainingResult:
        recipe, now = self.recipe, self.progress
        now.seconds += time.monotonic() - self._since
        target = dict(recipe.target.about())
        about = {"outstride": recipe.name, "version": checkpoint.VERSION, "target": target}
        self._plot()
        size = recipe.write(self.out, about, int8=self.schedule.int8)
        checkpoint.write_json(self.out / checkpoint.RECIPE, {**self._about(), "bytes": size})
        checkpoint.forget(self.out)
        return TrainingResult(self.out, now.steps, now.measured[0], now.measured[-1], size)

    def _about(self) -> dict[str, Any]:
        """The contents of the recipe file."""
        now, device = self.progress, self.recipe.target.device
        gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
        return {
            "run": self.identity,
            "steps": now.steps,
            "data": self.data,
            "texts": {"trained on": len(self.train), "held out": len(self.held)},
            "weights": sum(value.numel() for value in self.recipe.weights.values()),
            "device": gpu or platform.processor() or platform.machine(),
            "versions": {
                "outstride": outstride.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "seconds": round(now.seconds, 1),
            "losses": _thinned(now.losses),
            "measured": now.measured,
        }


def _thinned(losses: list[float], max_points: int = 200) -> list[list[float]]:
    """Means over equal ranges of steps: [last step, loss]."""
    size = max(1, -(-len(losses) // max_points))
    parts = [losses[i : i + size] for i in range(0, len(losses), size)]
    return [
        [min((i + 1) * size, len(losses)), round(sum(p) / len(p), 5)] for i, p in enumerate(parts)
    ]
