"""`Ops`: the operations that a pass needs, with the weights and the KV cache that they work on.

A decoder is written once, in terms of these operations; what differs between processors is a
backend, an implementation of `Ops`. It is chosen when a model is loaded, and holds the weights in
its own format.

Every backend guarantees that the bits of a row depend on that row alone: not on how many other rows are
in the batch, nor on its place among them, nor on which slots hold its KV.

A backend samples as well (`Ops.score`), bit for bit as `core.sampling` does. It may leave requests
that it
has no kernel for to the host: it returns logits, and `core.scoring.select` does the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.contracts import PassInput
from outstride.core.graph import FloatArray, IntArray, TokenGraph
from outstride.core.proposal import Proposal, Scores
from outstride.core.recurrent import StatePass, StateUpdate
from outstride.core.sequence import BlockTable
from outstride.errors import UnsupportedModel
from outstride.ops import host_memory
from outstride.ops.weights import AdapterWeights, DraftHeadWeights, ModelShape

AdapterRows: TypeAlias = npt.NDArray[np.uint8]
"""The number of the LoRA adapter that each row goes through; 0: none."""
MAX_ADAPTERS = 255
"""How many adapters a model can have at once: what a row's number can name."""
HiddenStates: TypeAlias = Any
"""Rows of hidden states, [rows, hidden_size], in the form that a backend keeps them in."""
Batch: TypeAlias = Any
"""What a backend prepares once for a run of layers: spans, slots, attention metadata."""
PackedHead: TypeAlias = Any
"""A draft head in the form that a backend keeps it in."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a batch: its computed nodes are the rows `row`, `row + 1`, …"""

    graph: TokenGraph
    slots: IntArray
    """[nodes]: where the KV of each node of the graph goes."""
    table: BlockTable
    first: int
    """The first node that this pass computes."""
    row: int
    adapter_rows: AdapterRows | None = None
    """[computed nodes]: the number of the LoRA adapter that each of them goes through, 0 for none;
    None: none of them goes through one."""
    state: StatePass | None = None
    """The recurrent state of the sequence, in models with recurrent layers."""

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.graph) - self.first)


@dataclass(frozen=True, slots=True)
class HeadInput:
    """Nodes of one proposal that reach the LM head, with the hidden states that left the layers."""

    proposal: Proposal
    nodes: IntArray
    hidden: HiddenStates
    """One row for each node that the pass computed, from `first` on."""
    first: int


def adapter_rows_of(spans: Sequence[Span]) -> AdapterRows | None:
    """[rows] of a whole batch; None if no row goes through an adapter."""
    if all(span.adapter_rows is None for span in spans):
        return None
    return np.concatenate(
        [
            np.zeros(span.rows.stop - span.row, dtype=np.uint8)
            if span.adapter_rows is None
            else span.adapter_rows
            for span in spans
        ]
    )


@dataclass(frozen=True, slots=True)
class HeadPlacement:
    """Where a backend has put a draft head.

    layers: the numbers of its layers, from the first to the one after the last. A draft head without
      layers starts where the model ends: its range is empty.
    feature_range: the columns of `Ops.feature` that hold the hidden states which it starts from.
    """

    layers: tuple[int, int]
    feature_range: tuple[int, int] = (0, 0)


