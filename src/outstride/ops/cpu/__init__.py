"""Passes on CPUs in native code: int8 or int4 weights, 12-bit activations, fp16 pages."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outstride.core.graph import BoolArray, FloatArray, IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.select import select
from outstride.ops.contract import (
    REST,
    AdapterWeights,
    GraftWeights,
    HeadsWeights,
    Model,
    Ops,
    Shape,
    Span,
    Wanted,
    gates_of,
)
from outstride.ops.cpu import native
from outstride.ops.cpu.adapters import Adapter
from outstride.ops.cpu.following import Follower
from outstride.ops.cpu.grafts import Grafted
from outstride.ops.cpu.groups import GROUP, SPREAD
from outstride.ops.cpu.keys import Keys, keys_of
from outstride.ops.cpu.packed import Packed, rounded
from outstride.ops.cpu.weights import Layer, Weights, widths
from outstride.ops.following import before
from outstride.ops.heads import Heads

HEAD_ROWS = 64
"""So many rows of the vocabulary exist at once, however many nodes are wanted."""


def threads() -> int:
    """As many as there are cores that this process may use."""
    return max(1, min(64, len(os.sched_getaffinity(0))))


@dataclass(slots=True)
class Batch:
    """The spans of a run of layers; what else they need is in the workspace."""

    spans: Sequence[Span]
    rows: int
    slots: IntArray


class Workspace:
    """Buffers for so many rows, and the structures that tell the kernels about them.

    They are filled for each pass and never move, so that a layer's structure is made once.
    """

    def __init__(
        self,
        rows: int,
        shape: Shape,
        windows: Sequence[int | None],
        width: int,
        qkv: int,
        heads: int,
        middle: int,
    ) -> None:
        self.rows = rows
        self._width = width
        self.x = np.zeros((0, width), dtype=np.float32)
        self.queries = np.zeros((rows, qkv), dtype=np.float32)
        self._mixed = np.zeros((rows, heads), dtype=np.float32)
        self._middle = np.zeros((rows, middle), dtype=np.float32)
        self._positions = np.zeros(rows, dtype=np.int64)
        self._slots = np.zeros(rows, dtype=np.int64)
        self._nodes = {
            window: np.zeros(rows, dtype=native.NODE) for window in dict.fromkeys(windows)
        }
        self.nodes = {
            window: ctypes.pointer(ctypes.c_void_p(nodes.ctypes.data))
            for window, nodes in self._nodes.items()
        }
        self._keys: Keys | None = None
        self._gates: BoolArray | None = None
        self._low = np.zeros((0, 0), dtype=np.float32)
        self.struct = native.Pass(
            qkv=self.queries.ctypes.data,
            mixed=self._mixed.ctypes.data,
            middle=self._middle.ctypes.data,
            positions=self._positions.ctypes.data,
            slots=self._slots.ctypes.data,
            width=width,
            hidden=shape.hidden_size,
            heads_width=heads,
            middle_width=middle,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            eps=shape.norm_eps,
            scale=shape.head_dim**-0.5,
        )

    def make_room(self, ranks: int, threads: int) -> None:
        """For the values to which an adapter reduces rows; few rows are reduced by every thread."""
        self._low = np.zeros((max(self.rows, 4 * threads), ranks), dtype=np.float32)
        self.struct.low, self.struct.ranks = self._low.ctypes.data, ranks

    def fill(self, keys: Keys, slots: IntArray, gates: BoolArray | None) -> None:
        """Sets a pass up. Its states are an array of their own, which outlives the pass."""
        rows = len(slots)
        self.x = np.zeros((rows, self._width), dtype=np.float32)
        self.struct.x = self.x.ctypes.data
        self._positions[:rows] = keys.positions
        self._slots[:rows] = slots
        for window, nodes in self._nodes.items():
            nodes[:rows] = keys.nodes
            if window == REST:
                nodes["start"][:rows] = 1
            elif window is not None:
                nodes["start"][:rows] = np.maximum(keys.positions - window + 1, 0)
        self._keys = keys  # the kernels read its lists
        self.struct.pages = keys.pages.ctypes.data
        self.struct.tails = keys.tails.ctypes.data
        self.struct.rows = rows
        self._gates = gates
        self.struct.gates = _address(gates)


def _address(array: npt.NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data


class Cpu(Ops):
    """Weights in int8, those of layers perhaps in int4; cache in fp16."""

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        *,
        slots: int,
        page_size: int,
        features: tuple[int, ...] = (),
        isa: int | None = None,
        count: int | None = None,
    ) -> None:
        self._lib = native.library()
        self._isa = self._lib.outstride_best_isa() if isa is None else isa
        self._threads = threads() if count is None else count
        self._shape = shape
        self._page_size = page_size
        if page_size % 16:
            raise ValueError("pages must hold a multiple of 16 entries")
        self._weights = weights
        weights.into_large_pages()
        self.width, self._heads_width, self._middle = widths(shape)
        self._extra = np.zeros((0, shape.hidden_size), dtype=np.float32)
        self._cos, self._sin = self._turns(min(shape.context, 1024))
        entries = slots * shape.kv_heads * shape.head_dim
        self._keys = [self._zeros(entries) for _ in range(shape.layers)]
        self._values = [self._zeros(entries) for _ in range(shape.layers)]
        self._planes = features
        self._features = np.zeros(
            (slots if features else 0, len(features) * shape.hidden_size), dtype=np.float32
        )
        self._slots = slots
        self._adapter: Adapter | None = None
        self._grafts: dict[str, Grafted] = {}
        self._followers: dict[str, Follower] = {}
        self._heads: dict[str, Heads[Packed]] = {}
        self._deepest = 0
        """The width of the widest rows that trained heads multiply."""
        self.windows = tuple(shape.windows)
        self._engine: int | None = None
        stored = "int8" if weights.bits == 8 else "int4 (head int8)"
        self.name = f"cpu {native.ISAS[self._isa]} {stored} x 12 bit, cache fp16"
        self._open(256)

    @classmethod
    def of(
        cls, model: Model, isa: int | None = None, count: int | None = None, bits: int = 8
    ) -> Cpu:
        """From float32 weights, which are packed and dropped one by one."""
        return cls(
            model.shape,
            Weights.pack(model, bits),
            slots=model.slots,
            page_size=model.page_size,
            features=model.features,
            isa=isa,
            count=count,
        )

    def _zeros(self, entries: int) -> npt.NDArray[np.uint16]:
        """Half-precision zeros that take memory only once they are written."""
        memory = mmap.mmap(-1, max(entries, 1) * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(memory, dtype=np.uint16)

    def _turns(self, positions: int) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines of all angles up to a position."""
        angles = np.outer(np.arange(positions), np.asarray(self._shape.frequencies))
        scale = self._shape.rope_scale
        return (
            (np.cos(angles) * scale).astype(np.float32),
            (np.sin(angles) * scale).astype(np.float32),
        )

    def _open(self, rows: int) -> None:
        """A native engine and a workspace with room for so many rows."""
        if self._engine is not None:
            self._lib.outstride_close(self._engine)
        shape = self._shape
        depth = max(self.width, self._middle, self._heads_width, self._deepest)
        parts: list[Grafted | Follower] = [*self._grafts.values(), *self._followers.values()]
        parts.sort(key=lambda part: part.first)
        depth = rounded(max(depth, *(part.depth for part in parts), 0), GROUP)
        scratch = max(self.width, 36 * shape.head_dim, SPREAD * (depth + GROUP))
        self._engine = self._lib.outstride_open(self._threads, self._isa, rows, depth, scratch)
        if not self._engine:
            raise MemoryError("the native kernels could not be started")
        self._space = space = Workspace(
            rows,
            shape,
            self.windows,
            self.width,
            self._weights.layers[0].qkv.stride,
            self._heads_width,
            self._middle,
        )
        if self._adapter:
            space.make_room(self._adapter.ranks, self._threads)
        space.struct.page_size = self._page_size
        space.struct.cos, space.struct.sin = self._cos.ctypes.data, self._sin.ctypes.data
        layers = [*self._weights.layers]
        for part in parts:
            layers += part.layers
        calls = [self._call(i, layer, layer.attention_norm) for i, layer in enumerate(layers)]
        self._calls = (native.Layer * len(calls))(*calls)
        for graft in self._grafts.values():
            graft.calls = [
                self._call(graft.first + i, layer, graft.mixed)
                for i, layer in enumerate(graft.layers)
            ]

    def _call(self, i: int, layer: Layer, norm: FloatArray) -> native.Layer:
        """What tells the kernels of a layer, under this norm of its input."""
        shape, space, own = self._shape, self._space, i < self._shape.layers
        return native.Layer(
            ctypes.pointer(space.struct),
            space.nodes[self.windows[i]],
            norm.ctypes.data,
            _address(layer.query_norm),
            _address(layer.key_norm),
            layer.mlp_norm.ctypes.data,
            ctypes.pointer(layer.qkv.struct),
            ctypes.pointer(layer.output.struct),
            ctypes.pointer(layer.gate_up.struct),
            ctypes.pointer(layer.down.struct),
            self._keys[i].ctypes.data,
            self._values[i].ctypes.data,
            self._adapter.layers[i] if own and self._adapter else None,
            shape.rope_layers[i] if own else True,
        )

    def attach(self, name: str, weights: GraftWeights) -> int:
        shape, entries = self._shape, len(self._keys[0])
        first = len(self._keys)
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
        self._keys += [self._zeros(entries) for _ in weights.layers]
        self._values += [self._zeros(entries) for _ in weights.layers]
        self._open(self._space.rows)
        return first

    def attach_heads(self, name: str, weights: HeadsWeights) -> tuple[int, int]:
        size = self._shape.hidden_size
        if weights.tap not in self._planes:
            self._planes += (weights.tap,)
            self._features = np.zeros((self._slots, len(self._planes) * size), dtype=np.float32)
        rows = self._weights.vocabulary.rows(weights.vocabulary, size)
        eps, shared = self._shape.norm_eps, Packed.balanced(rows, self.width)
        self._heads[name] = Heads.pack(weights, eps, self._packed, shared)
        self._open(self._space.rows)
        at = self._planes.index(weights.tap) * size
        return at, at + size

    def adapt(self, layers: Sequence[AdapterWeights]) -> None:
        sizes = self.width, self._heads_width, self._middle
        self._adapter = Adapter.pack(layers, self._weights.layers, sizes)
        self._open(self._space.rows)

    def _packed(self, matrix: torch.Tensor) -> Packed:
        depth = rounded(matrix.shape[1], 32)
        self._deepest = max(self._deepest, depth)
        return Packed.of(matrix.numpy(), None, depth)

    def digest(self, batch: Batch) -> None:
        size, struct = self._shape.hidden_size, self._space.struct
        for graft in self._grafts.values():
            planes = [self._planes.index(tap) * size for tap in graft.taps]
            stored = self._features[_together(batch.slots)]
            if stored.shape[1] == graft.depth and graft.taps == self._planes:
                states = stored
            else:
                states = np.zeros((batch.rows, graft.depth), dtype=np.float32)
                for i, at in enumerate(planes):
                    states[:, i * size : (i + 1) * size] = stored[:, at : at + size]
            _, mixed = self._scored(
                states, graft.scale, graft.mix, size * len(planes), 1, rows=True
            )
            assert mixed is not None
            x = np.zeros((batch.rows, self.width), dtype=np.float32)
            x[:, :size] = mixed[:, :size]
            held, struct.x = struct.x, x.ctypes.data
            for call in graft.calls:
                self._lib.outstride_project(self._engine, call)
            struct.x = held
        for name, follower in self._followers.items():
            planes = [self._planes.index(tap) * size for tap in follower.weights.taps]
            stored = self._features[batch.slots]
            side = np.concatenate([stored[:, at : at + size] for at in planes], axis=1)
            follower.digest(side, batch.slots, self)
            self._follow(name, batch)

    def follow(self, name: str, batch: Batch) -> FloatArray:
        x = self._space.x
        x[:, : self._shape.hidden_size] = self._follow(name, batch)
        return x

    def _follow(self, name: str, batch: Batch) -> FloatArray:
        """What enters a part that goes on from states; its queries, keys and values are in place."""
        part, space = self._followers[name], self._space
        tokens = np.concatenate([s.graph.tokens[s.first :] for s in batch.spans])
        positions = np.concatenate([s.graph.positions[s.first :] for s in batch.spans])
        x, beside = part.enter(tokens, before(batch.spans, self._page_size), self)
        keys, values = self._keys[part.first], self._values[part.first]
        queries = part.project(x, beside, positions, batch.slots, keys, values, self)
        space.queries[: batch.rows, : queries.shape[1]] = queries
        return x

    def carry(self, name: str, x: FloatArray, batch: Batch) -> None:
        self._followers[name].carry(x[:, : self._shape.hidden_size], batch.slots)

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self._lib.outstride_close(self._engine)

    # --- the pass ---------------------------------------------------------------------------------

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> Batch:
        rows = spans[-1].rows.stop
        if rows > self._space.rows:
            self._open(rounded(rows, 256))
        keys = keys_of(spans, self._page_size)
        last = int(keys.positions.max())
        if last >= len(self._cos):
            self._cos, self._sin = self._turns(2 * last + 1)
            self._space.struct.cos = self._cos.ctypes.data
            self._space.struct.sin = self._sin.ctypes.data
        slots = np.concatenate([s.slots[s.first :] for s in spans])
        self._space.fill(keys, slots, gates_of(spans) if self._adapter else None)
        return Batch(spans, rows, slots)

    def enter(self, batch: Batch, states: Sequence[FloatArray | None]) -> FloatArray:
        x = self._space.x
        if all(s is None for s in states) and not any(s.graph.mixtures for s in batch.spans):
            x[:] = self._rows(np.concatenate([s.graph.tokens[s.first :] for s in batch.spans]))
            return x
        for span, state in zip(batch.spans, states, strict=True):
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
        for stop in sorted({*(self._planes if start == 0 else ()), end}):
            if stop > start:
                self._lib.outstride_layers(self._engine, self._calls[start], stop - start)
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

    def _rows(self, tokens: IntArray) -> FloatArray:
        size = self._shape.vocab_size
        beyond = tokens >= size
        if not beyond.any():
            return self._weights.embedding.rows(tokens, self.width)
        rows = self._weights.embedding.rows(np.where(beyond, 0, tokens), self.width)
        rows[beyond, : self._shape.hidden_size] = self._extra[tokens[beyond] - size]
        return rows

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
            where = _together(batch.slots)
            self._features[where, at * size : (at + 1) * size] = x[:, :size]

    def leave(self, x: FloatArray, rows: slice) -> FloatArray:
        return x[rows]

    def read(self, state: FloatArray) -> FloatArray:
        return state[:, : self._shape.hidden_size].copy()

    # --- the head ---------------------------------------------------------------------------------

    def head(self, wanted: Sequence[Wanted]) -> list[Scores]:
        """Greedy rows never become rows of the vocabulary; others do, a few at a time."""
        results: list[list[Scores]] = [[] for _ in wanted]
        parts: dict[_Way, list[tuple[int, IntArray]]] = {}
        for i, item in enumerate(wanted):
            if item.proposal.graft:
                results[i].append(self._guesses(item))
            elif len(item.nodes):
                parts.setdefault(_way(item), []).append((i, item.nodes))
        for way, listed in parts.items():
            for portion in _portions(listed, HEAD_ROWS):
                self._choose(way, wanted, portion, results)
        nothing = np.zeros((0, self._shape.vocab_size), dtype=np.float32)
        return [
            Scores.joined(found or [select(item.proposal, item.nodes, nothing)])
            for item, found in zip(wanted, results, strict=True)
        ]

    def _choose(
        self,
        way: _Way,
        wanted: Sequence[Wanted],
        portion: list[tuple[int, IntArray]],
        results: list[list[Scores]],
    ) -> None:
        """Scores some rows and files what was found with their owners."""
        x = np.concatenate([wanted[i].state[nodes - wanted[i].first] for i, nodes in portion])
        greedy = way is _Way.GREEDY
        most = max(wanted[i].proposal.wants.best for i, _ in portion) if greedy else 1
        best, logits = self._vocabulary(x, most, rows=not greedy)
        if way is _Way.DRAWN and logits is not None:
            asked = [(wanted[i].proposal, n) for i, nodes in portion for n in nodes.tolist()]
            best = self._drawn(asked, logits)
        start = 0
        for i, nodes in portion:
            rows, proposal = slice(start, start + len(nodes)), wanted[i].proposal
            start += len(nodes)
            if way is _Way.HOST and logits is not None:
                found = select(proposal, nodes, logits[rows, : self._shape.vocab_size])
            else:
                found = Scores(nodes, best[rows, : max(1, proposal.wants.best)])
            results[i].append(found)

    def _drawn(self, asked: list[tuple[Proposal, int]], logits: FloatArray) -> IntArray:
        """The tokens of each row by the rule of core.sampling, in native code."""
        count, stride = logits.shape
        k = max(max(1, proposal.wants.best) for proposal, _ in asked)
        draws = np.zeros(count, dtype=native.DRAW)
        for line, (proposal, node) in zip(draws, asked, strict=True):
            draw = proposal.draw
            line["seed"], line["index"], line["purpose"] = draw.seed, draw.index, draw.purpose
            line["position"] = int(proposal.graph.positions[node]) + proposal.offset
            line["top_k"], line["top_p"] = draw.top_k, draw.top_p
            line["temperature"], line["min_p"] = draw.temperature, draw.min_p
            line["log_min_p"] = np.log(draw.min_p) if draw.min_p > 0 else 0.0
        scaled = np.empty((self._threads, stride), dtype=np.float32)
        room = np.empty((self._threads, stride), dtype=native.BEST)
        out = np.empty((count, k), dtype=np.int32)
        self._lib.outstride_choose(
            self._engine,
            native.Choose(
                logits.ctypes.data,
                draws.ctypes.data,
                scaled.ctypes.data,
                room.ctypes.data,
                out.ctypes.data,
                count,
                stride,
                self._shape.vocab_size,
                k,
            ),
        )
        return out.astype(np.int64)

    def _vocabulary(
        self, x: FloatArray, k: int, *, rows: bool
    ) -> tuple[IntArray, FloatArray | None]:
        """The k likeliest tokens of each row, and the rows themselves if they are asked for."""
        weights, size = self._weights, self._shape.hidden_size
        found, logits = self._scored(x, weights.norm, weights.vocabulary, size, k, rows=rows)
        return found["token"].astype(np.int64), logits

    def _guesses(self, item: Wanted) -> Scores:
        """The likeliest tokens of a trained part, and their logits."""
        if item.proposal.graft in self._heads:
            return self._heads[item.proposal.graft].guesses(item, self)
        size, name = self._shape.hidden_size, item.proposal.graft
        x = np.ascontiguousarray(item.state[item.nodes - item.first])
        k = min(item.proposal.wants.best, native.MOST_FUSED)
        if name in self._followers:
            best, values = self._followers[name].guesses(x[:, :size], k, self)
            return Scores(item.nodes, best, values=values)
        graft = self._grafts[name]
        found, _ = self._scored(x, graft.norm, graft.head, size, k, rows=False)
        return Scores(item.nodes, graft.vocabulary[found["token"]], values=found["value"])

    def embed(self, tokens: IntArray) -> FloatArray:
        return self._rows(tokens)[:, : self._shape.hidden_size]

    def times(self, x: FloatArray, matrix: Packed) -> FloatArray:
        _, found = self._product(x, matrix, 1, rows=True)
        assert found is not None
        return found[:, : matrix.channels]

    def highest(self, x: FloatArray, matrix: Packed, count: int) -> tuple[IntArray, FloatArray]:
        found, _ = self._product(x, matrix, count, rows=False)
        return found["token"].astype(np.int64), found["value"]

    def _product(
        self, x: FloatArray, matrix: Packed, k: int, *, rows: bool
    ) -> tuple[npt.NDArray[np.void], FloatArray | None]:
        """The same for rows as they are: what the norm takes away is given back."""
        given = np.zeros((len(x), matrix.depth), dtype=np.float32)
        given[:, : matrix.k] = x if matrix.columns is None else x * matrix.columns
        ones = np.ones(matrix.depth, dtype=np.float32)
        found, results = self._scored(given, ones, matrix, matrix.k, k, rows=rows)
        mean = np.square(given[:, : matrix.k]).mean(axis=1, keepdims=True)
        scale = np.sqrt(mean + np.float32(self._shape.norm_eps))
        found["value"] *= scale
        return found, None if results is None else results * scale

    def _scored(
        self,
        x: FloatArray,
        norm: FloatArray,
        matrix: Packed,
        size: int,
        k: int,
        *,
        rows: bool,
    ) -> tuple[npt.NDArray[np.void], FloatArray | None]:
        """Rows of `size` columns, normalised, times a matrix: the k highest results of each, and
        all of them if they are asked for."""
        count, k = len(x), min(max(1, k), matrix.channels)
        if count > self._space.rows:
            self._open(rounded(count, 256))
        best = np.zeros((self._threads, count, k), dtype=native.BEST)
        best["value"] = -np.inf  # not every thread need have taken part
        logits = np.empty((count, matrix.stride), dtype=np.float32) if rows else None
        self._lib.outstride_head(
            self._engine,
            native.Head(
                x.ctypes.data,
                norm.ctypes.data,
                ctypes.pointer(matrix.struct),
                _address(logits),
                best.ctypes.data,
                count,
                x.shape[1],
                size,
                matrix.channels,
                k,
                self._shape.norm_eps,
            ),
        )
        # All threads' results of a row; ties: the first thread has the lowest channels.
        found = best.transpose(1, 0, 2).reshape(count, -1)
        order = np.argsort(-found["value"], axis=1, kind="stable")[:, :k]
        return np.take_along_axis(found, order, axis=1), logits

    # --- the cache --------------------------------------------------------------------------------

    def move(self, sources: IntArray, targets: IntArray) -> None:
        shape, count = self._shape, len(sources)
        slots = len(self._values[0]) // (shape.kv_heads * shape.head_dim)
        both = np.concatenate([sources, targets]).astype(np.int64)
        if len(targets) != count or (count and not (both.min() >= 0 and both.max() < slots)):
            raise ValueError("a slot outside the cache")
        room = np.empty((count, 2 * shape.kv_heads * shape.head_dim), dtype=np.uint16)
        self._lib.outstride_move(
            self._calls[0],
            len(self._calls),
            both.ctypes.data,
            both[count:].ctypes.data,
            count,
            room.ctypes.data,
        )
        if self._planes:
            self._features[targets] = self._features[sources]
        for part in self._followers.values():
            part.carried[targets] = part.carried[sources]

    def feature(self, slot: int) -> FloatArray:
        return np.array(self._features[slot], dtype=np.float32)

    def final_norm(self) -> torch.Tensor:
        weights, size = self._weights, self._shape.hidden_size
        norm, columns = weights.norm[:size], weights.vocabulary.columns
        return torch.from_numpy(norm.copy() if columns is None else norm / columns)

    def add_rows(self, rows: torch.Tensor) -> int:
        before = len(self._extra)
        self._extra = np.concatenate([self._extra, rows.numpy().astype(np.float32)])
        return before


