"""Plain decoding against a method, token for token, on prompts of the user's choice.

An exact method promises the tokens of plain decoding, alone or in company. Here is where anybody
can hold it to that: all prompts in batches under both, and some of them again one by one. Where the
texts part, one more pass over what they have in common shows how close the two tokens were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from outstride import registry
from outstride.bench import clock
from outstride.bench.prompts import BenchPrompt
from outstride.core.contracts import Acceptor, Exactness, Method, Rounds
from outstride.core.graph import FloatArray, NodeId, Position, TokenId
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.plain import Plain
from outstride.errors import InvalidParams, OutstrideError, UnknownMethod
from outstride.results import Completion, Result, Stats

BASELINE = "plain"


class Spelling(Protocol):
    """The part of a tokenizer that a report needs."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


class Speaker(Protocol):
    """What must be proved speaks through this; `LLM` does."""

    @property
    def tokenizer(self) -> Spelling: ...

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]: ...

    def method(self, spec: str | Method) -> Method: ...

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, method: Method
    ) -> list[Result]: ...


# --- what is found --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Side:
    """What one of the two said where they part: a token, or the end of the answer (None)."""

    token: int | None
    text: str
    logit: float | None
    rank: int | None
    """How many tokens have a higher raw logit."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place at which a method's answer is not the plain one."""

    position: int
    """Counted in output tokens."""
    sample: int
    company: str
    """How the method ran: in a `batch`, or `alone`."""
    plain: Side
    other: Side
    gap: float | None
    """Raw logit of plain's token less that of the method's: near 0 means a tie."""
    before: str
    """The end of what both said until then."""
    finish: tuple[str | None, str | None]


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
class ProofReport:
    """What a proof found."""

    method: str
    exactness: Exactness
    params: SamplingParams
    batch: int
    alone: int
    """How many prompts were run again one by one."""
    cases: list[ProofCase] = field(default_factory=list)

    @property
    def answered(self) -> list[ProofCase]:
        return [case for case in self.cases if case.error is None]

    @property
    def different(self) -> list[ProofCase]:
        return [case for case in self.answered if not case.equal]

    @property
    def equal(self) -> bool:
        return not self.different

    @property
    def broken(self) -> bool:
        """Whether a promise was broken: only an exact method promised equal text."""
        return not self.equal and self.exactness is Exactness.EXACT

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
            "equal": self.equal,
            "prompts": total.prompts,
            "equal_prompts": total.equal,
            "not_answered": len(self.cases) - total.prompts,
            "tokens_per_pass": self.tokens_per_pass,
            "groups": {name: group.to_dict() for name, group in self.groups.items()},
        }


# --- looking at the logits ------------------------------------------------------------------------


class _LookDrafter(Plain):
    """One plain pass whose whole row of raw logits is wanted."""

    def propose(self, view: View, room: int) -> Rounds:
        proposal = yield from super().propose(view, room)
        return proposal.asking(Wants(logits=True))


class _LookAcceptor(Acceptor):
    """Takes the row down and settles the most likely token, which ends the request."""

    name = "look"

    def __init__(self) -> None:
        self.logits: FloatArray | None = None

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        assert scores.logits is not None
        row = self.logits = np.asarray(scores.logits[scores.row(proposal.root)], dtype=np.float32)
        keep = tuple(NodeId(i) for i in range(proposal.given))
        return Verdict(settled={Position(int(view.end)): TokenId(int(row.argmax()))}, keep=keep)


def logits_after(llm: Speaker, tokens: Sequence[int]) -> FloatArray:
    """The raw logits behind a run of tokens, through the same loop as everything else."""
    acceptor = _LookAcceptor()
    method = Method("look", _LookDrafter(), acceptor, Exactness.EXACT)
    llm.generate([list(tokens)], SamplingParams(max_tokens=1), method=method)
    assert acceptor.logits is not None
    return acceptor.logits


# --- the proof ------------------------------------------------------------------------------------


def _answers(
    llm: Speaker, prompts: Sequence[list[int]], params: SamplingParams, method: Method
) -> list[Result]:
    """One result per prompt; a failure stays with its prompt, also where there is only one."""
    try:
        return llm.generate(prompts, params, method=method)
    except OutstrideError as error:
        if len(prompts) != 1:
            raise
        return [Result(list(prompts[0]), error=error)]


def _baseline(judged: Method) -> str:
    """What a method is held to; plain decoding for one that is not registered."""
    try:
        return registry.baseline(judged.spec or judged.name)
    except UnknownMethod:
        return BASELINE


