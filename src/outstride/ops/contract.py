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

import torch

from outstride.core.contracts import Work
from outstride.core.graph import FloatArray, IntArray, TokenGraph
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import Table
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
class Span:
    """One sequence's part of a pass: its computed nodes stand at rows `row`, `row + 1`, …"""

    graph: TokenGraph
    slots: IntArray
    table: Table
    first: int
    row: int

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


class Ops(ABC):
    """Weights, cache and operations of one model."""

    name: str
    """What the fingerprint says of the arithmetic: implementation, instruction set, format."""
    remote: bool = False
    """Whether a pass, once launched, runs elsewhere: then it needs no thread of the model's own."""

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
    def leave(self, x: State, rows: slice) -> State:
        """One span's states, good until its proposal is scored."""

    @abstractmethod
    def read(self, state: State) -> FloatArray:
        """States as an array of their own."""

    @abstractmethod
    def head(self, wanted: Sequence[Wanted]) -> list[Scores]:
        """Final norm, vocabulary and the choice of tokens, for everybody at once."""

    def score(self, wanted: Sequence[Wanted]) -> Callable[[], list[Scores]]:
        """Starts the head; what it returns waits for the scores."""
        scores = self.head(wanted)
        return lambda: scores

    def run(self, layers: Callable[[], State], batch: Any, whole: bool) -> State:
        """Runs the layers. An implementation may record a `whole` pass once and replay it: all
        layers from the embedding on, with nothing read out on the way."""
        return layers()

    def whole(self, work: Sequence[Work]) -> Callable[[], list[Scores]] | None:
        """The scores of this work, if a pass over it is under way already; it knew what would come.

        Asked before every pass.
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
