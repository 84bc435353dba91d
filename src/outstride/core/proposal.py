"""The input and output of a pass, and the decision on it: `Proposal`, `Scores`, `Verdict`."""

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
from outstride.core.sampling import GREEDY, LogitsProcessors, SamplingSpec

TARGET = "target"
"""The name of the target, the model whose text the user wants."""

_NONE: Mapping[Any, Any] = MappingProxyType({})


def _none() -> Mapping[Any, Any]:
    """One shared empty mapping: most mappings here are empty, and many are created at each step."""
    return _NONE


@dataclass(frozen=True, slots=True)
class Wants:
    """The outputs that a proposal requests; nothing else leaves the pass.

    nodes: which nodes reach the LM head (None: the last given node and all after it).
    best: how many tokens with the largest sum of logit and noise; the first is the node's token.
    logprobs: how many of the most likely tokens of the raw logits, besides the chosen one; None: none.
    of: for single nodes, a token whose raw log-probability is wanted instead of the chosen one's.
    rows: whole rows of probabilities as sampling sees them.
    logits: whole rows of raw logits.
    hidden: the hidden states that enter these layers (the number of layers: before the final norm).
    """

    nodes: tuple[int, ...] | None = None
    best: int = 1
    logprobs: int | None = None
    of: Mapping[int, int] = field(default_factory=_none)
    rows: bool = False
    logits: bool = False
    hidden: tuple[int, ...] = ()


DEFAULT_WANTS = Wants()
"""The token of each node from the last given one on."""


@dataclass(slots=True)
class Proposal:
    """A graph for a named model, and what is known about it before the pass.

    given: how many leading nodes hold settled tokens whose KV is not computed yet.
    offset: a node at position p is scored for position p + offset (1: next token, 0: itself).
    layers: the range of layers to run (None: all); from a later layer on, `hidden` is the input.
    draft_head: the draft head that runs instead of the model's layers, over the same slots. Its scores
      are its top-k candidates with their logits in `values`; the request's sampling does not apply.
    drafted: the drafter's own distribution for each drafted node, where it has one.
    processors, sampling: set by the engine from the request, for every model alike. The engine may
      change a proposal once it has it.
    exact_match: set by the engine: a drafted token is accepted only where it equals the target's own
      token, so that the accepted run is known as soon as the scores are.
    labels: the drafter of a node, where several drafters share a graph.
    survivors: in a later round of a step, which nodes of the previous round are the leading ones of
      this one (None: all of them). The other nodes and their KV are dropped.
    """

    graph: TokenGraph
    given: int
    model: str = TARGET
    offset: int = 1
    layers: tuple[int, int] | None = None
    draft_head: str = ""
    hidden: FloatArray | None = None
    drafted: Mapping[int, FloatArray] = field(default_factory=_none)
    wants: Wants = DEFAULT_WANTS
    processors: Mapping[int, LogitsProcessors] = field(default_factory=_none)
    sampling: SamplingSpec = GREEDY
    exact_match: bool = False
    labels: Mapping[int, str] = field(default_factory=_none)
    survivors: tuple[int, ...] | None = None

    @property
    def root(self) -> NodeId:
        """The node of the last settled token: drafts are its descendants."""
        return NodeId(self.given - 1)

    @property
    def wanted(self) -> IntArray:
        """The nodes that reach the LM head."""
        if self.wants.nodes is not None:
            return np.asarray(self.wants.nodes, dtype=np.int64)
        return np.arange(max(self.given - 1, 0), len(self.graph))

    def follows(self, earlier: Proposal | None) -> bool:
        """Whether it can be a model's next round in a step.

        A round continues the whole graph of the earlier one, or survivors of it that see no other
        node; the given nodes always survive. New nodes may follow.
        """
        if self.survivors is None or earlier is None:
            return self.survivors is None and (
                earlier is None or self.graph.starts_with(earlier.graph)
            )
        given = tuple(range(earlier.given))
        return self.survivors[: earlier.given] == given and self.graph.starts_with(
            earlier.graph.part(self.survivors)
        )

    def with_wants(self, wants: Wants) -> Proposal:
        """A copy of the proposal with other requested outputs."""
        return replace(self, wants=wants)


@dataclass(frozen=True, slots=True)
class Scores:
    """The output of a pass for one proposal. Each array has one row per node of `nodes`."""

    nodes: IntArray
    best: IntArray
    logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    rows: FloatArray | None = None
    logits: FloatArray | None = None
    hidden: Mapping[int, FloatArray] = field(default_factory=_none)
    """By layer, one row per node of the graph that this pass computed."""
    values: FloatArray | None = None
    """The logits of `best`, from a draft head."""
    chain: IntArray | None = None
    """The most likely chain through `best`, where the draft head finds it on the device."""
    chain_probabilities: FloatArray | None = None
    """The draft head's probability of each token of the chain."""

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of one proposal from the scores of consecutive nodes."""
        first = parts[0]
        if len(parts) == 1:
            return first
        rows = [part.rows for part in parts if part.rows is not None]
        logits = [part.logits for part in parts if part.logits is not None]
        return cls(
            nodes=np.concatenate([part.nodes for part in parts]),
            best=np.concatenate([part.best for part in parts]),
            logprobs=tuple(line for part in parts for line in part.logprobs),
            rows=np.concatenate(rows) if rows else None,
            logits=np.concatenate(logits) if logits else None,
            hidden=first.hidden,
        )

    def row(self, node: NodeId) -> int:
        """The row of a node; KeyError if it was not requested."""
        nodes = self.nodes
        size = len(nodes)
        found = node - nodes.item(0) if size else 0  # the common case: they are consecutive
        if not (0 <= found < size and nodes.item(found) == node):
            found = int(np.searchsorted(nodes, node))
            if found == len(nodes) or nodes[found] != node:
                raise KeyError(f"node {node} was not requested")
        return found

    def token(self, node: NodeId) -> TokenId:
        """The token that the model predicts after (or at) a node: argmax or seeded sample."""
        return TokenId(self.best.item(self.row(node), 0))

    def candidates(self, node: NodeId) -> list[TokenId]:
        """The node's token and the runners-up, best first."""
        return [TokenId(int(t)) for t in self.best[self.row(node)] if t >= 0]

    def probabilities(self, node: NodeId) -> FloatArray:
        """The distribution after (or at) a node."""
        if self.rows is None:
            raise KeyError("rows were not requested")
        return np.asarray(self.rows[self.row(node)], dtype=np.float32)


@dataclass(slots=True)
class Verdict:
    """The decision of an acceptor. Its facts are separate because they happen at separate times.

    settled: position -> token, final from now on.
    keep: nodes whose KV is valid for good, in the order in which to keep it.
    reuse: nodes whose KV is stale but used again on purpose (lossy methods only).
    forks: node -> how many further sequences continue from there.
    nodes: the node whose scores settled a position, where positions are not settled in order.
    note: the acceptor's own state for the next step; it becomes the drafter's state, unless it has one.
    """

    settled: Mapping[Position, TokenId] = field(default_factory=dict)
    keep: tuple[NodeId, ...] = ()
    reuse: tuple[NodeId, ...] = ()
    forks: Mapping[NodeId, int] = field(default_factory=_none)
    nodes: Mapping[Position, NodeId] = field(default_factory=_none)
    note: Any = None