class DraftHeadOps(ABC):
    """What a backend does for draft heads and LoRA adapters, which are attached to a loaded model.

    A pass over the model calls `write_kv` at its end. A pass over a draft head is a pass over its
    layers, like over those of the model; `Ops.score` gives the top-k candidates of its nodes with
    their logits.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def unsupported_draft_head(self, weights: DraftHeadWeights) -> str | None:
        """Why this backend cannot run a draft head, and what to do instead; None if it can."""
        return None

    def unsupported_adapter(self) -> str | None:
        """Why this backend cannot run LoRA adapters, and what to do instead; None if it can."""
        return None

    def pack(self, weights: DraftHeadWeights) -> PackedHead:
        """Converts a draft head for `attach`; raises UnsupportedModel if the backend cannot run it.

        This is the slow part. It changes nothing that a pass reads: any thread may do it beforehand.
        """
        if reason := self.unsupported_draft_head(weights):
            raise UnsupportedModel(f"{self._name} cannot run this draft head: {reason}")
        return self._pack(weights)

    @abstractmethod
    def attach(self, name: str, packed: PackedHead) -> HeadPlacement:
        """Makes room for the KV of a packed draft head. From now on passes write it.

        A node of a proposal to Medusa heads goes through the head of its depth: its row of `hidden` is
        the state that the head reads, and its state after the head is `hidden[0]` of the scores.
        """

    def attach_adapter(self, layers: Sequence[AdapterWeights]) -> int:
        """Takes a LoRA adapter; returns its number, by which `Span.adapter_rows` names it.

        It adds to the rows of its number. All other rows keep their bits, whatever else is in the
        batch. Raises UnsupportedModel if the backend cannot run adapters.
        """
        if reason := self.unsupported_adapter():
            raise UnsupportedModel(f"{self._name} cannot run LoRA adapters: {reason}")
        return self._attach_adapter(layers)

    def detach_adapter(self, number: int) -> None:
        """Drops the weights of an adapter. Its number may be given to another one."""
        raise NotImplementedError

    def _pack(self, weights: DraftHeadWeights) -> PackedHead:
        """Converts a draft head that is supported; by default `attach` does all of it."""
        return weights

    def _attach_adapter(self, layers: Sequence[AdapterWeights]) -> int:
        """Attaches an adapter; backends that support adapters override it."""
        raise NotImplementedError

    @abstractmethod
    def final_norm(self) -> torch.Tensor:
        """[hidden]: the model's final norm, for draft heads that read hidden states after it.

        Raises UnsupportedModel if the backend runs no such draft head.
        """

    @abstractmethod
    def write_kv(self, batch: Batch) -> None:
        """Writes the KV of all draft heads from the hidden states that the pass has stored."""

    def eagle_input(self, name: str, batch: Batch) -> HiddenStates:
        """The hidden states with which nodes enter the layer of an EAGLE head."""
        raise NotImplementedError

    def keep_hidden(self, name: str, x: HiddenStates, batch: Batch) -> None:
        """Stores the hidden states that leave an EAGLE head, for the nodes after these."""
        raise NotImplementedError


class Ops(ABC):
    """Weights, KV cache and operations of one model."""

    name: str
    """Names the arithmetic in the model's fingerprint: implementation, instruction set, format."""
    device: str
    """The kind of device it runs on, as the option `device` names it."""
    weights: str
    """The format of its weights, as the option `weights` names it."""
    windows: Sequence[int | None]
    """How many positions back each layer attends, those of draft heads included; None: all."""
    asynchronous: bool = False
    """Whether a launched pass runs on its own, so that the host needs no thread for it."""
    whole_passes: bool = False
    """Whether a pass always runs all layers: none can be run alone, read or given a draft head."""
    row_invariant: bool = True
    """Whether the bits of a row depend on that row alone; otherwise they agree up to rounding."""
    device_chains: bool = False
    """Whether the backend finds the likeliest chain of a draft head's tokens itself."""
    draft_heads: DraftHeadOps

    # --- before a model is loaded -----------------------------------------------------------------

    @classmethod
    def supports(cls, shape: ModelShape) -> str | None:
        """The reason why this backend cannot run a model; None if it can."""
        return None

    @classmethod
    def kv_bytes_per_token(cls, shape: ModelShape) -> int:
        """Bytes that the keys and values of one token take in all layers; by default in float32."""
        return 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim

    @classmethod
    def free_memory(cls) -> int:
        """Bytes that are free on the device; by default in the host's memory."""
        return host_memory.available()

    # --- the pass ---------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> Batch:
        """Prepares a run of layers over these spans, once for all layers with these windows."""

    @abstractmethod
    def initial_hidden(
        self, batch: Batch, hidden: Sequence[HiddenStates | FloatArray | None]
    ) -> HiddenStates:
        """The hidden states of all spans in one; None stands for embedding a span's input tokens."""

    @abstractmethod
    def project(self, layer: int, x: HiddenStates, batch: Batch) -> HiddenStates:
        """Queries: norm, QKV projection, head norms, RoPE. Keys and values go to the KV cache."""

    @abstractmethod
    def attend(self, layer: int, queries: HiddenStates, batch: Batch) -> HiddenStates:
        """Attention of each query over the KV that its node sees."""

    @abstractmethod
    def output(
        self, layer: int, x: HiddenStates, attended: HiddenStates, batch: Batch
    ) -> HiddenStates:
        """x plus the output projection of attention."""

    @abstractmethod
    def mlp(self, layer: int, x: HiddenStates, batch: Batch) -> HiddenStates:
        """x plus the MLP of the layer, norm included."""

    @abstractmethod
    def keep_features(self, layer: int, x: HiddenStates, batch: Batch) -> None:
        """Stores the hidden states that enter a layer next to the KV, if the layer is asked for."""

    @abstractmethod
    def hidden_of(self, x: HiddenStates, rows: slice) -> HiddenStates:
        """The hidden states of one span, valid until its proposal is scored."""

    @abstractmethod
    def to_array(self, hidden: HiddenStates) -> FloatArray:
        """A copy of hidden states, [rows, hidden_size]."""

    @abstractmethod
    def score(self, wanted: Sequence[HeadInput]) -> Callable[[], list[Scores]]:
        """Starts final norm, LM head and sampling for all proposals; the result waits for the scores.

        The nodes of a draft head have its own norm and vocabulary. They get top-k candidates and
        logits.
        """

    def run(
        self, layers: Callable[[], HiddenStates], batch: Batch, whole: tuple[int, int] | None
    ) -> HiddenStates:
        """Runs the layers.

        whole: set if these are all layers of the model or of one draft head (from, to), from the
          embedding on, with no hidden states read out in between. A backend may fuse such a pass,
          or capture it once and replay it.
        """
        return layers()

    def scores_ahead(self, work: Sequence[PassInput]) -> Callable[[], list[Scores]] | None:
        """The scores of this work, if the backend has a shorter way to them than layer by layer.

        Called before every pass. A pass over this work may be under way already (run-ahead).
        """
        return None

    # --- what lasts longer than a pass ------------------------------------------------------------

    @abstractmethod
    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies KV between slots; all sources are read before any target is written."""

    def update_states(self, updates: Sequence[StateUpdate]) -> None:
        """Advances and copies recurrent states, in order; for backends that run recurrent layers."""
        raise NotImplementedError

    @abstractmethod
    def feature(self, slot: int) -> FloatArray:
        """The hidden states stored for a slot, [stored layers * hidden_size]."""

    @abstractmethod
    def add_rows(self, rows: torch.Tensor) -> int:
        """Adds embedding rows (masks, prompt tokens), [rows, hidden]; returns how many there were."""
