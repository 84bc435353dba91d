"""`Sequence`, the only mutable thing, and the read-only `View` of it that methods get."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from outstride.core.graph import FloatArray, Position, TokenGraph, TokenId, block, chain, empty
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.core.sampling import Draw, Purpose

if TYPE_CHECKING:
    from outstride.core.contracts import Filter, Graft, Grammar, Masking, Method, Vision


class Status(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Table:
    """What one model has cached for one sequence: entries in slots, slots in pages.

    positions[i] is the logical position of entry i. The last `stale` entries are reused although
    they are stale: nothing shares them, and a node at such a position takes its place.
    """

    pages: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    stale: int = 0
    shared: int = 0
    """How many leading pages the prefix tree knows."""
    ordered: bool = True
    """Whether entry i stands at position i, as it does unless tokens were kept out of order."""

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def fresh(self) -> int:
        """How many entries are valid for good."""
        return len(self.positions) - self.stale

    def lacking(self, length: int, block: int | None) -> int:
        """How many positions below `length` lack their entries."""
        if self.ordered and block is None:
            return length - len(self.positions) + self.stale
        return len(self.unread(length, block))

    def unread(self, length: int, block: int | None) -> range | list[int]:
        """Positions below `length` that lack their entries.

        A model that sees in blocks reads whole blocks: the beginning of one belongs to whoever is
        filling it.
        """
        end = length if block is None else length // block * block
        if self.ordered:
            return range(self.fresh, max(end, self.fresh))
        kept = set(self.positions[: self.fresh])
        return [position for position in range(end) if position not in kept]


@dataclass(slots=True)
class Counts:
    """The ledger's line for one sequence."""

    passes: int = 0
    """Target passes that settled at least one token."""
    prompt_passes: int = 0
    """Target passes that only read given tokens."""
    other_passes: int = 0
    """Passes of other models."""
    proposed: int = 0
    accepted: int = 0
    emitted: int = 0
    nodes: int = 0
    reused: int = 0
    """Prompt tokens found in the prefix tree."""
    preempted: int = 0
    drafts: int = 0
    """Passes in which something was drafted."""
    expected: float = 0.0
    """Accepted tokens that the plan expected of the nodes that it granted for what they are worth."""
    sources: dict[str, int] = field(default_factory=dict)
    """Accepted tokens by drafter."""


class Provenance(NamedTuple):
    """Where a token came from."""

    token: int
    step: int
    """The pass that settled it; 0 if the request gave it."""
    source: str
    kind: str
    """drafted, bonus, plain, unmasked or given."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One continuation of one prompt. Only the engine changes it."""

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
    salt: str = ""
    status: Status = Status.WAITING
    finish_reason: str | None = None
    error: Exception | None = None
    tables: dict[str, Table] = field(default_factory=dict)
    block: int | None = None
    """How the target reads its settled tokens: in blocks of this size, or causally."""
    canvas: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """In which order the target read its tokens, if not from left to right: whoever has to read them
    again must do it in the same one."""
    fixed: Mapping[int, int] = field(default_factory=dict)
    """Tokens beyond gaps that the request gave: text around holes."""
    early: dict[int, int] = field(default_factory=dict)
    """In which step a position beyond a gap was settled."""
    painted: bool = False
    """Whether what stands beyond gaps is told after each pass, too."""
    state: Any = None
    grammar: Grammar | None = None
    group: list[Sequence] = field(default_factory=list)
    draws: dict[Purpose, Draw] = field(default_factory=dict)
    """The request's temperature, filters and noise, by purpose."""
    counts: Counts = field(default_factory=Counts)
    trace: list[Provenance] = field(default_factory=list)
    logprobs: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """By position: the token's own first, then the likeliest."""
    prompt_logprobs: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """By position."""
    steps: int = 0
    asleep: int = 0
    """Before it has taken so many steps, its drafter is not asked for a demand."""
    unborn: int = 0
    """Siblings that fork off as soon as the prompt is cached."""
    view: View | None = None
    """What its method sees, made once."""
    watched: bool = True
    """Whether somebody wants to hear of each pass, not only of the end."""
    priority: int = 0
    """Whoever has the lower one is admitted first and preempted last."""
    spoke: float = 0.0
    """When its first token was entered in the ledger."""

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def common(self) -> list[int]:
        """The tokens whose entries of the target it may share with anybody."""
        whole = not self.method.drafter.partial
        return self.tokens if whole else self.tokens[: self.prompt_length]

    def unread(self) -> list[int]:
        """What the target has to read, where it read out of order before."""
        table = self.tables.get(TARGET) or Table()
        kept, known = set(table.positions[: table.fresh]), set(self.order)
        again = [position for position in self.order if position not in kept]
        return again + [p for p in range(len(self.tokens)) if p not in kept and p not in known]


