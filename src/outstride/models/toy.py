"""A model without weights, whose logits are a hash of what a node sees.

It runs a pass in microseconds and never forgets: every cache entry remembers the inputs that its
node saw, so one entry kept by mistake, moved to the wrong slot or computed beside a rejected
neighbour changes all that follows, and `check` names it in the step in which it happens. Methods are
tested on it (and it is handy for writing one); it also speaks every corner of the model contract:
blocks, extra rows, mixtures, ranges of layers, features, hidden states.

It has two layers. An entry holds what each puts into the cache: `inputs` (what stands here) and
`saw` (what that node could see); a trained part (`grafts`) has its own beside them, made from what the
model saw. Half of a logit depends on the last token alone, so that text
repeats itself and drafts are sometimes right; `accent` changes the other half only, which makes a
draft model that often agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from outstride.core.contracts import CAUSAL, Done, Filter, Graft, Masking, Pending, Vision, Work
from outstride.core.graph import FloatArray, IntArray, Mixture, TokenGraph
from outstride.core.proposal import Proposal, Scores
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


def _grafts(vocab_size: int, rank: int = 2) -> dict[str, Graft]:
    """What is known of trained parts outside the model, one of each kind."""
    graft = Graft(
        kind="block-drafter",
        block=6,
        mask=vocab_size,
        rows=np.arange(vocab_size),
        before=np.zeros((vocab_size + 1, rank), dtype=np.float32),
        after=np.zeros((vocab_size, rank), dtype=np.float32),
        plane=(0, 2),
    )
    ranks = np.asarray([[0.4, 0.2], [0.3, 0.1], [0.2, 0.1]], dtype=np.float32)
    return {
        "graft": graft,
        "heads": replace(graft, kind="heads", block=5),
        "chained": replace(graft, kind="heads", block=5, chained=True),
        "follow": replace(graft, kind="eagle", block=5, chained=True),
        "prompts": replace(graft, kind="prompt-tokens", block=4, ranks=ranks),
    }


def _filter() -> Filter:
    """A judge that was never trained, but looks at everything."""
    places = np.arange(3 * 14, dtype=np.float32).reshape(3, 14)
    return Filter(
        kind="unmask-filter",
        inner=np.cos(1.7 * places),
        inner_bias=np.asarray([0.1, -0.2, 0.3], dtype=np.float32),
        outer=np.asarray([0.8, -0.6, 0.5], dtype=np.float32),
        outer_bias=0.1,
        threshold=0.6,
    )


def _judges() -> dict[str, Filter]:
    """Judges of states, whose two numbers are as good as random."""
    inner = np.asarray([[1.0, -1.0], [-1.0, 0.5]], dtype=np.float32)
    judge = replace(_filter(), inner=inner, inner_bias=np.zeros(2, dtype=np.float32), layer=LAYERS)
    outer = np.asarray([2.0, 2.0], dtype=np.float32)
    return {
        "accept": replace(
            judge,
            kind="accept-head",
            inner=np.concatenate([inner, np.ones((2, 1), dtype=np.float32)], axis=1),
            outer=outer,
            outer_bias=0.5,
        ),
        "judge": replace(judge, kind="judge", outer=outer, outer_bias=-1.0),
    }


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
        self._grafted = np.zeros(pages * page_size, dtype=np.uint64)
        self.grafts = _grafts(vocab_size)
        self.filters = {"filter": _filter(), **_judges()}
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
        if proposal.graft:
            if self.grafts[proposal.graft].kind == "heads":
                return self._headed(item)
            if self.grafts[proposal.graft].kind == "eagle":
                return self._followed(item)
            return self._guess(proposal, own)
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
            self._grafted[own] = _mix(saw, 23)
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

    def _guess(self, proposal: Proposal, own: IntArray) -> Scores:
        """What a trained part says: habits alone. Its entries in the graph's slots are of no use."""
        self._grafted[own] = 0
        nodes, rows = proposal.wanted, []
        token = int(proposal.graph.tokens[proposal.root])
        for _ in nodes:
            habit = self.logits(np.asarray([token]), np.zeros(1, dtype=np.uint64))
            rows.append(habit[0])
            token = int(habit[0].argmax())
        raw = np.asarray(rows)
        order = np.argsort(-raw, axis=1, kind="stable")[:, : proposal.wants.best]
        return Scores(nodes, order, values=np.take_along_axis(raw, order, axis=1))

    def _headed(self, item: Work) -> Scores:
        """What trained heads say: habits again, if they start from the state that they should."""
        proposal, graph = item.proposal, item.proposal.graph
        chained, nodes = self.grafts[proposal.graft].chained, proposal.wanted
        due = self.feature(item.table, int(graph.positions[0]) - 1)
        assert proposal.hidden is not None
        for node, given in enumerate(proposal.hidden):
            deep = int(graph.positions[node] - graph.positions[0]) if chained else 0
            if _unpack(given[None])[0] != _unpack(due[None])[0] + np.uint64(deep):
                raise IntegrityError(f"node {node} of a pass of heads starts from another state")
        token, rows = int(graph.tokens[0]), []
        for node in nodes.tolist():
            if chained:
                token = int(graph.tokens[node])
            habit = self.logits(np.asarray([token]), np.zeros(1, dtype=np.uint64))[0]
            rows.append(habit)
            token = int(habit.argmax())
        raw = np.asarray(rows)
        order = np.argsort(-raw, axis=1, kind="stable")[:, : proposal.wants.best]
        left = _pack(_unpack(proposal.hidden[nodes]) + np.uint64(1))
        values = np.take_along_axis(raw, order, axis=1)
        return Scores(nodes, order, values=values, hidden={0: left})

    def _followed(self, item: Work) -> Scores:
        """What a part says that goes on from states: habits, if it finds those that it should."""
        proposal, graph, first = item.proposal, item.proposal.graph, item.first
        marks = _mix(self._embed(graph), 31)
        for node in range(first, len(graph)):
            if (parent := int(graph.parents[node])) >= 0:
                found, due = self._grafted[item.slots[parent]], marks[parent]
            else:
                slot = self._slot(item.table, item.table.positions.index(graph.positions[node] - 1))
                found, due = self._grafted[slot], _mix(self._saw[slot : slot + 1], 23)[0]
            if found != due:
                raise IntegrityError(f"node {node} of a part goes on from another state")
            self._grafted[item.slots[node]] = marks[node]
        nodes = proposal.wanted[proposal.wanted >= first]
        raw = self.logits(graph.tokens[nodes], np.zeros(len(nodes), dtype=np.uint64))
        order = np.argsort(-raw, axis=1, kind="stable")[:, : proposal.wants.best]
        return Scores(nodes, order, values=np.take_along_axis(raw, order, axis=1))

    # --- the cache --------------------------------------------------------------------------------

    def move(self, sources: IntArray, targets: IntArray) -> None:
        self._inputs[targets] = self._inputs[sources]
        self._saw[targets] = self._saw[sources]
        self._grafted[targets] = self._grafted[sources]

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
            if self._grafted[slots[i]] != _mix(saw[i : i + 1], 23)[0]:
                raise IntegrityError(f"the entry of position {position} is a guess of a part's")
