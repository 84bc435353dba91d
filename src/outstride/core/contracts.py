"""The contracts: what drafters, acceptors, methods, grammars and models give to the engine."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np

from outstride.core.block_table import BlockTable
from outstride.core.draft_heads import DraftHead
from outstride.core.draft_tree import DraftTree
from outstride.core.graph import BoolArray, FloatArray, IntArray, NodeId, TokenGraph
from outstride.core.proposal import DEFAULT_WANTS, Proposal, Scores, Verdict, Wants
from outstride.core.recurrent import StatePass, StateSpec, StateUpdate
from outstride.core.view import View

Rounds: TypeAlias = Generator[Proposal, Scores, Proposal]
"""Yields proposals for other models, receives their scores, returns the proposal for the target."""
DraftRounds: TypeAlias = Generator[Proposal, Scores, DraftTree]
"""Yields proposals for other models, receives their scores, returns a draft tree."""


class Exactness(enum.Enum):
    """What a method guarantees about its text."""

    EXACT = "exact"
    """Token for token the text of plain decoding, or of the method that `Method.exact_to` names."""
    DISTRIBUTION = "distribution"
    """Other tokens, sampled from the same distribution."""
    LOSSY = "lossy"
    """May change the text; never chosen for the user."""


@dataclass(frozen=True, slots=True)
class Demand:
    """How many nodes beyond the given ones a drafter can use, and what it expects of them.

    The plan grants at least `min_nodes` or delays the sequence, and at most `max_nodes`. `gain` is
    the expected number of accepted tokens; scarce nodes go to the drafts with the best gain per node.

    A drafter that leaves its size to the plan states the expected gain of each further node instead
    (`gains`, falling). The plan grants as many nodes as are worth their cost in this pass. If the
    drafter can run a draft head first, `gains_with_head` states the gains after that; the plan decides
    whether they are worth a pass of the head. With `fixed_length` the draft is then as long as
    `gains_with_head` in any case, because the step after a draft of constant length can be launched
    earlier.

    `prefill_until`: settled tokens are computed up to this position only; the ones after it cannot go
    through the same pass. `skip_steps`: for how many steps, this one included, the drafter backs off;
    until then the engine neither asks it for a demand nor calls `observe`. `prepared`: whatever the
    drafter found out while it answered; the engine hands it back as `View.demand`.
    """

    min_nodes: int = 0
    max_nodes: int = 0
    gain: float = 0.0
    gains: tuple[float, ...] = ()
    gains_with_head: tuple[float, ...] = ()
    fixed_length: bool = False
    prefill_until: int | None = None
    skip_steps: int = 0
    prepared: Any = None


class Drafter:
    """Proposes tokens. It holds no state of a sequence: that is what `observe` returns.

    A subclass overrides some of `demand`, `draft_tree`, `propose`, `draft_ahead` and `observe`. Which
    ones is recorded when the class is defined (`has_demand` and so on), so that the engine skips calls
    that would do nothing. Each of them answers without changing anything but what the drafter itself
    remembers across requests.
    """

    name: str
    models: tuple[str, ...] = ()
    """The models, besides the target, that it runs."""
    draft_heads: tuple[str, ...] = ()
    """The draft heads of the target that it runs."""
    head_kind: str = ""
    """The training recipe of the draft heads that it can run."""
    head_on_draft_model: bool = False
    """Whether its draft head is attached to the draft model and not to the target."""
    wants: Wants = DEFAULT_WANTS
    """What it needs from the target's pass, besides the tokens."""
    cost_aware: bool = False
    """Whether it leaves its size to the plan, which then needs a measured cost of passes."""
    input_tokens: tuple[int, ...] = ()
    """Tokens that its options put into graphs; they must be in the vocabulary."""
    masked_models: tuple[str, ...] = ()
    """The models, perhaps including the target, that fill in masks for it. Such a model computes
    settled tokens with its own attention pattern; all other models compute them causally."""
    layer_ranges: bool = False
    """Whether it runs some layers of the target without the others. A recurrent state does not allow
    that: all layers advance together."""
    partial_kv: bool = False
    """Whether it leaves KV after the prompt that some layers lack. That KV is never shared."""

    has_demand: ClassVar[bool] = False
    """Whether it overrides `demand`. Set by `__init_subclass__`, like the flags below."""
    own_tree: ClassVar[bool] = False
    """Whether it overrides `draft_tree`."""
    own_proposal: ClassVar[bool] = False
    """Whether it overrides `propose`. If not, its proposal is its draft tree below the given nodes."""
    drafts_ahead: ClassVar[bool] = False
    """Whether it overrides `draft_ahead`."""
    observes: ClassVar[bool] = False
    """Whether it overrides `observe`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Records which methods a subclass overrides, itself or through its bases."""
        super().__init_subclass__(**kwargs)
        cls.has_demand = cls.demand is not Drafter.demand
        cls.own_tree = cls.draft_tree is not Drafter.draft_tree
        cls.own_proposal = cls.propose is not Drafter.propose
        cls.drafts_ahead = cls.draft_ahead is not Drafter.draft_ahead
        cls.observes = cls.observe is not Drafter.observe

    def unsupported_reason(self, pattern: AttentionPattern, spec: MaskedSpec | None) -> str | None:
        """Why it cannot work with a target of this kind; None if it can."""
        return None

    def kv_needed(self, limit: int, pattern: AttentionPattern) -> int:
        """The largest number of slots of the target's KV cache that `limit` tokens may need at once."""
        return limit

    @property
    def prunable(self) -> bool:
        """Whether it proposes its draft tree and nothing else, so that nodes of it may be left out.

        A class whose own `propose` adds no nodes may declare `prunable = True`.
        """
        return self.own_tree and not (self.own_proposal or self.drafts_ahead)

    def demand(self, view: View) -> Demand:
        """Called before planning. It must not change anything: a plan may be discarded."""
        return Demand()

    def on_backoff(self, view: View, steps: int) -> None:
        """Called once its demand to skip `steps` steps is granted: it may update its state."""

    @classmethod
    def head_kinds(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The kinds of draft head that it can use with these options, the default one first."""
        return (cls.head_kind,)

    def draft_tree(self, view: View, budget: int) -> DraftRounds:
        """At most `budget` tokens that may follow, as a tree.

        Drafters whose nodes are a plain tree of tokens implement this and nothing else; `mix` and
        `auto` can join several of them. A drafter that runs no model yields nothing.
        """
        yield from ()
        return DraftTree()

    def propose(self, view: View, budget: int) -> Rounds:
        """The proposal for the target: `view.given()` and at most `budget` further nodes.

        This default builds the proposal from `draft_tree`; only drafters whose graph is no plain tree
        override it. With budget 0 (the prompt is not prefilled yet) it returns the given nodes alone;
        an override may use the step to prefill its own model. A drafter runs a model only by yielding
        a proposal for it. Later rounds of one step continue the graph of earlier ones, or survivors of
        it that see no other node; only new nodes and new layers are computed.
        """
        tree = (yield from self.draft_tree(view, budget)) if budget > 0 else DraftTree()
        return tree.proposal(view, self.wants)

    def draft_ahead(
        self, view: View, proposal: Proposal
    ) -> Generator[Proposal, Scores, Any] | None:
        """Rounds of other models while the target runs; what they return becomes the state."""
        return None

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Any:
        """The new state, after the verdict is committed."""
        return view.state


class Acceptor(ABC):
    """Decides what a pass settles. Verifiers and unmaskers are both acceptors."""

    name: str

    @abstractmethod
    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        """The verdict on one proposal. The engine then cuts it at stop rules and limits."""


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter and an acceptor under a name, and what they guarantee together."""

    name: str
    drafter: Drafter
    acceptor: Acceptor
    exactness: Exactness
    exact_to: str = "plain"
    """Whose text an exact method returns; for masked models it is the text of a schedule."""
    spec: str = ""
    """As the user wrote it: `name` or `name:key=value,…`."""


class Grammar(Protocol):
    """The structured output of a request. Pure: drafts query paths that may never be taken."""

    def allowed(self, output: Sequence[int]) -> BoolArray | None:
        """A mask over the vocabulary for the token after this output; None: any token."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """How a model's tokens attend to each other: causally, in blocks, or all to all."""

    block: int | None = None

    @property
    def name(self) -> str:
        return "causal" if self.block is None else f"block({self.block})"


CAUSAL = AttentionPattern()
FULL = AttentionPattern(block=1 << 30)


@dataclass(frozen=True, slots=True)
class MaskedSpec:
    """How a model fills in masks.

    token: the input id of a mask (a row of the vocabulary, or an extra row after it).
    block: how many mask positions see each other; None: all of them, a full canvas.
    shifted: whether the node at position p - 1 scores position p, as in models that were trained
      autoregressively first; otherwise a mask scores its own position.
    causal: whether the model may also be decoded autoregressively, with causal attention.
    uses_adapter: whether the active block runs with a LoRA adapter. Settled tokens are computed
      without it, from left to right: so a token beyond a gap stays in the block until the gap closes.
    """

    token: int
    block: int | None
    shifted: bool
    causal: bool
    uses_adapter: bool = False


@dataclass(frozen=True, slots=True)
class TrainedFilter:
    """A trained binary classifier of drafted or unmasked tokens: a network with one hidden layer.

    kind: the recipe that trained it.
    inner: [units, features], inner_bias: [units], outer: [units]: the network.
    threshold: the probability from which on its answer is yes, unless a request says otherwise.
    """

    kind: str
    inner: FloatArray
    inner_bias: FloatArray
    outer: FloatArray
    outer_bias: float
    threshold: float
    layer: int = 0
    """The layer whose input hidden states it reads, where it reads hidden states."""

    def probability(self, features: FloatArray) -> FloatArray:
        """The probability of yes, [rows], for feature rows [rows, features]."""
        inner = np.maximum(features @ self.inner.T + self.inner_bias, 0.0)
        found: FloatArray = 1.0 / (1.0 + np.exp(-(inner @ self.outer + self.outer_bias)))
        return found

    def of_hidden_states(self, hidden: FloatArray, *extra: float) -> FloatArray:
        """The probability of yes for rows of hidden states, [rows, hidden_size].

        They are normalised first; `extra` features are appended to every row.
        """
        x = np.nan_to_num(hidden, posinf=0.0, neginf=0.0).astype(np.float64)
        x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-6)
        return self.probability(np.concatenate([x, np.tile(extra, (len(x), 1))], axis=1))


