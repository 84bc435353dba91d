"""Results of `outstride bench decode`: runs, lines by group and method, speed-ups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np

from outstride.bench.paired_times import paired_times, speedup, speedup_bound

VERBS = ("plan", "propose", "forward", "accept", "commit")


@dataclass(slots=True)
class DecodeRun:
    """One batch of prompts of one group, answered by one method."""

    method: str
    group: str
    batch: int
    temperature: float
    round: int
    warm: bool
    prompts: tuple[str, ...]
    seconds: float
    emitted: int
    passes: int
    nodes: int
    verbs: dict[str, float]
    equal: int
    """Number of answers that are equal to those of the baseline in this round."""
    drafts: int
    expected: float
    sources: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """Results of a method on a group, or on all groups, in one setting."""

    method: str
    group: str
    batch: int
    temperature: float
    warm: bool
    prompts: int
    equal: int
    tokens_per_pass: float
    nodes_per_pass: float
    tokens_per_second: float
    ratio: float
    """Speed-up over the baseline, on the same prompts in the same rounds."""
    bound: float
    """Lower end of the 95% interval of that ratio, by bootstrap."""
    against: float | None
    """Speed-up over the other engine, on the same prompts in the same rounds; None without one."""
    shares: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class DecodeReport:
    """All runs and their summary."""

    methods: list[str] = field(default_factory=list)
    runs: list[DecodeRun] = field(default_factory=list)
    peer: str | None = None
    """Another engine that answered too; its runs have its name as their method."""

    def lines(self) -> list[DecodeLine]:
        """Lines by setting and method: each group, then all groups; warm rounds separately."""
        found = []
        for setting in dict.fromkeys((r.batch, r.temperature, r.warm) for r in self.runs):
            runs = [r for r in self.runs if (r.batch, r.temperature, r.warm) == setting]
            groups = list(dict.fromkeys(run.group for run in runs))
            for method in [*self.methods, *filter(None, [self.peer])]:
                for group in groups:
                    found.append(self._line(method, [group], group, runs))
                if len(groups) > 1:
                    found.append(self._line(method, groups, "all", runs))
        return found

    def _line(
        self, method: str, groups: Sequence[str], name: str, runs: Sequence[DecodeRun]
    ) -> DecodeLine:
        mine, base, peer = (
            [r for r in runs if r.method == m and r.group in groups]
            for m in (method, self.methods[0], self.peer)
        )
        times = paired_times(base, mine)
        seconds = sum(float(np.median(pairs[:, 1])) for pairs in times.values())
        emitted = sum({(run.group, run.prompts): run.emitted for run in mine}.values())
        verbs = {verb: sum(run.verbs.get(verb, 0.0) for run in mine) for verb in VERBS}

        fewest: dict[tuple[str, tuple[str, ...]], int] = {}
        for run in mine:  # the last round may have been cut off
            portion = run.group, run.prompts
            fewest[portion] = min(fewest.get(portion, run.equal), run.equal)

        def per_group(value: Callable[[list[DecodeRun]], float]) -> float:
            return mean(value([run for run in mine if run.group == group]) for group in groups)

        return DecodeLine(
            method=method,
            group=name,
            batch=mine[0].batch,
            temperature=mine[0].temperature,
            warm=mine[0].warm,
            prompts=sum(len(prompts) for _, prompts in fewest),
            equal=sum(fewest.values()),
            tokens_per_pass=per_group(
                lambda runs: sum(r.emitted for r in runs) / max(1, sum(r.passes for r in runs))
            ),
            nodes_per_pass=sum(run.nodes for run in mine) / max(1, sum(r.passes for r in mine)),
            tokens_per_second=emitted / seconds,
            ratio=speedup(times, groups),
            bound=speedup_bound(times, groups),
            against=speedup(paired_times(peer, mine), groups) if peer else None,
            shares={verb: value / max(sum(verbs.values()), 1e-9) for verb, value in verbs.items()},
        )

    def samples(self) -> list[dict[str, Any]]:
        return [run.to_dict() for run in self.runs]

    def summary(self) -> dict[str, Any]:
        return {"lines": [line.to_dict() for line in self.lines()], "extremes": self.extremes()}

    def extremes(self) -> list[dict[str, Any]]:
        """Mean over groups and lowest group of every speed-up, by setting and method."""
        found, lines = [], self.lines()
        for whole in (line for line in lines if line.group == "all"):
            setting = whole.method, whole.batch, whole.temperature, whole.warm
            mine = [
                line
                for line in lines
                if line.group != "all"
                and (line.method, line.batch, line.temperature, line.warm) == setting
            ]
            for over, name in ((self.methods[0], "ratio"), (self.peer, "against")):
                if over is not None and over != whole.method:
                    lowest, group = min((float(getattr(line, name)), line.group) for line in mine)
                    found.append(
                        {"method": whole.method, "over": over, "batch": whole.batch}
                        | {"temperature": whole.temperature, "warm": whole.warm}
                        | {"mean": getattr(whole, name), "min": lowest, "group": group}
                    )
        return found
