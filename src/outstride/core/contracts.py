"""The contracts: what a drafter, an acceptor, a method and a model promise to the engine."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from outstride.core.graph import BoolArray, FloatArray, IntArray, NodeId, TokenGraph
from outstride.core.guess import Guess
from outstride.core.proposal import USUAL, Proposal, Scores, Verdict, Wants
from outstride.core.sequence import Table, View

Rounds: TypeAlias = Generator[Proposal, Scores, Proposal]
"""Yields proposals for other models, is sent their scores, returns the one for the target."""
Guessing: TypeAlias = Generator[Proposal, Scores, Guess]
"""The same, with a tree of tokens at the end."""


class Exactness(enum.Enum):
    """What a method promises about its text."""

    EXACT = "exact"
    """Token for token what it is exact to (plain decoding unless it says otherwise)."""
    DISTRIBUTION = "distribution"
    """Other tokens, the same distribution."""
    LOSSY = "lossy"
    """May change the text; never chosen for the user."""


@dataclass(frozen=True, slots=True)
class Demand:
    """How many nodes beyond the given ones a drafter could use, and what it expects of them.

    The plan grants at least `least` or delays the sequence, and at most `most`; `gain` is the
    expected number of accepted tokens, by which scarce nodes are shared out. A drafter that leaves
    its size to the plan says what it expects of each further node instead (`gains`, falling): it is
    granted as many as are worth what they cost in the pass that is being planned. If it could ask a
    trained part first, `asking` says what it would expect of each node then; the plan decides whether
    that is worth a pass of the part. With `whole` the draft is then as long as `asking` in any case,
    because what follows a draft of the same length can be known earlier. Settled tokens are read up to
    the position `until`, where those behind it cannot go through the same pass. A drafter that rests
    says for how many steps (`rest`), this one included: it is not asked before, nor told what came.
    """

    least: int = 0
    most: int = 0
    gain: float = 0.0
    gains: tuple[float, ...] = ()
    asking: tuple[float, ...] = ()
    whole: bool = False
    until: int | None = None
    rest: int = 0


class Drafter:
    """Guesses. Holds no state of a sequence: that is what `observe` returns."""

    name: str
    models: tuple[str, ...] = ()
    """The models, besides the target, that it asks."""
    grafts: tuple[str, ...] = ()
    """The trained parts of the target that it asks."""
    part: str = ""
    """The recipe that makes the parts which it can ask."""
    part_of_draft: bool = False
    """Whether its part belongs to the draft model and not to the target."""
    wants: Wants = USUAL
    """What it wants to learn from the target's pass, besides the tokens."""
    weighed: bool = False
    """Whether it leaves its size to the plan, which then needs to know what passes cost."""
    tokens: tuple[int, ...] = ()
    """Tokens that it puts into graphs because it was told to: they must be in the vocabulary."""
    fills: tuple[str, ...] = ()
    """The models that it has fill in masks, the target perhaps among them. Settled tokens are read
    as such a model sees them; all other models read them causally."""
    partial: bool = False
    """Whether it leaves entries behind the prompt that some layers lack: nobody shares those."""

    def fits(self, vision: Vision, masking: Masking | None) -> str | None:
        """Why it cannot work with a target of this kind; None if it can."""
        return None

    def entries(self, limit: int, vision: Vision) -> int:
        """How many entries of the target's cache it may need at once, for this many tokens."""
        return limit

    @property
    def trimmable(self) -> bool:
        """Whether it proposes its guess and nothing else, so that parts of it may be left out."""
        own = type(self)
        return (
            own.guess is not Drafter.guess
            and own.propose is Drafter.propose
            and own.ahead is Drafter.ahead
        )

    def demand(self, view: View) -> Demand:
        """Asked before planning."""
        return Demand()

    def guess(self, view: View, room: int) -> Guessing:
        """At most `room` tokens that may follow, as a tree.

        Drafters whose nodes are a plain tree of tokens implement this and nothing else; several of
        them can be joined. One that only looks things up yields nothing.
        """
        yield from ()
        return Guess()

    def propose(self, view: View, room: int) -> Rounds:
        """The proposal for the target: `view.given()` and at most `room` further nodes.

        With no room (a prompt still being read) it returns the given nodes alone, but may use the
        step to let its own model catch up. A drafter runs a model only by yielding to it; later
        rounds of one step go on with the graph of earlier ones, or with survivors that see nobody
        else of it, and only new nodes and new layers are computed.
        """
        guess = (yield from self.guess(view, room)) if room > 0 else Guess()
        return guess.proposal(view, self.wants)

    def ahead(self, view: View, proposal: Proposal) -> Generator[Proposal, Scores, Any] | None:
        """Work for other models while the target scores; what it returns becomes the state."""
        return None

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Any:
        """The new state, once the verdict is committed."""
        return view.state