def _batches(count: int, size: int) -> Iterator[range]:
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def _parting(plain: Completion, other: Completion) -> int | None:
    """At which output token two answers part; None if they are the same."""
    pairs = zip(plain.token_ids, other.token_ids, strict=False)
    for i, (a, b) in enumerate(pairs):
        if a != b:
            return i
    if len(plain.token_ids) != len(other.token_ids):
        return min(len(plain.token_ids), len(other.token_ids))
    if (plain.text, plain.finish_reason) != (other.text, other.finish_reason):
        return len(plain.token_ids)
    return None


def _diverge(
    llm: Speaker, prompt: list[int], plain: Completion, other: Completion, at: int, company: str
) -> Divergence:
    said = plain.token_ids[:at]
    tokens = [c.token_ids[at] if at < len(c.token_ids) else None for c in (plain, other)]
    row = None
    if plain.method == BASELINE and any(t is not None for t in tokens):
        row = logits_after(llm, prompt + said)

    def side(token: int | None) -> Side:
        if token is None:
            return Side(None, "", None, None)
        text = llm.tokenizer.decode([token], skip_special=False)
        if row is None:  # on a canvas, the logits depend on the step
            return Side(token, text, None, None)
        logit = float(row[token])
        return Side(token, text, logit, int((row > row[token]).sum()))

    left, right = side(tokens[0]), side(tokens[1])
    gap = None
    if left.logit is not None and right.logit is not None:
        gap = left.logit - right.logit
    return Divergence(
        position=at,
        sample=plain.index,
        company=company,
        plain=left,
        other=right,
        gap=gap,
        before=llm.tokenizer.decode(said)[-60:],
        finish=(plain.finish_reason, other.finish_reason),
    )


def _compare(
    llm: Speaker, case: ProofCase, prompt: list[int], plain: Result, other: Result, company: str
) -> None:
    """Enters into a case whether two results are the same, and if not, where they part."""
    if plain.error is not None and other.error is not None:
        case.error = str(plain.error)
        return
    if plain.error is not None or other.error is not None:
        case.equal = False
        who = "plain" if plain.error is not None else "the method"
        case.failure = f"only {who} failed, in company {company!r}: {plain.error or other.error}"
        return
    for ours, theirs in zip(plain.outputs, other.outputs, strict=True):
        at = _parting(ours, theirs)
        if at is not None:
            case.equal = False
            case.divergences.append(_diverge(llm, prompt, ours, theirs, at, company))


def prove(
    llm: Speaker,
    method: str | Method,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams | None = None,
    *,
    batch: int = 8,
    raw: bool = False,
    alone: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> ProofReport:
    """Runs all prompts under plain and under `method` and compares what they say.

    A method for masked models is compared with what it is exact to instead: the schedule of `steps`.

    Sampling without a seed could not be compared; seed 0 is used then. Prompts that neither can
    answer (too long for the context) are listed and prove nothing.
    """
    if batch < 1 or alone < 0:
        raise InvalidParams("batch must be at least 1 and alone at least 0")
    if not prompts:
        raise InvalidParams("there are no prompts to prove anything with")
    params = params or SamplingParams()
    if params.seed is None:
        params = replace(params, seed=0)
    judged = llm.method(method)
    plain = llm.method(_baseline(judged))
    tokens = [llm.encode(prompt.text, chat=not raw) for prompt in prompts]
    alone = min(alone, len(prompts)) if batch > 1 else 0
    report = ProofReport(
        method=judged.spec or judged.name,
        exactness=judged.exactness,
        params=params,
        batch=batch,
        alone=alone,
        cases=[ProofCase(prompt) for prompt in prompts],
    )
    total, done = 2 * len(prompts) + alone, 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    tick(0)
    references: dict[int, Result] = {}
    for chunk in _batches(len(prompts), batch):
        group = [tokens[i] for i in chunk]
        references.update(zip(chunk, _answers(llm, group, params, plain), strict=True))
        tick(len(chunk))
        for i, result in zip(chunk, _answers(llm, group, params, judged), strict=True):
            case = report.cases[i]
            _compare(llm, case, tokens[i], references[i], result, "batch")
            if case.error is None and case.failure is None:
                case.stats = Stats.total(result.outputs)
                case.plain_stats = Stats.total(references[i].outputs)
                case.tokens = case.stats.emitted
        tick(len(chunk))
    for i in range(alone):
        if report.cases[i].error is not None:
            tick(1)
            continue
        [result] = _answers(llm, [tokens[i]], params, judged)
        _compare(llm, report.cases[i], tokens[i], references[i], result, "alone")
        tick(1)
    if not report.answered:
        raise OutstrideError(f"no prompt could be answered: {report.cases[0].error}")
    return report