@dataclass(slots=True)
class Setting:
    """What is the same for all sequences of an engine."""

    maskings: Mapping[str, Masking | None] = field(default_factory=dict)
    end_tokens: Collection[int] = ()
    spell: Callable[[int], bytes] | None = None
    vocab_size: int = 0
    grafts: Mapping[str, Graft] = field(default_factory=dict)
    filters: Mapping[str, Filter] = field(default_factory=dict)
    company: int = 1
    """How many of them are under way at this moment."""
    clock: int = 0
    """How many steps the engine has taken."""


NOWHERE = Setting()


class View:
    """What a method may know of its sequence."""

    __slots__ = (
        "_features",
        "_own",
        "_sequence",
        "_setting",
        "_visions",
        "allotted",
        "ask",
        "chunk",
        "layers",
        "limit",
        "prices",
    )

    def __init__(
        self,
        sequence: Sequence,
        visions: Mapping[str, Vision],
        limit: int,
        allotted: int = 0,
        chunk: int = 256,
        features: Mapping[str, Any] | None = None,
        layers: int = 0,
        setting: Setting = NOWHERE,
    ) -> None:
        self._sequence = sequence
        self._setting = setting
        self._visions = visions
        self.allotted = allotted
        """How many given nodes the plan granted in this step."""
        self.ask = True
        """Whether the plan would have a trained part asked in this step."""
        self.prices: tuple[float, ...] = ()
        """What each further node has to promise to be worth its place in this step."""
        self._features = features or {}
        self.limit = limit
        """The sequence never grows beyond this length."""
        self.chunk = chunk
        """How many given nodes another model should read in one round, at the most."""
        self.layers = layers
        """How many layers the target has."""
        self._own: tuple[Any] | None = None

    def with_state(self, state: Any) -> View:
        """The same view for a part of a method, which has a state of its own."""
        view = View(
            self._sequence,
            self._visions,
            self.limit,
            self.allotted,
            self.chunk,
            self._features,
            self.layers,
            self._setting,
        )
        view.ask, view.prices = self.ask, self.prices
        view._own = (state,)
        return view

    @property
    def state(self) -> Any:
        """What `observe` (or `ahead`) returned last."""
        return self._sequence.state if self._own is None else self._own[0]

    @property
    def tokens(self) -> list[int]:
        """Prompt and output, settled without a gap. Do not change it."""
        return self._sequence.tokens

    @property
    def prompt_length(self) -> int:
        return self._sequence.prompt_length

    @property
    def end(self) -> Position:
        """The first position that is not settled (ahead of it, `canvas` may hold some)."""
        return Position(len(self._sequence.tokens))

    @property
    def canvas(self) -> Mapping[int, int]:
        """Tokens settled out of order, beyond a gap."""
        return self._sequence.canvas

    @property
    def params(self) -> SamplingParams:
        return self._sequence.params

    @property
    def seed(self) -> int:
        return self._sequence.seed

    @property
    def index(self) -> int:
        """Which of the request's n samples this is."""
        return self._sequence.index

    @property
    def salt(self) -> str:
        return self._sequence.salt

    @property
    def steps(self) -> int:
        """How many verdicts this sequence has had: its own clock, whatever the company."""
        return self._sequence.steps

    @property
    def clock(self) -> int:
        """How many steps the engine has taken: everybody's clock. No text may depend on it."""
        return self._setting.clock

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must look like."""
        return self._sequence.grammar

    @property
    def vocab_size(self) -> int:
        """How many tokens the target knows; extra rows come behind them."""
        return self._setting.vocab_size

    @property
    def company(self) -> int:
        """How many sequences are under way, this one among them: whoever dawdles holds up all."""
        return self._setting.company

    @property
    def spell(self) -> Callable[[int], bytes] | None:
        """The bytes that a token adds to the text, where the engine can tell."""
        return self._setting.spell

    def masking(self, model: str = TARGET) -> Masking | None:
        """How a model fills in masks; None if it only continues."""
        return self._setting.maskings.get(model)

    def graft(self, name: str) -> Graft:
        """A trained part of the target."""
        return self._setting.grafts[name]

    def filter(self, name: str) -> Filter:
        """A trained judge of the target's guesses."""
        return self._setting.filters[name]

    def block(self, model: str = TARGET) -> int | None:
        """In blocks of which size a model reads settled tokens; None: causally."""
        return self._visions[model].block

    def closing(self, position: int, token: int) -> bool:
        """Whether the answer ends with this token at this position."""
        return token in self.endings(position)

    def endings(self, position: int) -> list[int]:
        """The tokens with which the answer may end at this position."""
        params = self._sequence.params
        if position + 1 - self._sequence.prompt_length < params.min_tokens:
            return []
        ends = [] if params.ignore_eos else list(self._setting.end_tokens)
        return [*ends, *params.stop_token_ids]

    @property
    def siblings(self) -> Iterator[View]:
        """The other samples of the same request."""
        for other in self._sequence.group:
            if other is not self._sequence:
                yield View(other, self._visions, self.limit)

    @property
    def order(self) -> list[int]:
        """In which order the target read settled tokens, if not from left to right."""
        return self._sequence.order

    def kept(self, model: str = TARGET) -> list[int]:
        """Positions whose cache entries a model has, in the order of their slots."""
        table = self._sequence.tables.get(model)
        return list(table.positions) if table else []

    def pending(self, model: str = TARGET) -> int:
        """How many settled tokens a model has not read."""
        if model == TARGET and self._sequence.order:
            return len(self._sequence.unread())
        table = self._sequence.tables.get(model) or Table()
        return table.lacking(len(self._sequence.tokens), self._visions[model].block)

    @property
    def reading(self) -> bool:
        """Whether this step's share of the pass does not reach the end of what is settled."""
        return self.allotted < self.pending()

    def given(self, model: str = TARGET, most: int | None = None) -> TokenGraph:
        """Settled tokens that a model has not read, as a graph: at most `most` of them.

        For the target this is what the plan allotted. They are a chain for causal models and blocks
        for the others.
        """
        tokens, size = self._sequence.tokens, self._visions[model].block
        if most is None:
            most = self.allotted if model == TARGET else len(tokens)
        if model == TARGET and self._sequence.order:
            again = self._sequence.unread()[:most]
            return chain([int(self.token_at(p) or 0) for p in again], positions=again)
        table = self._sequence.tables.get(model) or Table()
        if size is None and table.ordered:
            start = len(table.positions) - table.stale
            return chain(tokens[start : start + most], start)
        unread = table.unread(len(tokens), size)[:most]
        if size is None:
            return chain([tokens[p] for p in unread], positions=unread)
        graph = empty()
        for _, group in groupby(unread, key=lambda position: position // size):
            places = list(group)
            graph = graph.grow(block([tokens[p] for p in places], positions=places))
        return graph

    def feature(self, position: int, model: str = TARGET) -> FloatArray:
        """What the model's pages hold for trained drafters at a kept position."""
        read = self._features[model]
        found: FloatArray = read(self._sequence.tables[model], position)
        return found

    def token_at(self, position: int) -> TokenId | None:
        """The settled token at a position, if it is settled."""
        if 0 <= position < len(self.tokens):
            return TokenId(self.tokens[position])
        token = self.canvas.get(position)
        return None if token is None else TokenId(token)
