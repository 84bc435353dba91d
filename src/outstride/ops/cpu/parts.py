"""Trained parts on a model: what makes their entries, what they go on from, what they guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outstride.core.contracts import Work
from outstride.core.graph import FloatArray, IntArray
from outstride.core.host import address
from outstride.core.proposal import Scores
from outstride.ops.contract import GraftWeights, HeadsWeights, Span, Wanted
from outstride.ops.cpu import native
from outstride.ops.cpu.choice import Choice, states_of
from outstride.ops.cpu.following import Follower
from outstride.ops.cpu.grafts import Grafted
from outstride.ops.cpu.packed import Packed, rounded
from outstride.ops.cpu.workspace import Batch
from outstride.ops.following import before
from outstride.ops.heads import Heads


class Parts(Choice):
    """Trained parts by name, and the embedding, which some of them read as well."""

    def attach(self, name: str, weights: GraftWeights) -> int:
        """Takes in a part with layers; returns the number of the first one."""
        shape, first = self._shape, len(self._keys)
        self.windows += (weights.window,) * len(weights.layers)
        self._planes += tuple(tap for tap in weights.taps if tap not in self._planes)
        self._features = np.zeros(
            (self._slots, len(self._planes) * shape.hidden_size), dtype=np.float32
        )
        if weights.follow is not None:
            own = self._weights
            self._followers[name] = Follower.pack(weights, shape, first, own, self._slots)
        else:
            self._grafts[name] = Grafted.pack(weights, shape, first, self._weights)
        self._keys += [self._entries() for _ in weights.layers]
        self._values += [self._entries() for _ in weights.layers]
        self._open(self._space.rows)
        return first

    def attach_heads(self, name: str, weights: HeadsWeights) -> tuple[int, int]:
        """Takes in trained heads; returns where the states stand that they start from."""
        size = self._shape.hidden_size
        if weights.tap not in self._planes:
            self._planes += (weights.tap,)
            self._features = np.zeros((self._slots, len(self._planes) * size), dtype=np.float32)
        rows = self._weights.vocabulary.rows(weights.vocabulary, size)
        eps, shared = self._shape.norm_eps, Packed.of(rows, None, self.width)
        self._heads[name] = Heads.pack(weights, eps, self._packed, shared)
        self._open(self._space.rows)
        at = self._planes.index(weights.tap) * size
        return at, at + size

    def _packed(self, matrix: torch.Tensor) -> Packed:
        depth = rounded(matrix.shape[1], 32)
        self._deepest = max(self._deepest, depth)
        return Packed.of(matrix.numpy(), None, depth)

    # --- in a pass --------------------------------------------------------------------------------

    def whole(self, work: Sequence[Work]) -> Callable[[], list[Scores]] | None:
        """A part's pass behind one sequence, by the shortest way: it comes before most drafts."""
        piece, proposal = work[0], work[0].proposal
        graft, graph = self._grafts.get(proposal.graft), proposal.graph
        if graft is None or len(work) > 1 or piece.first or proposal.hidden is not None:
            return None
        rows = len(graph.tokens)
        if (
            proposal.wants.hidden
            or graph.mixtures
            or rows > self._space.rows
            or max(graph.positions.tolist()) >= len(self._cos)
        ):
            return None
        self._space.fill([Span(graph, piece.slots, piece.table, 0, 0, None)], rows, None)
        x = self._rows(graph.tokens, self._space.x)
        self._lib.outstride_layers(self._engine, self._calls[graft.first], len(graft.layers))
        scores = self._guesses(Wanted(proposal, proposal.wanted, x, 0))
        return lambda: [scores]

    def digest(self, batch: Batch) -> None:
        """Makes the entries of trained parts from the states that the pass has stored."""
        for graft in self._grafts.values():
            self._digest(graft, batch)
        for name, follower in self._followers.items():
            side = self._beside(follower.weights.taps, batch.slots)
            follower.digest(side, batch.slots, self)
            self._follow(name, batch)

    def _digest(self, graft: Grafted, batch: Batch) -> None:
        size, struct = self._shape.hidden_size, self._space.struct
        if graft.taps == self._planes and self._features.shape[1] == graft.depth:
            states = self._features[batch.where]
        else:
            states = np.zeros((batch.rows, graft.depth), dtype=np.float32)
            states[:, : len(graft.taps) * size] = self._beside(graft.taps, batch.where)
        x = self._results(states, graft.scale, graft.mix, size * len(graft.taps))
        if not x.shape[1] == size == self.width:
            mixed, x = x, np.zeros((batch.rows, self.width), dtype=np.float32)
            x[:, :size] = mixed[:, :size]
        held, struct.x = struct.x, address(x)
        for call in graft.calls:
            self._lib.outstride_project(self._engine, call)
        struct.x = held

    def _beside(self, taps: tuple[int, ...], where: slice | IntArray) -> FloatArray:
        """The stored states of some layers, one beside the other."""
        size, stored = self._shape.hidden_size, self._features[where]
        planes = [self._planes.index(tap) * size for tap in taps]
        return np.concatenate([stored[:, at : at + size] for at in planes], axis=1)

    def follow(self, name: str, batch: Batch) -> FloatArray:
        """The states with which nodes enter a part that goes on from states."""
        x = self._space.x
        x[:, : self._shape.hidden_size] = self._follow(name, batch)
        return x

    def _follow(self, name: str, batch: Batch) -> FloatArray:
        """What enters a part that goes on from states; its queries, keys and values are in place."""
        part, space = self._followers[name], self._space
        tokens = np.concatenate([s.graph.tokens[s.first :] for s in batch.spans])
        positions = np.concatenate([s.graph.positions[s.first :] for s in batch.spans])
        x, beside = part.enter(tokens, before(batch.spans, self._page_size), self)
        queries, *entries = part.project(x, beside, positions, self)
        keys, values = (np.ascontiguousarray(entry, dtype=np.float32) for entry in entries)
        layer, slots = self._calls[part.first], np.ascontiguousarray(batch.slots, dtype=np.int64)
        self._lib.outstride_keep(layer, address(slots), batch.rows, address(keys), address(values))
        queries = queries.reshape(batch.rows, -1)
        space.queries[: batch.rows, : queries.shape[1]] = queries
        return x

    def carry(self, name: str, x: FloatArray, batch: Batch) -> None:
        """Stores the states that leave such a part."""
        self._followers[name].carry(x[:, : self._shape.hidden_size], batch.slots)

    def _guesses(self, item: Wanted) -> Scores:
        """The likeliest tokens of a trained part, and their logits."""
        if item.proposal.graft in self._heads:
            return self._heads[item.proposal.graft].guesses(item, self)
        size, name = self._shape.hidden_size, item.proposal.graft
        x = states_of(item, item.nodes)
        k = min(item.proposal.wants.best, native.MOST_FUSED)
        if name in self._followers:
            best, values = self._followers[name].guesses(x[:, :size], k, self)
            return Scores(item.nodes, best, values=values)
        graft = self._grafts[name]
        found, values = self._highest(x, graft.norm, graft.head, size, k)
        return Scores(item.nodes, graft.vocabulary[found], values=values)

    # --- the embedding ----------------------------------------------------------------------------

    def embed(self, tokens: IntArray) -> FloatArray:
        """Rows of the embedding."""
        return self._rows(tokens)[:, : self._shape.hidden_size]

    def _rows(self, tokens: IntArray, out: FloatArray | None = None) -> FloatArray:
        """The same as wide as states are, perhaps in a given array of zeros."""
        size, listed, embedding = self._shape.vocab_size, tokens.tolist(), self._weights.embedding
        if not listed or max(listed) < size:
            return embedding.rows(tokens, self.width, out)
        if out is None:
            out = np.zeros((len(listed), self.width), dtype=np.float32)
        known = [i for i, token in enumerate(listed) if token < size]
        for i in known:
            embedding.rows(tokens[i : i + 1], self.width, out[i : i + 1])
        beyond = tokens >= size if known else slice(None)
        if known == list(range(len(known))):  # masks behind what is known, most often
            beyond = slice(len(known), None)
        out[beyond, : self._shape.hidden_size] = self._extra[tokens[beyond] - size]
        return out
