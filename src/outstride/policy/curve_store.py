"""Learned cost curves on disk, so that a new process begins with what earlier ones have learned.

A curve belongs to a key: model, weights format, build of the kernels, and machine. Each key has a small
JSON file of its own. The store is only ever a shortcut: a file that is missing, damaged or of another
key is ignored, and a disk that is full or read-only means that nothing is kept. Neither is an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outstride.core.contracts import Model
from outstride.policy.config import AutoConfig
from outstride.policy.cost_model import CostModel, DraftSource, PrefillCost
from outstride.policy.cost_prior import prior_of

VERSION = 2
"""Of the file format, and of what the values mean."""
_DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a file may raise that is missing or that another program wrote."""


def machine_key() -> dict[str, Any]:
    """What of this machine and process decides how long a pass takes."""
    return {
        "cpu": _cpu_model(),
        "cores": _num_cores(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def _num_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class CurveStore:
    """A folder of learned cost curves."""

    folder: Path

    def key(self, model: Model) -> dict[str, Any]:
        """What a stored curve has to match. The fingerprint names the weights and their format."""
        return {
            "version": VERSION,
            "fingerprint": model.fingerprint,
            "build": model.build,
            **machine_key(),
        }

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of a key."""
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        return self.folder / f"{name}.json"

    def load(
        self, key: Mapping[str, Any], config: AutoConfig, *, long_prefill: bool = False
    ) -> CostModel | None:
        """The stored curve of a key, or None if there is no sound one.

        long_prefill: whether a curve that was measured must have been measured for long prompts, too.
        """
        try:
            record = json.loads(self.path(key).read_text(encoding="utf-8"))
            if record["key"] != dict(key):
                return None
            stored, drafts = _knots(record["learned"]), _drafts(record["drafts"])
            prior = prior_of(key["build"])
            if prior is not None:
                cost = prior.cost_model(config, stored, drafts)
            elif long_prefill and record["long_prefill"] is not True:
                return None
            else:
                measured = _knots(record["measured"])
                cost = CostModel(measured, config=config, stored=stored, drafts=drafts)
            if record["prefill"] is not None:
                cost.set_prefill(_prefill(record["prefill"], config))
            return cost
        except _DAMAGED:
            return None

    def save(self, key: Mapping[str, Any], cost: CostModel, *, long_prefill: bool = False) -> None:
        """Keeps a curve, if the disk takes it. A frozen one is a setting and is not kept."""
        if cost.frozen:
            return
        prefill = cost.prefill
        terms = {
            "per_node": prefill.per_node,
            "per_pair": prefill.per_pair,
            "per_cached": prefill.per_cached,
            "flat": prefill.flat,
        }
        record: dict[str, Any] = {
            "key": dict(key),
            "learned": {str(nodes): seconds for nodes, seconds in cost.known_knots().items()},
            "drafts": {source.value: max(x, 0.0) for source, x in cost.draft_shares().items()},
            "prefill": None if cost.prefill_follows else terms,
        }
        if prior_of(key["build"]) is None:
            record["measured"] = {str(nodes): seconds for nodes, seconds in cost.reference.items()}
            record["long_prefill"] = long_prefill
        path = self.path(key)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(record, indent=1), encoding="utf-8")
            part.replace(path)  # another process sees the old file or the whole new one
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _knots(record: Any) -> dict[int, float]:
    """Seconds by nodes; raises ValueError if one of them can be no duration of a pass."""
    found = {int(nodes): _finite(seconds) for nodes, seconds in record.items()}
    if min(found, default=1) < 1 or not all(found.values()):
        raise ValueError("a pass has a node and takes time")
    return found


def _drafts(record: Any) -> dict[DraftSource, float]:
    return {DraftSource(source): _finite(share) for source, share in record.items()}


def _prefill(terms: Any, config: AutoConfig) -> PrefillCost:
    names = ("per_node", "per_pair", "per_cached", "flat")
    per_node, per_pair, per_cached, flat = (_finite(terms[name]) for name in names)
    if not per_node:
        raise ValueError("a node takes time")
    return PrefillCost(per_node, per_pair, per_cached, flat=flat, config=config)


def _finite(value: Any) -> float:
    """A number that can be a duration; raises ValueError for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a duration must be a number")
    if not math.isfinite(value) or value < 0.0:
        raise ValueError("a duration must be finite and not negative")
    return float(value)
