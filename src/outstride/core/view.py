"""`View`: the read-only access to a sequence that drafters and acceptors get."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from outstride.core.block_table import BlockTable
from outstride.core.graph import FloatArray, Position, TokenGraph, TokenId, block, chain, empty
from outstride.core.proposal import TARGET

if TYPE_CHECKING:
    from outstride.core.contracts import AttentionPattern, Demand, MaskedSpec, TrainedFilter
    from outstride.core.draft_heads import DraftHead
    from outstride.core.sequence import Sequence


@dataclass(slots=True)
class EngineContext:
    """Everything that is the same for all sequences of an engine. The engine updates it."""

    masked_specs: Mapping[str, MaskedSpec | None] = field(default_factory=dict)
    end_tokens: Collection[int] = ()
    token_to_bytes: Callable[[int], bytes] | None = None
    vocab_size: int = 0
    draft_heads: Mapping[str, DraftHead] = field(default_factory=dict)
    filters: Mapping[str, TrainedFilter] = field(default_factory=dict)
    num_running: int = 1
    """How many sequences run in this step."""
    step: int = 0
    """How many steps the engine has taken."""


NO_ENGINE = EngineContext()
"""The context of views that belong to no engine, as in unit tests."""


class View:
    """What a method may know of its sequence. It changes nothing.

    Plain attributes hold what stays the same for the life of the sequence, and what the plan of the
    current step granted. `tokens` and `canvas` are the sequence's own containers: do not change them.
    """

    __slots__ = (
        "_context",
        "_features",
        "_own",
        "_patterns",
        "_sequence",
        "allotted",
        "canvas",
        "chunk",
        "demand",
        "grammar",
        "index",
        "key",
        "layers",
        "limit",
        "marginal_costs",
        "params",
        "prompt_length",
        "seed",
        "token_to_bytes",
        "tokens",
        "use_draft_head",
        "vocab_size",
    )

    def __init__(
        self,
        sequence: Sequence,
        patterns: Mapping[str, AttentionPattern],
        limit: int,
        allotted: int = 0,
        chunk: int = 256,
        features: Mapping[str, Any] | None = None,
        layers: int = 0,
        context: EngineContext = NO_ENGINE,
    ) -> None:
        self._sequence = sequence
        self._context = context
        self._patterns = patterns
        self._features = features or {}
        self._own: tuple[Any] | None = None
        self.allotted = allotted
        """How many given nodes the plan granted in this step."""
        self.use_draft_head = True
        """Whether the plan finds a pass of the draft head worth its cost in this step."""
        self.demand: Demand | None = None
        """The drafter's last answer to `demand`."""
        self.marginal_costs: tuple[float, ...] = ()
        """For each further node, the expected accepted tokens that make it worth its cost."""
        self.limit = limit
        """The sequence never grows beyond this length."""
        self.chunk = chunk
        """The largest number of given nodes that another model should prefill in one round."""
        self.layers = layers
        """How many layers the target has."""
        self.tokens = sequence.tokens
        """Prompt and output, settled without a gap."""
        self.canvas: Mapping[int, int] = sequence.canvas
        """Tokens settled out of order, beyond a gap, by position."""
        self.prompt_length = sequence.prompt_length
        self.params = sequence.params
        self.seed = sequence.seed
        self.index = sequence.index
        """Which of the request's n samples this is."""
        self.key = sequence.key
        """Under which key it shares what it learns with other requests."""
        self.grammar = sequence.grammar
        """The structured output that the request asks for."""
        self.vocab_size = context.vocab_size
        """How many tokens the target has; extra embedding rows follow them."""
        self.token_to_bytes = context.token_to_bytes
        """The bytes that a token adds to the text; None where the engine has no tokenizer."""

    def with_state(self, state: Any) -> View:
        """A view of the same sequence for one part of a method, which has its own state."""
        view = View(
            self._sequence,
            self._patterns,
            self.limit,
            self.allotted,
            self.chunk,
            self._features,
            self.layers,
            self._context,
        )
        view.use_draft_head, view.marginal_costs = self.use_draft_head, self.marginal_costs
        view._own = (state,)
        return view

    @property
    def state(self) -> Any:
        """What `observe` (or `draft_ahead`) returned last."""
        return self._sequence.state if self._own is None else self._own[0]

    @property
    def end(self) -> Position:
        """The first position that is not settled (`canvas` may hold later ones)."""
        return Position(len(self.tokens))

    @property
    def steps(self) -> int:
        """How many verdicts this sequence has had: a clock that no other request influences."""
        return self._sequence.steps

    @property
    def order(self) -> list[int]:
        """The order in which the target computed settled tokens, if not from left to right."""
        return self._sequence.order

    @property
    def siblings(self) -> Iterator[View]:
        """The other samples of the same request."""
        for other in self._sequence.group:
            if other is not self._sequence:
                yield View(other, self._patterns, self.limit)

    # --- the engine -------------------------------------------------------------------------------

    @property
    def engine_step(self) -> int:
        """How many steps the engine has taken, for all requests. No text may depend on it."""
        return self._context.step

    @property
    def num_running(self) -> int:
        """How many sequences are in the batch, this one included: a slow drafter delays them all."""
        return self._context.num_running

    def masked_spec(self, model: str = TARGET) -> MaskedSpec | None:
        """How a model fills in masks; None if it is autoregressive only."""
        return self._context.masked_specs.get(model)

    def draft_head(self, name: str) -> DraftHead:
        """A draft head that is attached to the target."""
        return self._context.draft_heads[name]

    def filter(self, name: str) -> TrainedFilter:
        """A trained filter that is attached to the target."""
        return self._context.filters[name]

    def block(self, model: str = TARGET) -> int | None:
        """The size of the blocks in which a model computes settled tokens; None: causally."""
        return self._patterns[model].block

    # --- tokens -----------------------------------------------------------------------------------

    def token_at(self, position: int) -> TokenId | None:
        """The settled token at a position, or None."""
        if 0 <= position < len(self.tokens):
            return TokenId(self.tokens[position])
        token = self.canvas.get(position)
        return None if token is None else TokenId(token)

    def closing(self, position: int, token: int) -> bool:
        """Whether this token at this position ends the answer."""
        return token in self.endings(position)

    def endings(self, position: int) -> list[int]:
        """The tokens that end the answer at this position."""
        params = self.params
        if position + 1 - self.prompt_length < params.min_tokens:
            return []
        ends = [] if params.ignore_eos else list(self._context.end_tokens)
        return [*ends, *params.stop_token_ids]

    # --- the KV cache -----------------------------------------------------------------------------

    def kept(self, model: str = TARGET) -> list[int]:
        """Positions whose KV a model has cached, in the order of their slots."""
        table = self._sequence.tables.get(model)
        return list(table.positions) if table else []

    def num_uncomputed(self, model: str = TARGET) -> int:
        """How many settled tokens a model has not computed yet."""
        if model == TARGET and self._sequence.order:
            return len(self._sequence.uncomputed())
        table = self._sequence.tables.get(model) or BlockTable()
        return table.num_uncomputed(len(self.tokens), self._patterns[model].block)

    def given(self, model: str = TARGET, max_nodes: int | None = None) -> TokenGraph:
        """Settled tokens that a model has not computed, as a graph of at most `max_nodes` nodes.

        For the target the default is what the plan allotted. They form a chain for a causal model and
        blocks for a model with block attention.
        """
        tokens, size = self.tokens, self._patterns[model].block
        if max_nodes is None:
            max_nodes = self.allotted if model == TARGET else len(tokens)
        if model == TARGET and self._sequence.order:
            again = self._sequence.uncomputed()[:max_nodes]
            return chain([int(self.token_at(p) or 0) for p in again], positions=again)
        table = self._sequence.tables.get(model) or BlockTable()
        if size is None and table.ordered:
            start = len(table.positions) - table.stale
            return chain(tokens[start : start + max_nodes], start)
        uncomputed = table.uncomputed(len(tokens), size)[:max_nodes]
        if size is None:
            return chain([tokens[p] for p in uncomputed], positions=uncomputed)
        graph = empty()
        for _, group in groupby(uncomputed, key=lambda position: position // size):
            places = list(group)
            graph = graph.grow(block([tokens[p] for p in places], positions=places))
        return graph

    def feature(self, position: int, model: str = TARGET) -> FloatArray:
        """The auxiliary hidden states that a model stores for draft heads, at a kept position."""
        read = self._features[model]
        found: FloatArray = read(self._sequence.tables[model], position)
        return found
