"""Passes on CPUs in native code: int8 or int4 weights, 8- or 12-bit activations, int8 pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.core.host import address
from outstride.core.proposal import Scores
from outstride.core.select import select
from outstride.ops.contract import Ops, Span, Wanted, gates_of
from outstride.ops.cpu import native
from outstride.ops.cpu.choice import HEAD_ROWS, Way, portions, way_of
from outstride.ops.cpu.packed import rounded
from outstride.ops.cpu.parts import Parts
from outstride.ops.cpu.workspace import Batch, together

__all__ = ["Cpu", "native"]


class Cpu(Parts, Ops):
    """Weights in int8, those of layers perhaps in int4; cache in int8."""

    # --- the pass ---------------------------------------------------------------------------------

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> Batch:
        rows = spans[-1].rows.stop
        if rows > self._space.rows:
            self._open(rounded(rows, 256))
        self._space.fill(spans, rows, gates_of(spans) if self._adapter else None)
        last = max(self._space.layout.positions[:rows].tolist())
        if last >= len(self._cos):
            self._cos, self._sin = self._turns(2 * last + 1)
            self._space.struct.cos = address(self._cos)
            self._space.struct.sin = address(self._sin)
        slots = self._space.layout.slots[:rows].copy()
        return Batch(spans, rows, slots, together(slots))

    def enter(self, batch: Batch, states: Sequence[FloatArray | None]) -> FloatArray:
        x, spans = self._space.x, batch.spans
        if not any(state is not None for state in states) and not any(
            span.graph.mixtures for span in spans
        ):
            tokens = [span.graph.tokens[span.first :] for span in spans]
            return self._rows(tokens[0] if len(tokens) == 1 else np.concatenate(tokens), x)
        for span, state in zip(spans, states, strict=True):
            if state is None:
                x[span.rows] = self._embed(span)
            else:
                x[span.rows, : state.shape[1]] = state
        return x

    def run(
        self, layers: Callable[[], FloatArray], batch: Batch, whole: tuple[int, int] | None
    ) -> FloatArray:
        """A whole pass is one call, between the layers whose states are stored."""
        if whole is None:
            return layers()
        x, (start, end) = self.enter(batch, [None] * len(batch.spans)), whole
        own = start == 0
        for stop in sorted({*self._planes, end}) if own else (end,):
            if stop > start:
                self._lib.outstride_layers(self._engine, self._calls[start], stop - start)
            if own:
                self.keep_features(stop, x, batch)
            start = stop
        if end == self._shape.layers:
            self.digest(batch)
        return x

    def _embed(self, span: Span) -> FloatArray:
        """The inputs of a span's nodes; a mixture is summed in the order in which it is given."""
        graph, first = span.graph, span.first
        state = self._rows(np.maximum(graph.tokens[first:], 0))
        for node, mixture in graph.mixtures.items():
            if node >= first:
                total = np.zeros(self.width, dtype=np.float32)
                rows = self._rows(np.asarray(mixture.tokens, dtype=np.int64))
                for row, weight in zip(rows, mixture.weights, strict=True):
                    total += row * np.float32(weight)
                state[node - first] = total
        return state

    def project(self, layer: int, x: FloatArray, batch: Batch) -> None:
        if all(part.first != layer for part in self._followers.values()):  # `follow` did it there
            self._lib.outstride_project(self._engine, self._calls[layer])

    def attend(self, layer: int, queries: None, batch: Batch) -> None:
        self._lib.outstride_attend(self._engine, self._calls[layer])

    def output(self, layer: int, x: FloatArray, mixed: None, batch: Batch) -> FloatArray:
        self._lib.outstride_output(self._engine, self._calls[layer])
        return x

    def mlp(self, layer: int, x: FloatArray, batch: Batch) -> FloatArray:
        self._lib.outstride_mlp(self._engine, self._calls[layer])
        return x

    def keep_features(self, layer: int, x: FloatArray, batch: Batch) -> None:
        if layer in self._planes:
            size, at = self._shape.hidden_size, self._planes.index(layer)
            self._features[batch.where, at * size : (at + 1) * size] = x[:, :size]

    def leave(self, x: FloatArray, rows: slice) -> FloatArray:
        return x[rows]

    def read(self, state: FloatArray) -> FloatArray:
        return state[:, : self._shape.hidden_size].copy()

    # --- the head ---------------------------------------------------------------------------------

    def head(self, wanted: Sequence[Wanted]) -> list[Scores]:
        """Trained parts one by one, all other nodes in portions, by the way their tokens are chosen."""
        results: list[list[Scores]] = [[] for _ in wanted]
        parts: dict[Way, list[tuple[int, IntArray]]] = {}
        for i, item in enumerate(wanted):
            if item.proposal.graft:
                results[i].append(self._guesses(item))
            elif len(item.nodes):
                parts.setdefault(way_of(item), []).append((i, item.nodes))
        for way, listed in parts.items():
            for portion in portions(listed, HEAD_ROWS):
                self._choose(way, wanted, portion, results)
        return [
            Scores.joined(found or [self._nothing(item)])
            for item, found in zip(wanted, results, strict=True)
        ]

    def _nothing(self, item: Wanted) -> Scores:
        """The scores of no nodes."""
        none = np.zeros((0, self._shape.vocab_size), dtype=np.float32)
        return select(item.proposal, item.nodes, none)

    # --- the cache --------------------------------------------------------------------------------

    def move(self, sources: IntArray, targets: IntArray) -> None:
        count = len(sources)
        both = np.concatenate([sources, targets]).astype(np.int64)
        if len(targets) != count or (count and not (both.min() >= 0 and both.max() < self._slots)):
            raise ValueError("a slot outside the cache")
        room = np.empty(count * 2 * self._shape.kv_heads * (self._record // 16), dtype=np.uint8)
        self._lib.outstride_move(
            self._calls[0],
            len(self._calls),
            address(both),
            address(both[count:]),
            count,
            address(room),
        )
        if self._planes:
            self._features[targets] = self._features[sources]
        for part in self._followers.values():
            part.carried[targets] = part.carried[sources]

    def feature(self, slot: int) -> FloatArray:
        return np.array(self._features[slot], dtype=np.float32)

    def final_norm(self) -> torch.Tensor:
        return torch.from_numpy(self._weights.norm[: self._shape.hidden_size].copy())

    def add_rows(self, rows: torch.Tensor) -> int:
        before = len(self._extra)
        self._extra = np.concatenate([self._extra, rows.numpy().astype(np.float32)])
        return before
