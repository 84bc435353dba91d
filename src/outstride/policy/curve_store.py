"""Measured cost curves on disk, so that only the first process on a machine has to measure.

A curve belongs to a key: the fingerprint of model and operations, the machine, and what was measured.
Each key has a small JSON file of its own. The store is only ever a shortcut: a file that is missing,
damaged or of another key means that passes are measured, and a disk that is full or read-only means
that nothing is kept. Neither is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outstride.policy.config import AutoConfig
from outstride.policy.cost_model import CostModel, PrefillCost

VERSION = 1
"""Of the file format, and of the way in which passes are timed."""


def machine_key() -> dict[str, Any]:
    """What of this machine and process decides how long a pass takes."""
    return {
        "host": platform.node(),
        "cpu": _cpu_model(),
        "threads": _num_threads(),
        "omp_threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def _num_threads() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class CurveStore:
    """A folder of measured cost curves."""

    folder: Path

    def key(self, fingerprint: str, max_nodes: int, config: AutoConfig) -> dict[str, Any]:
        """What a stored curve has to match: model, operations, machine, and how it was measured."""
        return {
            "version": VERSION,
            "fingerprint": fingerprint,
            "max_nodes": max_nodes,
            "config": hashlib.sha256(repr(asdict(config)).encode()).hexdigest()[:16],
            **machine_key(),
        }

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of a key."""
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        return self.folder / f"{name}.json"

    def load(
        self, key: Mapping[str, Any], config: AutoConfig, *, long_prefill: bool
    ) -> CostModel | None:
        """The stored curve of a key, or None if there is no sound one.

        long_prefill: whether it must have been measured with `profiling.measure(long_prefill=True)`.
        """
        try:
            record = json.loads(self.path(key).read_text(encoding="utf-8"))
            if record["key"] != dict(key) or (long_prefill and record["long_prefill"] is not True):
                return None
            knots = {int(nodes): _finite(value) for nodes, value in record["knots"].items()}
            terms = record["prefill"]
            cost = CostModel(knots, config=config)
            cost.prefill = PrefillCost(
                _finite(terms["per_node"]),
                _finite(terms["per_pair"]),
                _finite(terms["per_cached"]),
                flat=_finite(terms["flat"]),
                config=config,
            )
            if cost.prefill.per_node == 0.0:
                return None
            return cost
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None

    def save(self, key: Mapping[str, Any], cost: CostModel, *, long_prefill: bool) -> None:
        """Keeps a measured curve, if the disk takes it. A frozen one is a setting and is not kept."""
        if cost.frozen:
            return
        prefill = cost.prefill
        record = {
            "key": dict(key),
            "long_prefill": long_prefill,
            "knots": {str(nodes): seconds for nodes, seconds in cost.knots.items()},
            "prefill": {
                "per_node": prefill.per_node,
                "per_pair": prefill.per_pair,
                "per_cached": prefill.per_cached,
                "flat": prefill.flat,
            },
        }
        path = self.path(key)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(record, indent=1), encoding="utf-8")
            part.replace(path)  # another process sees the old file or the whole new one
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _finite(value: Any) -> float:
    """A number that can be a duration; raises ValueError for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a duration must be a number")
    if not math.isfinite(value) or value < 0.0:
        raise ValueError("a duration must be finite and not negative")
    return float(value)
