"""The results of a request: `Result`, its `Completion`s, and the `Chunk`s of a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from outstride.core.sequence import Provenance, Sequence, SequenceCounts


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability under the raw logits, and the most likely tokens."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stats:
    """What an answer cost. `tokens_per_pass` counts the passes that emitted at least one token.

    prompt_passes: passes that only prefilled; other_passes: passes of draft models and heads.
    proposed, accepted: drafted tokens; nodes: all nodes of the target's passes.
    reused: prompt tokens found in the prefix cache.
    seconds, first_token_seconds: latency, and time to first token (TTFT).
    """

    passes: int = 0
    prompt_passes: int = 0
    other_passes: int = 0
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    nodes: int = 0
    reused: int = 0
    preempted: int = 0
    drafts: int = 0
    """Passes in which something was drafted."""
    expected: float = 0.0
    """Accepted tokens that `auto` expected from its drafts."""
    sources: dict[str, int] = field(default_factory=dict)
    """Accepted tokens by drafter."""
    seconds: float = 0.0
    first_token_seconds: float = 0.0

    @classmethod
    def of(cls, counts: SequenceCounts, seconds: float, first: float) -> Stats:
        values = {name: getattr(counts, name) for name in SequenceCounts.__slots__}
        return cls(**values, seconds=seconds, first_token_seconds=first)

    @classmethod
    def total(cls, parts: Iterable[Completion]) -> Stats:
        """The total of answers that ran at the same time; seconds are those of the slowest one."""
        stats = [part.stats for part in parts]
        values: dict[str, Any] = {
            name: sum(getattr(s, name) for s in stats)
            for name in SequenceCounts.__slots__
            if name != "sources"
        }
        sources = sum((Counter(s.sources) for s in stats), Counter[str]())
        return cls(
            **values,
            sources=dict(sources),
            seconds=max((s.seconds for s in stats), default=0.0),
            first_token_seconds=min((s.first_token_seconds for s in stats), default=0.0),
        )

    @property
    def tokens_per_pass(self) -> float:
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.emitted / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "tokens_per_pass": self.tokens_per_pass,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(slots=True)
class Completion:
    """One answer to a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    stats: Stats = field(default_factory=Stats)
    trace: list[Provenance] | None = None
    seed: int = 0
    index: int = 0
    method: str = "plain"

    def to_dict(self) -> dict[str, Any]:
        trace = None if self.trace is None else [row._asdict() for row in self.trace]
        return asdict(self) | {"stats": self.stats.to_dict(), "trace": trace}


@dataclass(slots=True)
class Result:
    """The answers to one prompt. `text`, `token_ids` and so on are those of the first answer.

    `error` is the reason why there is none. Other prompts of the same list are not affected.
    """

    prompt_token_ids: list[int]
    outputs: list[Completion] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: Exception | None = None

    @property
    def _first(self) -> Completion:
        if self.error is not None and not self.outputs:
            raise self.error
        return self.outputs[0]

    @property
    def text(self) -> str:
        return self._first.text

    @property
    def token_ids(self) -> list[int]:
        return self._first.token_ids

    @property
    def finish_reason(self) -> str | None:
        return "error" if self.error is not None else self._first.finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self._first.logprobs

    @property
    def stats(self) -> Stats:
        return self._first.stats

    @property
    def trace(self) -> list[Provenance] | None:
        return self._first.trace

    @property
    def seed(self) -> int:
        return self._first.seed

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_token_ids": self.prompt_token_ids,
            "outputs": [output.to_dict() for output in self.outputs],
            "prompt_logprobs": self.prompt_logprobs
            and [row and asdict(row) for row in self.prompt_logprobs],
            "error": None if self.error is None else str(self.error),
        }


@dataclass(slots=True)
class Chunk:
    """One chunk of a stream: what one pass added to one answer.

    The last chunk of an answer has its `completion`; the trace covers the chunk's own tokens.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    trace: list[Provenance] | None = None
    completion: Completion | None = None
    canvas: dict[int, int] | None = None
    """Tokens beyond gaps, by position in the answer, for streams with `canvas`."""

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids or self.completion)

    @property
    def finish_reason(self) -> str | None:
        return self.completion.finish_reason if self.completion else None


@dataclass(frozen=True, slots=True)
class Filled:
    """A text whose gaps are filled in; `holes` has the text of each gap."""

    text: str
    holes: list[str]
    completion: Completion


def _logprob(row: tuple[tuple[int, float], ...]) -> TokenLogprob:
    (token, value), *top = row
    return TokenLogprob(token, value, dict(top))


def completion_of(
    sequence: Sequence, text: str, seconds: float, first: float, *, trace: bool
) -> Completion:
    """The completion of a finished sequence."""
    logprobs = None
    if sequence.params.logprobs is not None:
        end = len(sequence.tokens)  # a masked model may have settled tokens after the end
        rows = sorted(sequence.logprobs.items())
        logprobs = [_logprob(row) for position, row in rows if position < end]
    return Completion(
        text=text,
        token_ids=sequence.output,
        finish_reason=sequence.finish_reason,
        logprobs=logprobs,
        stats=Stats.of(sequence.counts, seconds, first),
        trace=list(sequence.trace) if trace else None,
        seed=sequence.seed,
        index=sequence.index,
        method=sequence.method.spec or sequence.method.name,
    )


def prompt_logprobs_of(sequence: Sequence) -> list[TokenLogprob | None] | None:
    """One item per prompt token; None for the first, which no token precedes."""
    if sequence.params.prompt_logprobs is None:
        return None
    rows = sequence.prompt_logprobs
    return [_logprob(rows[i]) if i in rows else None for i in range(sequence.prompt_length)]
