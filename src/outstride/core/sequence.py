"""`Sequence`: one continuation of one prompt, the only mutable object that methods are about."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from outstride.core.block_table import BlockTable
from outstride.core.params import SamplingParams
from outstride.core.pooling import PooledStates
from outstride.core.prefix_key import ANY, PrefixKey
from outstride.core.proposal import TARGET
from outstride.core.sampling import Purpose, SamplingSpec
from outstride.core.view import EngineContext, View

if TYPE_CHECKING:
    from outstride.core.contracts import Grammar, Method

__all__ = [
    "BlockTable",
    "EngineContext",
    "Provenance",
    "Sequence",
    "SequenceCounts",
    "Status",
    "View",
]


class Status(enum.Enum):
    """The life of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class SequenceCounts:
    """What the ledger counts, for one sequence or for a whole engine."""

    passes: int = 0
    """Target passes that settled at least one token."""
    prompt_passes: int = 0
    """Target passes that only prefilled."""
    other_passes: int = 0
    """Passes of other models."""
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    nodes: int = 0
    reused: int = 0
    """Prompt tokens found in the prefix cache."""
    preempted: int = 0
    drafts: int = 0
    """Passes in which something was drafted."""
    expected: float = 0.0
    """Accepted tokens that the plan expected from the nodes that it granted by expected gain."""
    sources: dict[str, int] = field(default_factory=dict)
    """Accepted tokens by drafter."""


class Provenance(NamedTuple):
    """How one output token came about."""

    token: int
    step: int
    """The pass that settled it; 0 if the request itself contained it."""
    source: str
    kind: str
    """drafted, bonus, plain, unmasked or given."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of one prompt. Only the engine changes it; methods get a `View`."""

    id: int
    request: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    seed: int
    method: Method
    limit: int
    """The sequence never grows beyond this length."""
    index: int = 0
    key: PrefixKey = ANY
    """Under which key it shares KV of the target, and what its drafter learns, with other requests."""
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: Exception | None = None
    tables: dict[str, BlockTable] = field(default_factory=dict)
    canvas: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """The order in which the target computed its tokens, if not from left to right. A recomputation
    after preemption uses the same order, so that it produces the same KV."""
    fixed: Mapping[int, int] = field(default_factory=dict)
    """Tokens beyond gaps that the request contains: the text around infilling spans, by position."""
    settled_at: dict[int, int] = field(default_factory=dict)
    """The step in which a position beyond a gap was settled."""
    stream_canvas: bool = False
    """Whether the tokens beyond gaps are published after each pass, too."""
    state: Any = None
    grammar: Grammar | None = None
    group: list[Sequence] = field(default_factory=list)
    sampling: dict[Purpose, SamplingSpec] = field(default_factory=dict)
    """The request's temperature, filters and noise, by purpose."""
    counts: SequenceCounts = field(default_factory=SequenceCounts)
    trace: list[Provenance] = field(default_factory=list)
    logprobs: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """By position: first the token itself, then the most likely ones."""
    prompt_logprobs: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """By position."""
    pooled: PooledStates | None = None
    """For requests that ask for an embedding of the prompt."""
    steps: int = 0
    draft_backoff_until: int = 0
    """Until it has taken this many steps, the drafter is neither asked for a demand nor notified."""
    pending_forks: int = 0
    """How many siblings fork off as soon as the prompt is cached."""
    view: View | None = None
    """What its method sees. The engine creates it once."""
    streaming: bool = True
    """Whether progress is published after each pass, not only at the end."""
    token_to_bytes: Callable[[int], bytes] | None = None
    """Detokenizes its output; None: the engine's default, which leaves special tokens out."""
    priority: int = 0
    """Sequences with lower values are admitted first and preempted last."""
    first_token_time: float = 0.0
    """When its first token was counted in the ledger."""

    @property
    def block(self) -> int | None:
        """The target computes settled tokens in blocks of this size; None: causally."""
        return self.key.pattern.block

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def shareable(self) -> list[int]:
        """The tokens whose KV may be shared through the prefix cache."""
        whole = not self.method.drafter.partial_kv
        return self.tokens if whole else self.tokens[: self.prompt_length]

    def uncomputed(self) -> list[int]:
        """The positions that the target must compute, where it computed out of order before."""
        table = self.tables.get(TARGET) or BlockTable()
        kept, known = set(table.positions[: table.valid]), set(self.order)
        again = [position for position in self.order if position not in kept]
        return again + [p for p in range(len(self.tokens)) if p not in kept and p not in known]
