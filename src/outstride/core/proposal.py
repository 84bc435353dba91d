"""What goes into a pass and what comes out: `Proposal`, `Scores`, `Verdict`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from outstride.core.graph import (
    FloatArray,
    IntArray,
    NodeId,
    Position,
    TokenGraph,
    TokenId,
)
from outstride.core.sampling import GREEDY, Draw, Rules

TARGET = "target"
"""The name of the model whose text is wanted."""

_NONE: Mapping[Any, Any] = MappingProxyType({})


def _none() -> Mapping[Any, Any]:
    """Most mappings here are empty, and many are made at each step: they are one and the same."""
    return _NONE


@dataclass(frozen=True, slots=True)
class Wants:
    """What a proposal wants back; nothing else leaves the pass.

    nodes: which nodes reach the head (None: the last given node and all behind it).
    best: how many tokens, by sum of logit and noise; the first is the node's token.
    logprobs: how many of the likeliest tokens of the raw logits, besides the chosen one; None: none.
    of: for single nodes, a token whose raw log-probability is wanted instead of the chosen one's.
    rows: whole rows of probabilities as sampling sees them.
    logits: whole rows of raw logits.
    hidden: the states that enter these layers (`layers` for the last, before the final norm).
    """

    nodes: tuple[int, ...] | None = None
    best: int = 1
    logprobs: int | None = None
    of: Mapping[int, int] = field(default_factory=_none)
    rows: bool = False
    logits: bool = False
    hidden: tuple[int, ...] = ()


USUAL = Wants()
"""The token of each node from the last given one on."""


@dataclass(slots=True)
class Proposal:
    """A graph for a named model, and what is known about it before the pass.

    given: how many leading nodes hold settled tokens that lack only their cache entries.
    offset: a node at position p is scored for position p + offset (1: next token, 0: itself).
    layers: the range of layers to run (None: all); from a later layer on, `hidden` is the input.
    graft: the trained part of the model that runs instead of its layers, over the same entries. It
      guesses: its scores are its likeliest tokens with their `values`, whatever the request's draw.
    drafted: the drafter's own distribution for each drafted node, where it has one.
    rules, draw: set by the engine from the request, for every model alike. A proposal belongs to the
      engine once it is handed over.
    equal: set by the engine: what is drafted holds only where it is the target's own token, so that
      what holds is known as soon as the scores are.
    labels: who drafted a node, where several drafters share a graph.
    survivors: of a later round within a step, which nodes of the round before are its leading ones
      (None: all of them). The others are given up, and so are their entries.
    """

    graph: TokenGraph
    given: int
    model: str = TARGET
    offset: int = 1
    layers: tuple[int, int] | None = None
    graft: str = ""
    hidden: FloatArray | None = None
    drafted: Mapping[int, FloatArray] = field(default_factory=_none)
    wants: Wants = USUAL
    rules: Mapping[int, Rules] = field(default_factory=_none)
    draw: Draw = GREEDY
    equal: bool = False
    labels: Mapping[int, str] = field(default_factory=_none)
    survivors: tuple[int, ...] | None = None

    @property
    def root(self) -> NodeId:
        """The node of the last settled token: drafts hang below it."""
        return NodeId(self.given - 1)

    @property
    def wanted(self) -> IntArray:
        """The nodes that reach the head."""
        if self.wants.nodes is not None:
            return np.asarray(self.wants.nodes, dtype=np.int64)
        return np.arange(max(self.given - 1, 0), len(self.graph))

    def follows(self, earlier: Proposal | None) -> bool:
        """Whether it can be a model's next round in a step.

        A round goes on with the whole graph of the earlier one, or with survivors that see nobody
        else, what is given among them. New nodes may come behind.
        """
        if self.survivors is None or earlier is None:
            return self.survivors is None and (
                earlier is None or self.graph.starts_with(earlier.graph)
            )
        given = tuple(range(earlier.given))
        return self.survivors[: earlier.given] == given and self.graph.starts_with(
            earlier.graph.part(self.survivors)
        )

    def asking(self, wants: Wants) -> Proposal:
        """The same proposal, wanting something else."""
        return replace(self, wants=wants)


@dataclass(frozen=True, slots=True)
class Scores:
    """What a pass returned for one proposal. Each table has one row per node of `nodes`."""

    nodes: IntArray
    best: IntArray
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    rows: FloatArray | None = None
    logits: FloatArray | None = None
    hidden: Mapping[int, FloatArray] = field(default_factory=_none)
    """By layer, one row per node of the graph that this pass computed."""
    values: FloatArray | None = None
    """The logits of `best`, from a trained part."""
    chain: IntArray | None = None
    """The likeliest chain through `best`, where the part's operations find it themselves."""
    chances: FloatArray | None = None
    """How sure the part is of each token of the chain."""

    @classmethod
    def joined(cls, pieces: Sequence[Scores]) -> Scores:
        """The scores of one proposal from those of consecutive nodes."""
        first = pieces[0]
        if len(pieces) == 1:
            return first
        rows = [piece.rows for piece in pieces if piece.rows is not None]
        logits = [piece.logits for piece in pieces if piece.logits is not None]
        return cls(
            nodes=np.concatenate([piece.nodes for piece in pieces]),
            best=np.concatenate([piece.best for piece in pieces]),
            logprobs=tuple(line for piece in pieces for line in piece.logprobs),
            rows=np.concatenate(rows) if rows else None,
            logits=np.concatenate(logits) if logits else None,
            hidden=first.hidden,
        )

    def row(self, node: NodeId) -> int:
        """The line of the tables that belongs to a node."""
        nodes = self.nodes
        size = len(nodes)
        found = node - nodes.item(0) if size else 0  # most often they are consecutive
        if not (0 <= found < size and nodes.item(found) == node):
            found = int(np.searchsorted(nodes, node))
            if found == len(nodes) or nodes[found] != node:
                raise KeyError(f"node {node} was not wanted")
        return found

    def token(self, node: NodeId) -> TokenId:
        """The token that the model puts behind (or at) a node: argmax or seeded sample."""
        return TokenId(self.best.item(self.row(node), 0))

    def rivals(self, node: NodeId) -> list[TokenId]:
        """The node's token and its closest rivals, best first."""
        return [TokenId(int(t)) for t in self.best[self.row(node)] if t >= 0]

    def probabilities(self, node: NodeId) -> FloatArray:
        """The distribution behind a node."""
        if self.rows is None:
            raise KeyError("rows were not wanted")
        return np.asarray(self.rows[self.row(node)], dtype=np.float32)


@dataclass(slots=True)
class Verdict:
    """What an acceptor decided: separate facts, because they happen at separate times.

    settled: position -> token, decided now and for good.
    keep: nodes whose cache entries are valid for good, in the order in which to keep them.
    reuse: nodes whose cache entries are stale but used again on purpose (lossy methods only).
    forks: node -> how many further sequences go on from there.
    nodes: the node whose scores settled a position, where positions are not settled in order.
    note: what the acceptor wants to be told again; the drafter's state, unless it has one.
    """

    settled: Mapping[Position, TokenId] = field(default_factory=dict)
    keep: tuple[NodeId, ...] = ()
    reuse: tuple[NodeId, ...] = ()
    forks: Mapping[NodeId, int] = field(default_factory=_none)
    nodes: Mapping[Position, NodeId] = field(default_factory=_none)
    note: Any = None