def _together(slots: IntArray) -> slice | IntArray:
    """Slots that follow each other as a slice, which is quick to read and write."""
    first, last = slots.item(0), slots.item(-1)
    if last - first + 1 == len(slots) and (len(slots) < 3 or bool((np.diff(slots) == 1).all())):
        return slice(first, last + 1)
    return slots


def _portions(parts: list[tuple[int, IntArray]], most: int) -> Iterator[list[tuple[int, IntArray]]]:
    """The same parts in portions of at most `most` nodes; a part may be cut."""
    portion: list[tuple[int, IntArray]] = []
    room = most
    for owner, nodes in parts:
        while len(nodes) > room:
            if room:
                portion.append((owner, nodes[:room]))
            yield portion
            nodes, portion, room = nodes[room:], [], most
        portion.append((owner, nodes))
        room -= len(nodes)
    if portion:
        yield portion


class _Way(enum.Enum):
    """How a row's tokens are chosen."""

    GREEDY = enum.auto()
    DRAWN = enum.auto()
    HOST = enum.auto()


def _way(item: Wanted) -> _Way:
    """By what the request asks for, so that one request always goes one way."""
    proposal, wants = item.proposal, item.proposal.wants
    if proposal.rules or wants.logprobs is not None or wants.rows or wants.logits:
        return _Way.HOST
    if proposal.draw.temperature == 0.0 and wants.best <= native.MOST_FUSED:
        return _Way.GREEDY
    return _Way.DRAWN if wants.best <= native.MOST_BEST else _Way.HOST
