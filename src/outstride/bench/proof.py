"""What a proof found: cases, divergences, counts, and whether a promise was broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outstride.bench import clock
from outstride.bench.chance import ChanceReport
from outstride.bench.prompts import BenchPrompt
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.results import Stats

BATCH, ALONE, MIXED = "batch", "alone", "mixed"
"""How a method ran: beside itself, by itself, or among other methods on few pages."""


@dataclass(frozen=True, slots=True)
class Side:
    """What one of the two said where they part: a token, or the end of the answer (None)."""

    token: int | None
    text: str
    logit: float | None
    """Raw; a log-probability where the logits are all that differs."""
    rank: int | None
    """How many tokens have a higher raw logit."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place at which an answer is not the plain one."""

    position: int
    """Counted in output tokens."""
    sample: int
    company: str
    method: str
    """Who said something else: the method that is judged, or one beside it."""
    plain: Side
    other: Side
    gap: float | None
    """Raw logit of plain's token less that of the method's: near 0 means a tie."""
    before: str
    """The end of what both said until then."""
    finish: tuple[str | None, str | None]
    bits: bool = False
    """Whether the tokens are the same and only the logits behind them are not."""


@dataclass(slots=True)
class ProofCase:
    """One prompt under both."""

    prompt: BenchPrompt
    equal: bool = True
    tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    plain_stats: Stats = field(default_factory=Stats)
    divergences: list[Divergence] = field(default_factory=list)
    failure: str | None = None
    """What went wrong, if only one of the two could answer."""
    error: str | None = None
    """Why neither could answer, if neither could: such a prompt proves nothing."""

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
    """What the prompts of one group, or all of them, add up to."""

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
class Company:
    """What there was in the run among other methods."""

    methods: tuple[str, ...] = ()
    pages: int = 0
    """How many pages of the target's cache were left for it."""
    preempted: int = 0


@dataclass(slots=True)
class ProofReport:
    """What a proof found."""

    method: str
    exactness: Exactness
    baseline: str
    """What it was held to: plain decoding, or the schedule that it is exact to."""
    params: SamplingParams
    batch: int
    alone: int
    """How many prompts were run again one by one."""
    cases: list[ProofCase] = field(default_factory=list)
    mixed: Company | None = None
    chance: ChanceReport | None = None
    """For methods that promise a distribution: what the test says of it."""
    integrity: str | None = None
    """What is wrong with the cache, if something is."""

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
    def foundation(self) -> bool:
        """Whether plain decoding differs from itself: then no method is to blame."""
        found = (d for case in self.different for d in case.divergences)
        return any(divergence.method == self.baseline for divergence in found)

    @property
    def broken(self) -> bool:
        """Whether a promise was broken. A lossy method made none; the cache made one to all."""
        if self.integrity is not None or self.foundation:
            return True
        if self.exactness is Exactness.LOSSY:
            return False
        if self.chance is not None:
            failed = any(case.failure is not None for case in self.answered)
            return failed or not self.chance.holds
        return not self.equal

    @property
    def total(self) -> GroupCounts:
        return GroupCounts.of(self.answered)

    @property
    def groups(self) -> dict[str, GroupCounts]:
        """By group, in the order in which groups first appear."""
        found: dict[str, list[ProofCase]] = {}
        for case in self.answered:
            found.setdefault(case.prompt.group, []).append(case)
        return {group: GroupCounts.of(cases) for group, cases in found.items()}

    @property
    def tokens_per_pass(self) -> float:
        """The mean over groups, so that no kind of task counts for more by having more prompts."""
        return clock.mean(group.tokens_per_pass for group in self.groups.values())

    def samples(self) -> list[dict[str, Any]]:
        return [case.to_dict() for case in self.cases]

    def summary(self) -> dict[str, Any]:
        total = self.total
        return {
            "method": self.method,
            "exactness": self.exactness.value,
            "baseline": self.baseline,
            "equal": self.equal if self.chance is None else None,
            "broken": self.broken,
            "prompts": total.prompts,
            "equal_prompts": total.equal,
            "not_answered": len(self.cases) - total.prompts,
            "tokens_per_pass": self.tokens_per_pass,
            "groups": {name: group.to_dict() for name, group in self.groups.items()},
            "mixed": None if self.mixed is None else asdict(self.mixed),
            "chance": None if self.chance is None else self.chance.to_dict(),
            "integrity": self.integrity,
        }
