"""A model without weights, whose logits are a hash of what a node sees.

It runs a pass in microseconds and never forgets: every cache entry remembers the inputs that its
node saw, so one entry kept by mistake, moved to the wrong slot or computed beside a rejected
neighbour changes all that follows, and `check` names it in the step in which it happens. Methods are
tested on it (and it is handy for writing one); it also speaks every corner of the model contract:
blocks, extra rows, mixtures, ranges of layers, features, hidden states.

It has two layers. An entry holds what each puts into the cache: `inputs` (what stands here) and
`saw` (what that node could see). Half of a logit depends on the last token alone, so that text
repeats itself and drafts are sometimes right; `accent` changes the other half only, which makes a
draft model that often agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from outstride.core.contracts import CAUSAL, Done, Masking, Pending, Vision, Work
from outstride.core.graph import FloatArray, IntArray, Mixture, TokenGraph
from outstride.core.proposal import Scores
from outstride.core.select import select
from outstride.core.sequence import Table
from outstride.errors import IntegrityError

Hashes = npt.NDArray[np.uint64]
LAYERS = 2


def _mix(x: Hashes, salt: int) -> Hashes:
    """A hash of 64 bits (the finaliser of splitmix64)."""
    z = (x + np.uint64(salt)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _together(visible: npt.NDArray[np.bool_], values: Hashes) -> Hashes:
    """For each row, a sum over what is visible: order plays no part."""
    total: Hashes = (visible * _mix(values, 3)[None, :]).sum(axis=1, dtype=np.uint64)
    return total


def _pack(values: Hashes) -> FloatArray:
    return np.ascontiguousarray(values).view(np.float32).reshape(len(values), 2)


def _unpack(values: FloatArray) -> Hashes:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint64).reshape(-1)


class Toy:
    """Implements the model contract; see the module's text."""

    def __init__(
        self,
        *,
        vocab_size: int = 24,
        context: int = 512,
        pages: int = 64,
        page_size: int = 4,
        vision: Vision = CAUSAL,
        masking: Masking | None = None,
        accent: int = 0,
        habit: float = 5.5,
    ) -> None:
        self.vocab_size = vocab_size
        self.layers = LAYERS
        self.context = context
        self.pages = pages
        self.page_size = page_size
        self.vision = vision
        self.masking = masking
        self.fingerprint = f"toy-{accent}"
        self._accent = accent
        self._habit = habit
        self._inputs = np.zeros(pages * page_size, dtype=np.uint64)
        self._saw = np.zeros(pages * page_size, dtype=np.uint64)
        self.passes = 0

    # --- one pass ---------------------------------------------------------------------------------

    def forward(self, work: Sequence[Work]) -> Pending:
        self.passes += 1
        return Done([self._score(item) for item in work])

    def _embed(self, graph: TokenGraph) -> Hashes:
        inputs = _mix(graph.tokens.astype(np.uint64), 1)
        for node, mixture in graph.mixtures.items():
            inputs[node] = self._blend(mixture)
        return _mix(inputs ^ _mix(graph.positions.astype(np.uint64), 2), 5)

    def _blend(self, mixture: Mixture) -> np.uint64:
        rows = _mix(np.asarray(mixture.tokens).astype(np.uint64), 1)
        weights = (np.asarray(mixture.weights) * 1024).astype(np.uint64)
        return np.uint64((rows * weights).sum(dtype=np.uint64))

    def _visible(self, item: Work) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """Slots of the entries in play, and which of them each new node sees."""
        table, graph = item.table, item.proposal.graph
        stale_from = len(table) - table.stale
        covered = set(graph.positions.tolist())
        context = [
            table.pages[i // self.page_size] * self.page_size + i % self.page_size
            for i in range(len(table))
            if i < stale_from or table.positions[i] not in covered
        ]
        slots = np.concatenate([np.asarray(context, dtype=np.int64), item.slots])
        sees = np.ones((len(graph), len(slots)), dtype=np.bool_)
        sees[:, len(context) :] = graph.sees
        return slots, sees[item.first :]

    def _score(self, item: Work) -> Scores:
        proposal, graph, first = item.proposal, item.proposal.graph, item.first
        low, high = proposal.layers or (0, LAYERS)
        slots, sees = self._visible(item)
        own = item.slots[first:]
        inputs = self._embed(graph)[first:]
        if low == 0:
            self._inputs[own] = inputs
            self._saw[own] = 0
            saw = _mix(inputs + _together(sees, self._inputs[slots]), 7)
        else:
            if proposal.hidden is None:
                raise ValueError("a later layer needs hidden states")
            saw = _unpack(proposal.hidden)
        state = saw
        if high == LAYERS:
            self._saw[own] = saw
            state = _mix(saw + _together(sees, self._saw[slots]), 11)
        hidden = {0: _pack(inputs), 1: _pack(saw), LAYERS: _pack(state)}
        nodes = proposal.wanted
        if proposal.wants.nodes is None:
            nodes = nodes[nodes >= first]
        raw = self.logits(graph.tokens[nodes], state[nodes - first])
        return select(proposal, nodes, raw, {n: hidden[n] for n in proposal.wants.hidden})

    def logits(self, tokens: IntArray, states: Hashes) -> FloatArray:
        """Rows of logits for nodes with these inputs and final states."""
        vocabulary = np.arange(self.vocab_size, dtype=np.uint64)

        def spread(values: Hashes, salt: int) -> FloatArray:
            grid = _mix(values[:, None] ^ _mix(vocabulary, salt)[None, :], salt + 1)
            return (grid >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)

        habit = spread(_mix(tokens.astype(np.uint64), 13), 17) * np.float32(self._habit)
        mood = spread(states, 19 + 2 * self._accent) * np.float32(4.0 - self._habit / 2)
        return habit + mood

    # --- the cache --------------------------------------------------------------------------------

    def move(self, sources: IntArray, targets: IntArray) -> None:
        self._inputs[targets] = self._inputs[sources]
        self._saw[targets] = self._saw[sources]

    def feature(self, table: Table, position: int) -> FloatArray:
        slot = self._slot(table, table.positions.index(position))
        return _pack(self._saw[slot : slot + 1]).reshape(-1)

    def _slot(self, table: Table, entry: int) -> int:
        return table.pages[entry // self.page_size] * self.page_size + entry % self.page_size

    def check(
        self, table: Table, tokens: Sequence[int] | Mapping[int, int], block: int | None = None
    ) -> None:
        """Raises IntegrityError at the first kept entry that is not what honest reading would give.

        `tokens` are by position and must reach every kept one; `block` says how they were read.
        """
        kept = table.positions[: len(table) - table.stale]
        if not kept:
            return
        slots = np.asarray([self._slot(table, i) for i in range(len(kept))])
        positions = np.asarray(kept)
        graph_inputs = _mix(np.asarray([tokens[p] for p in kept]).astype(np.uint64), 1)
        inputs = _mix(graph_inputs ^ _mix(positions.astype(np.uint64), 2), 5)
        order = np.arange(len(kept))
        sees = order[None, :] <= order[:, None]
        if block is not None:
            blocks = positions // block
            sees = blocks[None, :] <= blocks[:, None]
        saw = _mix(inputs + _together(sees, inputs), 7)
        for i, position in enumerate(kept):
            if self._inputs[slots[i]] != inputs[i]:
                raise IntegrityError(f"the entry of position {position} holds another input")
            if self._saw[slots[i]] != saw[i]:
                raise IntegrityError(f"the entry of position {position} saw something else")
