"""Compares two results: which figures have become worse.

Two kinds of figures are comparable between runs. Counts (tokens per pass, correct answers, equal
texts) are the same on every machine and in every run, so any drop is a regression. Times are not;
but the ratio of two times of one run is comparable within a tolerance. Absolute times are never
compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outstride.bench import result as results
from outstride.bench.result import BenchResult
from outstride.errors import InvalidParams, OutstrideError

TOLERANCE = 0.05
EPSILON = 1e-9
_SAME = {
    "decode": ("model", "prompts", "limit", "random", "batch", "temperature", "raw", "params"),
    "parallel": ("model", "tasks", "limit", "batch"),
    "quality": ("model", "gsm8k", "humaneval", "limit", "params"),
    "peers": ("model", "prompts", "limit", "batch", "tokens", "cached"),
    "against": ("model",),
    "step": ("model", "cached"),
    "serve": ("model", "clients", "tokens", "method"),
}
"""Settings that must agree, by kind of result."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A comparable value. `exact` values may not drop at all; `less` means that lower is better."""

    value: float
    exact: bool = False
    less: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A figure in both results."""

    name: str
    old: float
    new: float | None
    worse: bool
    exact: bool

    def __str__(self) -> str:
        if self.new is None:
            return f"{self.name}: {self.old:.4g} before, missing now"
        return f"{self.name}: {self.old:.4g} before, {self.new:.4g} now"

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class RegressReport:
    """All figures that both results have, and those that are missing in the new one."""

    tolerance: float
    changes: list[Change] = field(default_factory=list)

    @property
    def worse(self) -> list[Change]:
        return [change for change in self.changes if change.worse]

    def samples(self) -> list[dict[str, Any]]:
        return [change.to_dict() for change in self.changes]

    def summary(self) -> dict[str, Any]:
        return {
            "tolerance": self.tolerance,
            "compared": len(self.changes),
            "worse": [str(change) for change in self.worse],
        }


def figures(result: BenchResult) -> dict[str, Figure]:
    """The comparable figures of a result, by name."""
    reader = _READERS.get(result.kind)
    if reader is None:
        raise InvalidParams(f"results of bench {result.kind} have no figures that can be compared")
    return dict(reader(result))


def _decode(result: BenchResult) -> Iterator[tuple[str, Figure]]:
    baseline = next((line["method"] for line in result.summary.get("lines", ())), "")
    for line in result.summary.get("lines", ()):
        place = f"{line['method']}, {line['group']}, {line['batch']} at a time"
        place += f", temperature {line['temperature']:g}{', warm' if line['warm'] else ''}"
        # Without a frozen cost curve, drafts depend on how quick the machine was.
        exact = bool(result.settings.get("frozen")) or line["method"] == baseline
        yield f"tokens per pass, {place}", Figure(line["tokens_per_pass"], exact=exact)
        yield f"equal answers, {place}", Figure(line["equal"] / line["prompts"], exact=True)
        if line["method"] != baseline and line["group"] == "all":
            yield f"speed against {baseline}, {place}", Figure(line["ratio"])


def _parallel(result: BenchResult) -> Iterator[tuple[str, Figure]]:
    for row in result.summary.get("policies", ()):
        yield f"tokens per pass, {row['policy']}", Figure(row["tokens_per_pass"], exact=True)
        yield f"exact match, {row['policy']}", Figure(row["match"], exact=True)


def _quality(result: BenchResult) -> Iterator[tuple[str, Figure]]:
    for row in result.summary.get("scores", ()):
        place = f"{row['method']}, {row['task']}"
        yield f"score, {place}", Figure(row["score"], exact=True)
        yield f"tokens per pass, {place}", Figure(row["tokens_per_pass"], exact=True)


def _peers(result: BenchResult) -> Iterator[tuple[str, Figure]]:
    summary = result.summary
    for name, mine in summary.get("first_against", {}).items():
        for batch, ratio in mine.items():
            yield f"speed against {name}, {batch} at a time", Figure(ratio)
    passes = dict(summary.get("milliseconds", {}))
    ours = passes.pop(next(iter(passes), ""), {})
    for name, mine in passes.items():
        for nodes in mine.keys() & ours.keys():
            yield f"pass over {nodes} against {name}", Figure(ours[nodes] / mine[nodes], less=True)


def _against(result: BenchResult) -> Iterator[tuple[str, Figure]]:
    for row in result.samples:
        if row["ratio"] is not None:
            yield row["name"], Figure(row["ratio"], less=row["unit"] == "ms")


def _step(result: BenchResult) -> Iterator[tuple[str, Figure]]:
    nodes = result.summary.get("milliseconds", {}).get("nodes", {})
    first = next(iter(nodes.values()), 0.0)
    for count, value in nodes.items():
        if first:
            yield f"pass over {count} against the shortest", Figure(value / first, less=True)


def _serve(result: BenchResult) -> Iterator[tuple[str, Figure]]:
    if "ratio" in result.summary:
        yield "tokens per second against the other server", Figure(result.summary["ratio"])
    yield "failed requests", Figure(result.summary.get("failed", 0), exact=True, less=True)


_READERS = {
    "decode": _decode,
    "parallel": _parallel,
    "quality": _quality,
    "peers": _peers,
    "against": _against,
    "step": _step,
    "serve": _serve,
}


def compare(
    old: BenchResult, new: BenchResult, report: RegressReport, *, prefix: str = ""
) -> RegressReport:
    """Adds every figure of the old result with its new value to the report."""
    if old.kind != new.kind:
        raise InvalidParams(f"a result of bench {old.kind} and one of bench {new.kind}")
    for result, when in ((old, "old"), (new, "new")):
        if not result.complete:
            raise InvalidParams(f"the {when} result is incomplete: its means cover other cases")
    for name in _SAME.get(old.kind, ()):
        if old.settings.get(name) != new.settings.get(name):
            raise InvalidParams(
                f"the results differ in {name!r}: {old.settings.get(name)} before, "
                f"{new.settings.get(name)} now; run the same bench again"
            )
    same_curve = _curve(old) == _curve(new)
    before, after = figures(old), figures(new)
    for name, figure in before.items():
        found = after.get(name)
        exact = figure.exact and (found is None or found.exact)
        if old.kind == "decode" and name.startswith("tokens per pass") and not same_curve:
            exact = False
        worse = found is None or _dropped(figure, found.value, 0.0 if exact else report.tolerance)
        value = None if found is None else found.value
        report.changes.append(Change(prefix + name, figure.value, value, worse, exact))
    return report


def _curve(result: BenchResult) -> object:
    return result.settings.get("cost") if result.settings.get("frozen") else None


def _dropped(old: Figure, new: float, tolerance: float) -> bool:
    """Whether a figure is worse than the tolerance permits."""
    if old.less:
        return new > old.value * (1 + tolerance) + EPSILON
    return new < old.value * (1 - tolerance) - EPSILON


def compare_paths(old: Path, new: Path, tolerance: float = TOLERANCE) -> RegressReport:
    """Compares two files, or two folders file by file."""
    if not 0 <= tolerance < 1:
        raise InvalidParams("the tolerance lies between 0 and 1")
    report = RegressReport(tolerance)
    if not old.is_dir():
        return compare(results.read(old), results.read(new), report)
    files = [file for file in sorted(old.glob("*.json")) if results.read(file).kind in _READERS]
    if not files:
        raise OutstrideError(f"{old}: no result that can be compared")
    for file in files:
        if not (new / file.name).exists():
            raise OutstrideError(f"{new / file.name} is missing")
        compare(results.read(file), results.read(new / file.name), report, prefix=f"{file.stem}: ")
    return report
