"""The report of a proof: cases, divergences, counts, and whether a method broke its declaration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outstride.bench import clock
from outstride.bench.chi_square import DistributionReport
from outstride.bench.prompts import BenchPrompt
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.results import Stats

BATCH, ALONE, MIXED = "batch", "alone", "mixed"
"""Batch contexts: in a batch of the same method, alone, or among other methods on few pages."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a divergence: a token, or the end of the answer (None)."""

    token: int | None
    text: str
    logit: float | None
    """Raw logit; a log-probability where only the logits differ."""
    rank: int | None
    """Number of tokens with a higher raw logit."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which an answer differs from the reference."""

    position: int
    """Index of the output token."""
    sample: int
    batch_context: str
    method: str
    """The method whose answer differs: the one under test, or another one in its batch."""
    plain: Side
    other: Side
    logit_difference: float | None
    """Raw logit of plain's token minus that of the method's token: near 0 means a tie."""
    before: str
    """The last characters of the common text before the divergence."""
    finish: tuple[str | None, str | None]
    bits: bool = False
    """True if the tokens are equal and only their log-probabilities differ."""


@dataclass(slots=True)
class ProofCase:
    """One prompt under the reference and under the method."""

    prompt: BenchPrompt
    equal: bool = True
    tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    plain_stats: Stats = field(default_factory=Stats)
    divergences: list[Divergence] = field(default_factory=list)
    failure: str | None = None
    """The error, if only one of the two could answer."""
    error: str | None = None
    """The error, if neither could answer: such a prompt proves nothing."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.prompt.id,
            "group": self.prompt.group,
            "equal": self.equal,
            "tokens": self.tokens,
            "stats": self.stats.to_dict(),
            "plain_stats": self.plain_stats.to_dict(),
            "divergences": [asdict(divergence) for divergence in self.divergences],
            "failure": self.failure,
            "error": self.error,
        }


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Sums over the prompts of one group, or of all."""

    prompts: int
    equal: int
    emitted: int
    passes: int
    proposed: int
    accepted: int

    @property
    def tokens_per_pass(self) -> float:
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def acceptance(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0

    @classmethod
    def of(cls, cases: Sequence[ProofCase]) -> GroupCounts:
        def total(name: str) -> int:
            return sum(int(getattr(case.stats, name)) for case in cases)

        return cls(
            prompts=len(cases),
            equal=sum(case.equal for case in cases),
            emitted=total("emitted"),
            passes=total("passes"),
            proposed=total("proposed"),
            accepted=total("accepted"),
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tokens_per_pass": self.tokens_per_pass}


@dataclass(slots=True)
class MixedBatch:
    """The setup of the run among other methods."""

    methods: tuple[str, ...] = ()
    pages: int = 0
    """Pages of the target's KV cache that were left for it."""
    preempted: int = 0


@dataclass(slots=True)
class ProofReport:
    """The result of a proof."""

    method: str
    exactness: Exactness
    baseline: str
    """What the method is compared with: plain decoding, or the schedule that it is exact to."""
    params: SamplingParams
    batch: int
    alone: int
    """Number of prompts that ran again one by one."""
    cases: list[ProofCase] = field(default_factory=list)
    mixed: MixedBatch | None = None
    distribution: DistributionReport | None = None
    """Test results of a method that is declared exact in distribution."""
    rounding: bool = False
    """Whether the model itself is exact up to rounding only: rows of a batch influence each other."""
    integrity: str | None = None
    """What is wrong with the KV cache, if anything."""

    @property
    def answered(self) -> list[ProofCase]:
        return [case for case in self.cases if case.error is None]

    @property
    def different(self) -> list[ProofCase]:
        return [case for case in self.answered if not case.equal]

    @property
    def equal(self) -> bool:
        return not self.different and self.integrity is None

    @property
    def baseline_differs(self) -> bool:
        """Whether the baseline differs from itself: then the fault lies below the method."""
        found = (d for case in self.different for d in case.divergences)
        return any(divergence.method == self.baseline for divergence in found)

    @property
    def broken(self) -> bool:
        """Whether a declaration was broken. A lossy method declares none; cache integrity holds for
        all.
        """
        if self.integrity is not None:
            return True
        if self.rounding:
            return any(case.failure is not None for case in self.answered)
        if self.baseline_differs:
            return True
        if self.exactness is Exactness.LOSSY:
            return False
        if self.distribution is not None:
            failed = any(case.failure is not None for case in self.answered)
            return failed or not self.distribution.holds
        return not self.equal

    @property
    def total(self) -> GroupCounts:
        return GroupCounts.of(self.answered)

    @property
    def groups(self) -> dict[str, GroupCounts]:
        """Counts by group, in the order in which groups first occur."""
        found: dict[str, list[ProofCase]] = {}
        for case in self.answered:
            found.setdefault(case.prompt.group, []).append(case)
        return {group: GroupCounts.of(cases) for group, cases in found.items()}

    @property
    def tokens_per_pass(self) -> float:
        """The mean over groups, so that a group does not count more by having more prompts."""
        return clock.mean(group.tokens_per_pass for group in self.groups.values())

    def samples(self) -> list[dict[str, Any]]:
        return [case.to_dict() for case in self.cases]

    def summary(self) -> dict[str, Any]:
        total = self.total
        return {
            "method": self.method,
            "exactness": self.exactness.value + (" up to rounding" if self.rounding else ""),
            "baseline": self.baseline,
            "equal": self.equal if self.distribution is None else None,
            "broken": self.broken,
            "prompts": total.prompts,
            "equal_prompts": total.equal,
            "not_answered": len(self.cases) - total.prompts,
            "tokens_per_pass": self.tokens_per_pass,
            "groups": {name: group.to_dict() for name, group in self.groups.items()},
            "mixed": None if self.mixed is None else asdict(self.mixed),
            "distribution": None if self.distribution is None else self.distribution.to_dict(),
            "integrity": self.integrity,
        }
