"""A model without weights, whose logits are a hash of what a node sees.

A pass takes microseconds, and every bit of the KV cache counts: the KV of a node is a hash of all
inputs that the node saw. KV that is kept by mistake, moved to the wrong slot or computed next to a
rejected sibling changes all text after it, and `check` names it in the step in which it happens.
Methods are tested on this model. It supports the whole model contract: blocks, extra rows,
mixtures, ranges of layers, features, hidden states, draft heads, adapters.

It has two layers, and the KV of a slot is one hash for each: `inputs` (the input at this position) and
`saw` (all that the node could see). Draft heads have KV of their own, made from what the model saw.
Half of a logit depends on the last token alone, so text repeats itself and drafts are sometimes
right; `accent` changes the other half only, which gives a draft model that often agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from outstride.core.contracts import (
    CAUSAL,
    AttentionPattern,
    CompletedPass,
    MaskedSpec,
    PassInput,
    PendingPass,
    TrainedFilter,
)
from outstride.core.draft_heads import (
    BigramTable,
    BlockDraftHead,
    DraftHead,
    EagleDraftHead,
    MedusaDraftHead,
    PromptTokensHead,
)
from outstride.core.graph import FloatArray, IntArray, Mixture, TokenGraph
from outstride.core.proposal import Proposal, Scores
from outstride.core.scoring import select
from outstride.core.sequence import BlockTable
from outstride.errors import IntegrityError

Hashes = npt.NDArray[np.uint64]
LAYERS = 2
_MULTIPLIERS = tuple(map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))
_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))


def _mix(x: Hashes, salt: int) -> Hashes:
    """A 64-bit hash (the finaliser of splitmix64)."""
    z: Hashes = x + np.uint64(salt)
    z *= _MULTIPLIERS[0]
    z ^= z >> _SHIFTS[0]
    z *= _MULTIPLIERS[1]
    z ^= z >> _SHIFTS[1]
    z *= _MULTIPLIERS[2]
    z ^= z >> _SHIFTS[2]
    return z


def _together(visible: npt.NDArray[np.bool_], values: Hashes) -> Hashes:
    """For each row of visible [rows, slots], a sum of hashes: it does not depend on their order."""
    total: Hashes = (visible * _mix(values, 3)[None, :]).sum(axis=1, dtype=np.uint64)
    return total


def _pack(values: Hashes) -> FloatArray:
    return np.ascontiguousarray(values).view(np.float32).reshape(len(values), 2)


def _unpack(values: FloatArray) -> Hashes:
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint64).reshape(-1)


def _draft_heads(vocab_size: int, rank: int = 2) -> dict[str, DraftHead]:
    """One draft head of each kind."""
    bigram = BigramTable(
        rows=np.arange(vocab_size),
        left=np.zeros((vocab_size + 1, rank), dtype=np.float32),
        right=np.zeros((vocab_size, rank), dtype=np.float32),
    )
    medusa = MedusaDraftHead(kind="heads", block=5, bigram=bigram, feature_range=(0, 2))
    return {
        "block": BlockDraftHead(kind="block-drafter", block=6, mask=vocab_size, bigram=bigram),
        "heads": medusa,
        "sequential": replace(medusa, sequential=True),
        "eagle": EagleDraftHead(kind="eagle", block=5),
        "prompts": PromptTokensHead(
            kind="prompt-tokens",
            block=4,
            first_token=vocab_size,
            rank_accuracy=np.asarray([[0.4, 0.2], [0.3, 0.1], [0.2, 0.1]], dtype=np.float32),
        ),
    }


def _filter() -> TrainedFilter:
    """A filter with fixed weights that depends on all features."""
    places = np.arange(3 * 14, dtype=np.float32).reshape(3, 14)
    return TrainedFilter(
        kind="unmask-filter",
        inner=np.cos(1.7 * places),
        inner_bias=np.asarray([0.1, -0.2, 0.3], dtype=np.float32),
        outer=np.asarray([0.8, -0.6, 0.5], dtype=np.float32),
        outer_bias=0.1,
        threshold=0.6,
    )


def _state_filters() -> dict[str, TrainedFilter]:
    """Filters on hidden states, whose two numbers are as good as random."""
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
    """Implements `core.contracts.Model`; see the docstring of the module."""

    def __init__(
        self,
        *,
        vocab_size: int = 24,
        context: int = 512,
        pages: int = 64,
        page_size: int = 4,
        attention_pattern: AttentionPattern = CAUSAL,
        masking: MaskedSpec | None = None,
        accent: int = 0,
        habit: float = 5.5,
        adapters: Sequence[str] = (),
    ) -> None:
        self.vocab_size = vocab_size
        self.layers = LAYERS
        self.context = context
        self.pages = pages
        self.page_size = page_size
        self.attention_pattern = attention_pattern
        self.masked_spec = masking
        self.fingerprint = f"toy-{accent}"
        self.build = "toy"
        self._accent = accent
        self._habit = habit
        ids = np.arange(vocab_size, dtype=np.uint64)
        self._habit_ids, self._mood_ids = _mix(ids, 17), _mix(ids, 19 + 2 * accent)
        self._inputs = np.zeros(pages * page_size, dtype=np.uint64)
        self._saw = np.zeros(pages * page_size, dtype=np.uint64)
        self._draft_kv = np.zeros(pages * page_size, dtype=np.uint64)
        self.draft_heads = _draft_heads(vocab_size)
        self.filters = {"filter": _filter(), **_state_filters()}
        self.adapters = {name: f"digest of {name}" for name in adapters}
        self.passes = 0

    # --- one pass ---------------------------------------------------------------------------------

    def forward(self, work: Sequence[PassInput]) -> PendingPass:
        self.passes += 1
        return CompletedPass([self._score(item) for item in work])

    def _embed(self, graph: TokenGraph, adapter: str = "") -> Hashes:
        inputs = _mix(graph.tokens.astype(np.uint64), 1 + self._number(adapter))
        for node, mixture in graph.mixtures.items():
            inputs[node] = self._blend(mixture)
        return _mix(inputs ^ _mix(graph.positions.astype(np.uint64), 2), 5)

    def _number(self, adapter: str) -> int:
        """A different number for each adapter, which changes all that its nodes see; 0: none."""
        return 64 * (1 + list(self.adapters).index(adapter)) if adapter else 0

    def _blend(self, mixture: Mixture) -> np.uint64:
        rows = _mix(np.asarray(mixture.tokens).astype(np.uint64), 1)
        weights = (np.asarray(mixture.weights) * 1024).astype(np.uint64)
        return np.uint64((rows * weights).sum(dtype=np.uint64))

    def _visible(self, item: PassInput) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """[slots] of context and graph, and which of them each new node sees, [nodes, slots]."""
        table, graph = item.table, item.proposal.graph
        context = self._slots(table, len(table))
        if table.stale:
            covered, stale_from = set(graph.positions.tolist()), len(table) - table.stale
            replaced = [i >= stale_from and p in covered for i, p in enumerate(table.positions)]
            context = context[~np.asarray(replaced, dtype=np.bool_)]
        slots = np.concatenate([context, item.slots])
        sees = np.ones((len(graph), len(slots)), dtype=np.bool_)
        sees[:, len(context) :] = graph.sees
        return slots, sees[item.first :]

    def _score(self, item: PassInput) -> Scores:
        proposal, graph, first = item.proposal, item.proposal.graph, item.first
        low, high = proposal.layers or (0, LAYERS)
        slots, sees = self._visible(item)
        own = item.slots[first:]
        if proposal.draft_head:
            head = self.draft_heads[proposal.draft_head]
            if isinstance(head, MedusaDraftHead):
                return self._score_medusa(item, head)
            if isinstance(head, EagleDraftHead):
                return self._score_eagle(item)
            return self._score_block(proposal, own)
        inputs = self._embed(graph, item.adapter)[first:]
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
            self._draft_kv[own] = _mix(saw, 23)
            state = _mix(saw + _together(sees, self._saw[slots]), 11)
        hidden = {0: _pack(inputs), 1: _pack(saw), LAYERS: _pack(state)}
        nodes = proposal.wanted
        if proposal.wants.nodes is None:
            nodes = nodes[nodes >= first]
        raw = self.logits(graph.tokens[nodes], state[nodes - first])
        return select(proposal, nodes, raw, {n: hidden[n] for n in proposal.wants.hidden})

    def logits(self, tokens: IntArray, hidden: Hashes) -> FloatArray:
        """Logits [nodes, vocab_size] of nodes with these input tokens and final hidden states."""

        def spread(values: Hashes, ids: Hashes, salt: int) -> FloatArray:
            grid = _mix(values[:, None] ^ ids, salt)
            return (grid >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)

        habit = spread(_mix(tokens.astype(np.uint64), 13), self._habit_ids, 18)
        mood = spread(hidden, self._mood_ids, 20 + 2 * self._accent)
        return habit * np.float32(self._habit) + mood * np.float32(4.0 - self._habit / 2)

    def _score_block(self, proposal: Proposal, own: IntArray) -> Scores:
        """A block drafter: the half of the logits that depends on the last token alone.

        The KV that it leaves in the slots of the graph is invalid: the target's pass writes over it.
        """
        self._draft_kv[own] = 0
        nodes, rows = proposal.wanted, []
        token = int(proposal.graph.tokens[proposal.root])
        for _ in nodes:
            habit = self.logits(np.asarray([token]), np.zeros(1, dtype=np.uint64))
            rows.append(habit[0])
            token = int(habit[0].argmax())
        raw = np.asarray(rows)
        order = np.argsort(-raw, axis=1, kind="stable")[:, : proposal.wants.best]
        return Scores(nodes, order, values=np.take_along_axis(raw, order, axis=1))

    def _score_medusa(self, item: PassInput, head: MedusaDraftHead) -> Scores:
        """Medusa heads: the same half of the logits, if they start from the right hidden state."""
        proposal, graph = item.proposal, item.proposal.graph
        nodes = proposal.wanted
        due = self.feature(item.table, int(graph.positions[0]) - 1)
        assert proposal.hidden is not None
        for node, row in enumerate(proposal.hidden):
            depth = int(graph.positions[node] - graph.positions[0]) if head.sequential else 0
            if _unpack(row[None])[0] != _unpack(due[None])[0] + np.uint64(depth):
                raise IntegrityError(
                    f"node {node} of Medusa heads starts from another hidden state"
                )
        token, rows = int(graph.tokens[0]), []
        for node in nodes.tolist():
            if head.sequential:
                token = int(graph.tokens[node])
            habit = self.logits(np.asarray([token]), np.zeros(1, dtype=np.uint64))[0]
            rows.append(habit)
            token = int(habit.argmax())
        raw = np.asarray(rows)
        order = np.argsort(-raw, axis=1, kind="stable")[:, : proposal.wants.best]
        left = _pack(_unpack(proposal.hidden[nodes]) + np.uint64(1))
        values = np.take_along_axis(raw, order, axis=1)
        return Scores(nodes, order, values=values, hidden={0: left})

    def _score_eagle(self, item: PassInput) -> Scores:
        """An EAGLE head: the same half of the logits, if it finds the right hidden states."""
        proposal, graph, first = item.proposal, item.proposal.graph, item.first
        marks = _mix(self._embed(graph), 31)
        for node in range(first, len(graph)):
            if (parent := int(graph.parents[node])) >= 0:
                found, due = self._draft_kv[item.slots[parent]], marks[parent]
            else:
                slot = self._slot(item.table, item.table.positions.index(graph.positions[node] - 1))
                found, due = self._draft_kv[slot], _mix(self._saw[slot : slot + 1], 23)[0]
            if found != due:
                raise IntegrityError(f"node {node} of an EAGLE head reads another hidden state")
            self._draft_kv[item.slots[node]] = marks[node]
        nodes = proposal.wanted[proposal.wanted >= first]
        raw = self.logits(graph.tokens[nodes], np.zeros(len(nodes), dtype=np.uint64))
        order = np.argsort(-raw, axis=1, kind="stable")[:, : proposal.wants.best]
        return Scores(nodes, order, values=np.take_along_axis(raw, order, axis=1))

    # --- the cache --------------------------------------------------------------------------------

    def move(self, sources: IntArray, targets: IntArray) -> None:
        self._inputs[targets] = self._inputs[sources]
        self._saw[targets] = self._saw[sources]
        self._draft_kv[targets] = self._draft_kv[sources]

    def feature(self, table: BlockTable, position: int) -> FloatArray:
        slot = self._slot(table, table.positions.index(position))
        return _pack(self._saw[slot : slot + 1]).reshape(-1)

    def _slot(self, table: BlockTable, index: int) -> int:
        return table.pages[index // self.page_size] * self.page_size + index % self.page_size

    def _slots(self, table: BlockTable, count: int) -> IntArray:
        """The slots of the first `count` cached tokens, [count]."""
        pages = np.asarray(table.pages[: -(-count // self.page_size)], dtype=np.int64)
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)[:count]

    def check(
        self,
        table: BlockTable,
        tokens: Sequence[int] | Mapping[int, int],
        block: int | None = None,
        adapter: str = "",
    ) -> None:
        """Raises IntegrityError at the first kept KV that is not what prefilling the tokens would give.

        tokens: by position; they must cover every kept one. block: the attention pattern of settled
        tokens (`AttentionPattern.block`). adapter: the one that the tokens went through.
        """
        kept = table.positions[: len(table) - table.stale]
        if not kept:
            return
        slots, positions = self._slots(table, len(kept)), np.asarray(kept)
        number = 1 + self._number(adapter)
        graph_inputs = _mix(np.asarray([tokens[p] for p in kept]).astype(np.uint64), number)
        inputs = _mix(graph_inputs ^ _mix(positions.astype(np.uint64), 2), 5)
        if block is None:
            seen = np.cumsum(_mix(inputs, 3), dtype=np.uint64)
        else:
            blocks = positions // block
            seen = _together(blocks[None, :] <= blocks[:, None], inputs)
        saw = _mix(inputs + seen, 7)
        wrong = np.stack(
            [
                self._inputs[slots] != inputs,
                self._saw[slots] != saw,
                self._draft_kv[slots] != _mix(saw, 23),
            ],
            axis=1,
        )
        if not wrong.any():
            return
        first, kind = divmod(int(np.argmax(wrong)), wrong.shape[1])
        raise IntegrityError(
            (
                f"the KV of position {kept[first]} holds another input",
                f"the KV of position {kept[first]} saw something else",
                f"the draft KV of position {kept[first]} was left by a draft head",
            )[kind]
        )
