"""`Ops`: the handful of operations that a pass needs, with the weights and the cache they work on.

A decoder is written once, in these words; what differs between processors is here. An
implementation is chosen when a model is loaded and holds the weights in its own format. Each
promises that the bits of a row depend on that row alone: not on how many others stand beside it,
nor on where, nor on which slots hold its keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from outstride.core.contracts import Work
from outstride.core.graph import BoolArray, FloatArray, IntArray, TokenGraph
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import Table
from outstride.errors import UnsupportedModel
from outstride.ops.routing import Routing

State: TypeAlias = Any
"""Rows of hidden states, in whatever form an implementation keeps them."""


class Shape(Protocol):
    """What operations must know of a model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def windows(self) -> Sequence[int | None]: ...
    @property
    def rope_layers(self) -> Sequence[bool]: ...
    @property
    def frequencies(self) -> Sequence[float]: ...
    @property
    def rope_scale(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of one layer: [experts, out, in] matrices, and the router that chooses them."""

    routing: Routing
    router: torch.Tensor
    bias: torch.Tensor | None
    """Added to the scores by which experts are chosen."""
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer in float32; matrices that share their input are one matrix.

    Where there are experts, the MLP beside them is the part that all rows go through; it may have
    no rows. The last two fields are for models whose config is not `plain`: implementations that
    do not know them are never given one.
    """

    attention_norm: torch.Tensor
    """Empty in trained parts that have none."""
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    experts: ExpertWeights | None = None
    clip: float | None = None
    """What queries, keys and values are cut to, on both sides."""


@dataclass(frozen=True, slots=True)
class FollowWeights:
    """How a part that goes on from its own states makes the input of a node.

    It reads a token and the state of the node before it: `mix`ed from the model's states where the
    model has read that node, its own where it guessed it. What is None is left out.
    """

    embedding: torch.Tensor | None = None
    """Of tokens; None: the model's own."""
    fuse: torch.Tensor | None = None
    """Makes one state of embedding and state side by side; None: the state alone enters."""
    bias: torch.Tensor | None = None
    entry: torch.Tensor | None = None
    """Norm of the state that enters."""
    beside: torch.Tensor | None = None
    """Norm of the embedding, where the first layer's queries, keys and values read it in front of the
    state, with matrices of twice the width."""
    again: bool = False
    """Whether it goes on from states under its final norm."""


REST = -1
"""A window: everything but position 0, in front of which there is no state to read."""


@dataclass(frozen=True, slots=True)
class GraftWeights:
    """A trained part in float32: what turns a model's states into its entries, and its own layers.

    The states that enter the layers `taps` stand beside each other, normalised and times `scale`
    (None: as they are); `mix` makes one state of them (None: there is one tap), which under the norm
    `mixed` is projected to keys and values by each layer. A part with `follow` reads it together with
    the token behind it instead, and has one layer.
    """

    taps: tuple[int, ...]
    scale: torch.Tensor | None
    mix: torch.Tensor | None
    mixed: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor | None
    vocabulary: IntArray
    """The tokens that it can guess, in rising order: rows of the model's own head."""
    window: int | None = None
    """How far back it sees: no further than the texts that it was trained on were long."""
    head: torch.Tensor | None = None
    """A row for each token that it can guess; None: those of the model's head."""
    follow: FollowWeights | None = None
    frequencies: tuple[float, ...] | None = None
    """Of the rotation of its heads, and `rope_scale`; None: the model's own."""
    before: FloatArray | None = None
    """A row for each token that it can guess and one for all others, and `after` a row for each: how
    much likelier one is behind another. Operations that have them may find chains of guesses."""
    after: FloatArray | None = None
    rope_scale: float = 1.0

    def usual(self, shape: Shape) -> bool:
        """Whether it is of the kind that our own recipe makes, which all implementations run."""
        lacks = any(part is None for part in (self.scale, self.mix, self.norm))
        more = any(part is not None for part in (self.head, self.follow, self.frequencies))
        return (
            not lacks
            and not more
            and all(
                layer.down.shape[1] == shape.intermediate_size
                and layer.query_norm is None
                and layer.qkv_bias is None
                and layer.output_bias is None
                for layer in self.layers
            )
        )


@dataclass(frozen=True, slots=True)
class ResidualWeights:
    """x + leave · silu(enter · [x, token] + bias) in float32; what is None is left out.

    norm: of the state that enters.
    """

    norm: torch.Tensor | None
    enter: torch.Tensor
    bias: torch.Tensor | None
    leave: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """One trained head: residual blocks, a norm (None: none), and what scores tokens.

    vocabulary: a matrix of its own, or None: rows of the model's head.
    """

    blocks: list[ResidualWeights]
    norm: torch.Tensor | None
    vocabulary: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadsWeights:
    """Trained heads on the states that enter layer `tap`: a part without layers and entries.

    entry: norm of those states; None: as they are.
    token: norm of the embedding of the token in front, which the first block of each head then reads
      beside the state; None: heads do not see tokens.
    """

    tap: int
    entry: torch.Tensor | None
    token: torch.Tensor | None
    heads: list[HeadWeights]
    vocabulary: IntArray
    """The tokens that they can guess, in rising order."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a product: high · (low · x), in float32."""

    low: torch.Tensor
    """[rank, in]"""
    high: torch.Tensor
    """[out, rank]"""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """What an adapter adds to the products of one layer."""

    qkv: LowRank
    output: LowRank
    gate_up: LowRank
    down: LowRank


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a pass: its computed nodes stand at rows `row`, `row + 1`, …"""

    graph: TokenGraph
    slots: IntArray
    table: Table
    first: int
    row: int
    gates: BoolArray | None = None
    """Which of its computed nodes go through the adapter; None: none of them."""

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.graph) - self.first)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Nodes of one proposal that reach the head, and the states that they left the layers with."""

    proposal: Proposal
    nodes: IntArray
    state: State
    """One row for each node that the pass computed, from `first` on."""
    first: int


def gates_of(spans: Sequence[Span]) -> BoolArray | None:
    """Of all rows of a pass; None if the adapter has nothing to do in it."""
    if all(span.gates is None for span in spans):
        return None
    return np.concatenate(
        [
            np.zeros(span.rows.stop - span.row, dtype=np.bool_)
            if span.gates is None
            else span.gates
            for span in spans
        ]
    )


class Ops(ABC):
    """Weights, cache and operations of one model."""

    name: str
    """What the fingerprint says of the arithmetic: implementation, instruction set, format."""
    windows: tuple[int | None, ...]
    """How far back each layer sees, those of trained parts included."""
    remote: bool = False
    """Whether a pass, once launched, runs elsewhere: then it needs no thread of the model's own."""
    chains: bool = False
    """Whether it finds the likeliest chain of a part's guesses, and foresees what follows it."""

    @abstractmethod
    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> Any:
        """Prepares a run of layers over these spans: who attends to what, worked out once."""

    @abstractmethod
    def enter(self, batch: Any, states: Sequence[State | FloatArray | None]) -> State:
        """The states of all spans below each other; None stands for embedding the span's inputs."""

    @abstractmethod
    def project(self, layer: int, x: State, batch: Any) -> State:
        """Norm, queries, keys and values, head norms, rotation; keys and values go to the cache."""

    @abstractmethod
    def attend(self, layer: int, queries: State, batch: Any) -> State:
        """What each query gathers from the entries that its node sees."""

    @abstractmethod
    def output(self, layer: int, x: State, mixed: State, batch: Any) -> State:
        """x plus the projection of what attention gathered."""

    @abstractmethod
    def mlp(self, layer: int, x: State, batch: Any) -> State:
        """x plus the feed-forward part of the layer, norm included."""

    @abstractmethod
    def keep_features(self, layer: int, x: State, batch: Any) -> None:
        """Stores the states that enter a layer beside the cache entries, if they were asked for."""

    @abstractmethod
    def digest(self, batch: Any) -> None:
        """Makes the entries of trained parts from the states that the pass has stored."""

    def follow(self, name: str, batch: Any) -> State:
        """The states with which nodes enter a part that goes on from states (`FollowWeights`)."""
        raise NotImplementedError

    def carry(self, name: str, x: State, batch: Any) -> None:
        """Stores the states that leave such a part, for the nodes behind."""
        raise NotImplementedError

    @abstractmethod
    def leave(self, x: State, rows: slice) -> State:
        """One span's states, good until its proposal is scored."""

    @abstractmethod
    def read(self, state: State) -> FloatArray:
        """States as an array of their own."""

    @abstractmethod
    def head(self, wanted: Sequence[Wanted]) -> list[Scores]:
        """Final norm, vocabulary and the choice of tokens, for everybody at once.

        A trained part has its own norm and vocabulary, and is asked for likely tokens and logits.
        """

    def score(self, wanted: Sequence[Wanted]) -> Callable[[], list[Scores]]:
        """Starts the head; what it returns waits for the scores."""
        scores = self.head(wanted)
        return lambda: scores

    def run(self, layers: Callable[[], State], batch: Any, whole: tuple[int, int] | None) -> State:
        """Runs the layers. An implementation may record a `whole` pass once and replay it: all
        layers of the model or of a part of it (these numbers), from the embedding on, with nothing
        read out on the way."""
        return layers()

    def whole(self, work: Sequence[Work]) -> Callable[[], list[Scores]] | None:
        """The scores of this work, where there is a shorter way to them than layer by layer.

        A pass over it may be under way already, because it could be known. Asked before every pass.
        """
        return None

    # --- what lasts longer than a pass ------------------------------------------------------------

    @abstractmethod
    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies cache entries between slots, all read before any is written."""

    @abstractmethod
    def feature(self, slot: int) -> FloatArray:
        """The stored states of a slot, one layer behind the other."""

    @abstractmethod
    def attach(self, name: str, weights: GraftWeights) -> int:
        """Takes in a trained part; returns the number of its first layer."""

    def attach_heads(self, name: str, weights: HeadsWeights) -> tuple[int, int]:
        """Takes in trained heads; returns where the states that they start from stand in `feature`.

        A node of a proposal to them goes through the head of its depth: its row of `hidden` is the
        state that enters, and what left the head is `hidden[0]` of the scores, a row for each wanted
        node.
        """
        raise UnsupportedModel(
            "trained heads do not run on a card yet; use weights int8, int4 or fp32"
        )

    def adapt(self, layers: Sequence[AdapterWeights]) -> None:
        """Takes in an adapter, through which the nodes go whose gates are open (`Span.gates`).

        All other rows keep their bits, whoever stands beside them.
        """
        raise UnsupportedModel("adapters do not run on a card yet; use weights int8, int4 or fp32")

    def final_norm(self) -> torch.Tensor:
        """The norm in front of the head, for parts that read states under it."""
        raise UnsupportedModel(
            f"{self.name} cannot run this trained part; use weights int8, int4 or fp32"
        )

    @abstractmethod
    def add_rows(self, rows: torch.Tensor) -> int:
        """Adds embedding rows (masks, prompt tokens); returns how many there were before."""


@dataclass(frozen=True, slots=True)
class Model:
    """All that an implementation is made from. It may take tensors over or convert and drop them."""

    shape: Shape
    embedding: torch.Tensor
    layers: list[LayerWeights]
    norm: torch.Tensor
    head: torch.Tensor | None
    """None: the embedding is used."""
    slots: int
    page_size: int
    features: tuple[int, ...] = ()
