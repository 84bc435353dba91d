"""Rows of a comparison and their bounds."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


def cores() -> int:
    """Number of cores that this process may use; both engines get as many threads."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of a row: at most or at least a number, for the ratio or for our own value."""

    limit: float
    at_most: bool = True
    of: str = "ratio"

    def met(self, value: float) -> bool:
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"


@dataclass(slots=True)
class Row:
    """One row of the comparison."""

    name: str
    unit: str
    ours: float
    theirs: float | None = None
    bound: Bound | None = None
    other: str = ""
    """The engine that `theirs` belongs to."""
    raw: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each run, or other raw values."""

    @property
    def ratio(self) -> float | None:
        return None if not self.theirs else self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        if self.bound is None:
            return None
        value = self.ratio if self.bound.of == "ratio" else self.ours
        return None if value is None else self.bound.met(value)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": round(self.ours, 4),
            "theirs": None if self.theirs is None else round(self.theirs, 4),
            "other": self.other,
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "bound": None if self.bound is None else f"{self.bound.of} {self.bound}",
            "met": self.met,
            "raw": {side: [round(v, 7) for v in values] for side, values in self.raw.items()},
        }


@dataclass(slots=True)
class PeerReport:
    """All rows; and what could not be measured, with the reason."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    peer: dict[str, Any] = field(default_factory=dict)

    def samples(self) -> list[dict[str, Any]]:
        return [row.to_dict() for row in self.rows]

    def summary(self) -> dict[str, Any]:
        judged = [row for row in self.rows if row.met is not None]
        return {
            "met": sum(bool(row.met) for row in judged),
            "bounds": len(judged),
            "missed": [row.name for row in judged if not row.met],
            "ratios": {row.name: round(row.ratio, 4) for row in self.rows if row.ratio is not None},
            "skipped": [{"name": name, "reason": why} for name, why in self.skipped.items()],
            "peer": self.peer,
        }