class Acceptor(ABC):
    """Judges. Verifiers and unmaskers are both acceptors."""

    name: str

    @abstractmethod
    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        """What holds. The engine cuts it by stop rules and limits afterwards."""


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter and an acceptor under a name, and what they promise together."""

    name: str
    drafter: Drafter
    acceptor: Acceptor
    exactness: Exactness
    exact_to: str = "plain"
    """Whose text an exact method returns: for masked models it is that of a schedule."""
    spec: str = ""
    """As the user wrote it: `name` or `name:key=value,…`."""


class Grammar(Protocol):
    """What an answer may look like. Pure: drafts ask about paths that may never be taken."""

    def allowed(self, output: Sequence[int]) -> BoolArray | None:
        """A mask over the vocabulary for the token behind this output; None for no limit."""
        ...


@dataclass(frozen=True, slots=True)
class Vision:
    """How a model sees its tokens: causally, in blocks, or all at once."""

    block: int | None = None

    @property
    def name(self) -> str:
        return "causal" if self.block is None else f"block({self.block})"


CAUSAL = Vision()
FULL = Vision(block=1 << 30)


@dataclass(frozen=True, slots=True)
class Masking:
    """How a model fills in masks.

    token: the input that stands for a mask (a row of the vocabulary, or an extra one behind it).
    block: how many positions of masks see each other; None: all that there are, a full canvas.
    shifted: whether the node at position p - 1 scores position p, as in models that were once
      autoregressive; else a mask scores its own place.
    causal: whether the model may also be decoded autoregressively, with causal attention.
    gated: whether a block in work goes through an adapter. What is settled is read without it, from
      left to right: so a token beyond a gap stays in the block until there is none before it.
    """

    token: int
    block: int | None
    shifted: bool
    causal: bool
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Graft:
    """A trained part that lives on a model: layers behind its own, with entries in the same slots.

    After each pass over tokens, the model's states become the part's own entries for them, so that
    what the model has read the part has read, whatever happened to the sequence since.

    kind: the recipe that made it.
    block: how many positions it guesses at once, the last settled token among them.
    mask: the input that stands for an open position.
    before, after: a correction by the token in front. A token's score behind another one is its logit
      plus the product of their rows; `rows` says which row a token has in each.
    swift: whether its operations find the likeliest chain themselves, and foresee that it is asked for:
      then whoever drafts such chains alone waits for nothing.
    chained: whether what it guesses builds on the token in front, so that it is asked level by level.
    plane: where the states that it starts from stand in what the pages hold of a position.
    ranks: how often its candidates were right, by depth and rank, where it gives no logits.
    """

    kind: str
    block: int
    mask: int
    rows: IntArray
    before: FloatArray
    after: FloatArray
    swift: bool = False
    chained: bool = False
    plane: tuple[int, int] = (0, 0)
    ranks: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class Filter:
    """A trained judge of guesses: a tiny network over what a pass shows of a mask.

    kind: the recipe that made it.
    inner, outer: the matrix [units, features] before the bend and the row [units] behind it.
    threshold: the probability of staying that is enough, unless a request says otherwise.
    """

    kind: str
    inner: FloatArray
    inner_bias: FloatArray
    outer: FloatArray
    outer_bias: float
    threshold: float
    layer: int = 0
    """Where it is shown states: the layer that they enter."""

    def judged(self, shown: FloatArray) -> FloatArray:
        """The probability of yes for each row that it is shown."""
        inner = np.maximum(shown @ self.inner.T + self.inner_bias, 0.0)
        found: FloatArray = 1.0 / (1.0 + np.exp(-(inner @ self.outer + self.outer_bias)))
        return found

    def of_states(self, states: FloatArray, *beside: float) -> FloatArray:
        """The same for rows of hidden states, which are normalised first, and numbers beside them."""
        x = np.nan_to_num(states, posinf=0.0, neginf=0.0).astype(np.float64)
        x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-6)
        return self.judged(np.concatenate([x, np.tile(beside, (len(x), 1))], axis=1))


@dataclass(slots=True)
class Work:
    """One sequence's part of a pass.

    Nodes below `first` were computed in an earlier round of the same step; their entries are in
    place. Node i of the graph has its cache entry in `slots[i]`.
    """

    proposal: Proposal
    table: Table
    slots: IntArray
    first: int = 0


class Pending(Protocol):
    """A pass under way, or ready to go."""

    def start(self) -> None:
        """Begins it elsewhere, because somebody has work to do meanwhile."""
        ...

    def wait(self) -> list[Scores]:
        """The scores, one per piece of work. A pass that was not started runs here and now."""
        ...


@dataclass(slots=True)
class Done:
    """A pass that is over."""

    scores: list[Scores] = field(default_factory=list)

    def start(self) -> None:
        """It is over."""

    def wait(self) -> list[Scores]:
        return self.scores


class Model(Protocol):
    """What the engine needs of a model. Models never decide."""

    vocab_size: int
    layers: int
    context: int
    vision: Vision
    """How it sees tokens that are settled."""
    masking: Masking | None
    """How it fills in masks; None for models that only continue."""
    page_size: int
    pages: int
    fingerprint: str
    grafts: dict[str, Graft]
    """Trained parts by name."""
    filters: dict[str, Filter]
    """Trained judges of guesses by name."""

    def forward(self, work: Sequence[Work]) -> Pending:
        """One pass over all graphs. Writes the cache entry of every new node to its slot."""
        ...

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies cache entries between slots, all read before any is written."""
        ...

    def feature(self, table: Table, position: int) -> FloatArray:
        """What is stored for trained drafters at a kept position."""
        ...


def agreeing(graph: TokenGraph, given: int, tokens: Sequence[int]) -> list[int]:
    """The nodes of a causal graph that lie on the settled path: the given ones, then matches.

    The last settled token is left out, so that a model always has something to read: the node whose
    scores say what comes next.
    """
    path = list(range(given))
    node: NodeId | None = NodeId(given - 1)
    while node is not None and (children := graph.children(node)):
        position = int(graph.positions[children[0]])
        node = graph.follow(node, tokens[position]) if position < len(tokens) - 1 else None
        if node is not None:
            path.append(node)
    return path