@dataclass(slots=True)
class PassInput:
    """One sequence's part of a pass.

    Nodes below `first` were computed in an earlier round of the same step; their KV is in place. The
    KV of node i of the graph belongs in `slots[i]`.
    """

    proposal: Proposal
    table: BlockTable
    slots: IntArray
    first: int = 0
    state: StatePass | None = None
    """The recurrent state of the sequence. None where a model with recurrent layers runs: the state
    before the first node is zero and nothing is kept, as in measurements."""
    adapter: str = ""
    """The LoRA adapter that its nodes go through, except those of draft heads; empty: none."""


class PendingPass(Protocol):
    """A pass that runs, or that is ready to run."""

    def start(self) -> None:
        """Launches it in the background, because the caller has other work to do meanwhile."""
        ...

    def wait(self) -> list[Scores]:
        """The scores, one per `PassInput`. A pass that was not started runs in this call."""
        ...


@dataclass(slots=True)
class CompletedPass:
    """A pass whose scores are there."""

    scores: list[Scores] = field(default_factory=list)

    def start(self) -> None:
        """Does nothing: the pass is complete."""

    def wait(self) -> list[Scores]:
        return self.scores


class Model(Protocol):
    """What the engine needs of a model. A model computes scores; it never decides on tokens."""

    vocab_size: int
    layers: int
    context: int
    attention_pattern: AttentionPattern
    """How settled tokens attend to each other."""
    masked_spec: MaskedSpec | None
    """How it fills in masks; None for autoregressive models."""
    page_size: int
    pages: int
    fingerprint: str
    build: str
    """Names device, weights format and instruction set, in words."""
    draft_heads: dict[str, DraftHead]
    """Attached draft heads by name."""
    filters: dict[str, TrainedFilter]
    """Attached trained filters by name."""
    adapters: dict[str, str]
    """The digest of each LoRA adapter that requests may choose, by name."""

    def forward(self, work: Sequence[PassInput]) -> PendingPass:
        """One pass over all graphs. Writes the KV of every new node to its slot."""
        ...

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies KV between slots; all sources are read before any target is written."""
        ...

    def feature(self, table: BlockTable, position: int) -> FloatArray:
        """The auxiliary hidden states that are stored for draft heads at a kept position."""
        ...


@runtime_checkable
class RecurrentModel(Protocol):
    """What the engine needs besides of a model that may have recurrent layers."""

    @property
    def state_spec(self) -> StateSpec | None:
        """Its state slots; None if it has no recurrent layers."""
        ...

    def update_states(self, updates: Sequence[StateUpdate]) -> None:
        """Advances and copies states, in order."""
        ...


def accepted_nodes(graph: TokenGraph, given: int, tokens: Sequence[int]) -> list[int]:
    """The nodes of a causal graph that lie on the settled path: the given ones, then matches.

    The last settled token is left out, so that the model always has one token to compute: the node
    that scores the next position.
    """
    path = list(range(given))
    node: NodeId | None = NodeId(given - 1)
    while node is not None and (children := graph.children(node)):
        position = int(graph.positions[children[0]])
        node = graph.follow(node, tokens[position]) if position < len(tokens) - 1 else None
        if node is not None:
            path.append(node)
    return path
