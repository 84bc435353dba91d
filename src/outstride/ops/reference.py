"""The operations of a pass in plain torch: the oracle that faster ones are held to.

A row's bits depend on that row alone, because all that is computed here goes through `arithmetic`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.core.select import select
from outstride.ops.arithmetic import (
    SPARE,
    attention,
    head_norm,
    linear,
    pad,
    padded,
    ranked,
    rms_norm,
    rope,
    rope_tables,
    silu_mul,
    through_experts,
)
from outstride.ops.contract import (
    AdapterWeights,
    FollowWeights,
    GraftWeights,
    HeadsWeights,
    LayerWeights,
    LowRank,
    Model,
    Ops,
    Span,
    Wanted,
    gates_of,
)
from outstride.ops.following import before
from outstride.ops.heads import Heads
from outstride.ops.plan import Plan, plan

HEAD_ROWS = 64
"""So many rows of the vocabulary exist at once, however many nodes are wanted."""


def zeros(*shape: int) -> torch.Tensor:
    """Zeros that take memory only once they are written, a small page at a time.

    numpy would ask for huge pages here, and a first entry in each layer would cost megabytes.
    """
    if not (count := math.prod(shape)):
        return torch.zeros(shape)
    memory = mmap.mmap(-1, count * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


@dataclass(slots=True)
class Batch:
    """What is worked out once for a run of layers."""

    spans: Sequence[Span]
    slots: torch.Tensor
    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    plans: dict[int | None, Plan]
    beside: torch.Tensor | None = None
    """What a part's first layer reads in front of the states."""
    gated: torch.Tensor | None = None
    """The rows that go through the adapter, if there are any."""

    def adapted(self, found: torch.Tensor, x: torch.Tensor, low: LowRank | None) -> torch.Tensor:
        """The result of a product, with what an adapter adds to some of its rows."""
        if self.gated is not None and low is not None:
            added = linear(linear(pad(x[self.gated]), low.low), low.high)
            found[self.gated] += added[: len(self.gated)]
        return found


class Reference(Ops):
    """Weights and cache in float32, passes in torch."""

    def __init__(self, model: Model) -> None:
        self._shape = shape = model.shape
        self.embedding, self._layers, self._norm = model.embedding, model.layers, model.norm
        self.vocabulary = model.embedding if model.head is None else model.head
        self._extra = torch.empty(0, shape.hidden_size)
        self._inverse = torch.tensor(shape.frequencies, dtype=torch.float64).to(torch.float32)
        slots, heads, size = model.slots, shape.kv_heads, shape.head_dim
        self._page_size = model.page_size
        self._keys = [zeros(heads, slots, size) for _ in range(shape.layers)]
        self._values = [zeros(heads, slots, size + SPARE) for _ in range(shape.layers)]
        self._planes = model.features
        self._features = zeros(slots, len(model.features) * shape.hidden_size)
        self._grafts: dict[str, tuple[int, GraftWeights, torch.Tensor]] = {}
        self._carried: dict[str, torch.Tensor] = {}
        """What parts that go on from states find at each slot."""
        self._own_turns: dict[int, tuple[torch.Tensor, float]] = {}
        """Frequencies of layers of parts that have their own."""
        self._heads: dict[str, Heads[torch.Tensor]] = {}
        self._adapter: Sequence[AdapterWeights] = ()
        self.windows = tuple(shape.windows)
        self.name = f"reference fp32 threads {torch.get_num_threads()}"

    def attach(self, name: str, weights: GraftWeights) -> int:
        first, shape = len(self._layers), self._shape
        slots = self._keys[0].shape[1]
        self._planes += tuple(tap for tap in weights.taps if tap not in self._planes)
        self._features = zeros(slots, len(self._planes) * shape.hidden_size)
        self._layers = [*self._layers, *weights.layers]
        self._keys += [zeros(shape.kv_heads, slots, shape.head_dim) for _ in weights.layers]
        self._values += [
            zeros(shape.kv_heads, slots, shape.head_dim + SPARE) for _ in weights.layers
        ]
        head = weights.head
        if head is None and len(weights.vocabulary) == shape.vocab_size:
            head = self.vocabulary
        elif head is None:
            head = self.vocabulary[torch.from_numpy(weights.vocabulary)]
        self._grafts[name] = first, weights, head
        if weights.follow is not None:
            self._carried[name] = zeros(slots, shape.hidden_size)
        if weights.frequencies is not None:
            inverse = torch.tensor(weights.frequencies, dtype=torch.float64).to(torch.float32)
            turns = inverse, weights.rope_scale
            self._own_turns |= dict.fromkeys(range(first, len(self._layers)), turns)
        self.windows += (weights.window,) * len(weights.layers)
        return first

    def attach_heads(self, name: str, weights: HeadsWeights) -> tuple[int, int]:
        size = self._shape.hidden_size
        if weights.tap not in self._planes:
            self._planes += (weights.tap,)
            self._features = zeros(self._keys[0].shape[1], len(self._planes) * size)
        shared = self.vocabulary[torch.from_numpy(weights.vocabulary)]
        self._heads[name] = Heads.pack(weights, self._shape.norm_eps, lambda m: m, shared)
        at = self._planes.index(weights.tap) * size
        return at, at + size

    def adapt(self, layers: Sequence[AdapterWeights]) -> None:
        self._adapter = layers

    def digest(self, batch: Batch) -> None:
        size, slots, eps = self._shape.hidden_size, batch.slots, self._shape.norm_eps
        for name, (first, weights, _) in self._grafts.items():
            planes = [self._planes.index(tap) * size for tap in weights.taps]
            mixed = pad(torch.cat([self._features[slots, at : at + size] for at in planes], dim=1))
            if weights.scale is not None:
                mixed = rms_norm(mixed, weights.scale, eps)
            if weights.mix is not None:
                mixed = linear(mixed, weights.mix)
            if weights.follow is not None:
                self._carried[name].index_copy_(0, slots, mixed[: len(slots)])
                self._project(first, weights.layers[0], self.follow(name, batch), batch)
                continue
            for i, layer in enumerate(weights.layers):
                entering = replace(layer, attention_norm=weights.mixed)
                self._project(first + i, entering, mixed, batch)

    def follow(self, name: str, batch: Batch) -> torch.Tensor:
        weights, eps = self._grafts[name][1].follow, self._shape.norm_eps
        assert weights is not None
        slots = torch.from_numpy(before(batch.spans, self._page_size))
        x = pad(self._carried[name][slots.clamp(min=0)] * (slots >= 0)[:, None])
        tokens = pad(torch.cat([self._read(span, weights) for span in batch.spans]))
        if weights.fuse is not None:
            x = linear(torch.cat([tokens, x], dim=1), weights.fuse, weights.bias)
        if weights.entry is not None:
            x = rms_norm(x, weights.entry, eps)
        if weights.beside is not None:
            batch.beside = rms_norm(tokens, weights.beside, eps)
        return x

    def _read(self, span: Span, weights: FollowWeights) -> torch.Tensor:
        """The embeddings of a span's nodes as a part reads them."""
        if weights.embedding is None:
            return self._embed(span)
        tokens = span.graph.tokens[span.first :]
        known = np.where(tokens < len(weights.embedding), np.maximum(tokens, 0), 0)
        return weights.embedding[torch.from_numpy(known)]

    def carry(self, name: str, x: torch.Tensor, batch: Batch) -> None:
        weights = self._grafts[name][1]
        if weights.follow is not None and weights.follow.again and weights.norm is not None:
            x = rms_norm(x, weights.norm, self._shape.norm_eps)
        self._carried[name].index_copy_(0, batch.slots, x[: len(batch.slots)])

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> Batch:
        shape, rows = self._shape, spans[-1].rows.stop
        positions = np.zeros(padded(rows), dtype=np.int64)
        positions[:rows] = np.concatenate([s.graph.positions[s.first :] for s in spans])
        slots = np.concatenate([s.slots[s.first :] for s in spans])
        cos, sin = rope_tables(torch.from_numpy(positions), self._inverse, shape.rope_scale)
        plans = {
            window: plan(
                spans,
                group=shape.heads // shape.kv_heads,
                kv_heads=shape.kv_heads,
                window=window,
                page_size=self._page_size,
            )
            for window in dict.fromkeys(windows)
        }
        places, gates = torch.from_numpy(positions), gates_of(spans)
        gated = None if gates is None else torch.from_numpy(np.flatnonzero(gates))
        return Batch(spans, torch.from_numpy(slots), places, cos, sin, plans, gated=gated)

    def enter(
        self, batch: Batch, states: Sequence[torch.Tensor | FloatArray | None]
    ) -> torch.Tensor:
        entered = []
        for span, state in zip(batch.spans, states, strict=True):
            if state is None:
                state = self._embed(span)
            elif not isinstance(state, torch.Tensor):
                state = torch.from_numpy(np.ascontiguousarray(state, dtype=np.float32))
            entered.append(state)
        return pad(torch.cat(entered))

    def _embed(self, span: Span) -> torch.Tensor:
        """The inputs of a span's nodes; a mixture is summed in the order in which it is given."""
        graph, first = span.graph, span.first
        state = self._rows(np.maximum(graph.tokens[first:], 0))
        for node, mixture in graph.mixtures.items():
            if node >= first:
                rows = self._rows(np.asarray(mixture.tokens, dtype=np.int64))
                total = torch.zeros_like(rows[0])
                for row, weight in zip(rows, mixture.weights, strict=True):
                    total += row * weight
                state[node - first] = total
        return state

    def _rows(self, tokens: IntArray) -> torch.Tensor:
        """Embedding rows; ids beyond the vocabulary are the extra ones."""
        ids = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64))
        size = self._shape.vocab_size
        beyond = ids >= size
        if not bool(beyond.any()):
            return self.embedding.index_select(0, ids)
        state = self.embedding.index_select(0, ids.masked_fill(beyond, 0))
        state[beyond] = self._extra.index_select(0, ids[beyond] - size)
        return state

    def project(self, layer: int, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        return self._project(layer, self._layers[layer], x, batch)

    def _project(
        self, layer: int, weights: LayerWeights, x: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        shape, rows = self._shape, len(x)
        kv_heads, size, eps = shape.kv_heads, shape.head_dim, shape.norm_eps
        normed = x
        if len(weights.attention_norm):
            normed = rms_norm(x, weights.attention_norm, eps)
        if batch.beside is not None and weights.qkv.shape[1] > x.shape[1]:
            normed = torch.cat([batch.beside, normed], dim=1)
        added = self._adapter[layer].qkv if layer < len(self._adapter) else None
        qkv = linear(normed, weights.qkv, weights.qkv_bias)
        qkv = batch.adapted(qkv, normed, added).view(rows, -1, size)
        q, k, v = qkv.split_with_sizes([shape.heads, kv_heads, kv_heads], dim=1)
        if weights.query_norm is not None and weights.key_norm is not None:
            q = head_norm(q, weights.query_norm, eps)
            k = head_norm(k, weights.key_norm, eps)
        if weights.clip is not None:
            q, k, v = (part.clamp(-weights.clip, weights.clip) for part in (q, k, v))
        if layer >= shape.layers or shape.rope_layers[layer]:
            cos, sin = batch.cos, batch.sin
            if layer in self._own_turns:
                cos, sin = rope_tables(batch.positions, *self._own_turns[layer])
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        keys, values, count = self._keys[layer], self._values[layer], len(batch.slots)
        keys.index_copy_(1, batch.slots, k[:count].transpose(0, 1))
        kept = x.new_ones(kv_heads, count, size + SPARE)
        kept[..., :size] = v[:count].transpose(0, 1)
        values.index_copy_(1, batch.slots, kept)
        grouped = (q * size**-0.5).view(rows, kv_heads, -1, size).transpose(0, 1)
        queries: torch.Tensor = grouped.reshape(kv_heads, -1, size)
        return queries

    def attend(self, layer: int, queries: torch.Tensor, batch: Batch) -> torch.Tensor:
        shape = self._shape
        chosen = batch.plans[self.windows[layer]]
        mixed = attention(queries, self._keys[layer], self._values[layer], chosen)
        rows = mixed.shape[1] * shape.kv_heads // shape.heads
        grouped = mixed.view(shape.kv_heads, rows, -1, shape.head_dim)
        return grouped.transpose(0, 1).reshape(rows, -1)

    def output(
        self, layer: int, x: torch.Tensor, mixed: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        weights = self._layers[layer]
        added = self._adapter[layer].output if layer < len(self._adapter) else None
        return x + batch.adapted(linear(mixed, weights.output, weights.output_bias), mixed, added)

    def mlp(self, layer: int, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        weights = self._layers[layer]
        normed = rms_norm(x, weights.mlp_norm, self._shape.norm_eps)
        if weights.experts is not None:
            x = x + through_experts(normed, weights.experts)
            if not len(weights.gate_up):
                return x
        added = self._adapter[layer] if layer < len(self._adapter) else None
        inner = linear(normed, weights.gate_up, weights.gate_up_bias)
        inner = batch.adapted(inner, normed, added.gate_up if added else None)
        middle = silu_mul(*inner.chunk(2, dim=-1))
        found = linear(middle, weights.down, weights.down_bias)
        return x + batch.adapted(found, middle, added.down if added else None)

    def keep_features(self, layer: int, x: torch.Tensor, batch: Batch) -> None:
        if layer in self._planes:
            size, at = self._shape.hidden_size, self._planes.index(layer)
            plane = self._features[:, at * size : (at + 1) * size]
            plane.index_copy_(0, batch.slots, x[: len(batch.slots)])

    def leave(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        return x[rows]

    def read(self, state: torch.Tensor) -> FloatArray:
        return np.array(state.numpy(), dtype=np.float32)

    def head(self, wanted: Sequence[Wanted]) -> list[Scores]:
        """A few rows of the vocabulary at a time."""
        scores: list[list[Scores]] = [
            [self._guesses(item)] if item.proposal.graft else [] for item in wanted
        ]
        lines = [
            (i, int(node)) for i, item in enumerate(wanted) if not scores[i] for node in item.nodes
        ]
        for start in range(0, len(lines), HEAD_ROWS):
            some = lines[start : start + HEAD_ROWS]
            x = torch.stack([wanted[i].state[node - wanted[i].first] for i, node in some])
            normed = rms_norm(pad(x), self._norm, self._shape.norm_eps)
            raw = linear(normed, self.vocabulary).numpy()
            for i in dict.fromkeys(i for i, _ in some):
                mine = [n for n, (owner, _) in enumerate(some) if owner == i]
                nodes = np.asarray([some[n][1] for n in mine])
                scores[i].append(select(wanted[i].proposal, nodes, raw[mine[0] : mine[-1] + 1]))
        nothing = np.zeros((0, self._shape.vocab_size), dtype=np.float32)
        return [
            Scores.joined(found or [select(item.proposal, item.nodes, nothing)])
            for item, found in zip(wanted, scores, strict=True)
        ]

    def _guesses(self, item: Wanted) -> Scores:
        """The likeliest tokens of a trained part, and their logits."""
        if item.proposal.graft in self._heads:
            return self._heads[item.proposal.graft].guesses(item, self)
        _, weights, head = self._grafts[item.proposal.graft]
        x = item.state[torch.from_numpy(item.nodes - item.first)]
        normed = pad(x)
        if weights.norm is not None:
            normed = rms_norm(normed, weights.norm, self._shape.norm_eps)
        raw = linear(normed, head)[: len(x)]
        places = ranked(raw, min(item.proposal.wants.best, len(weights.vocabulary)))
        values = raw.gather(1, places).numpy()
        return Scores(item.nodes, weights.vocabulary[places.numpy()], values=values)

    def embed(self, tokens: IntArray) -> FloatArray:
        return self.read(self._rows(tokens))

    def times(self, x: FloatArray, matrix: torch.Tensor) -> FloatArray:
        found: FloatArray = linear(pad(torch.from_numpy(x)), matrix)[: len(x)].numpy()
        return found

    def highest(
        self, x: FloatArray, matrix: torch.Tensor, count: int
    ) -> tuple[IntArray, FloatArray]:
        raw = torch.from_numpy(self.times(x, matrix))
        places = ranked(raw, count)
        return places.numpy(), raw.gather(1, places).numpy()

    def move(self, sources: IntArray, targets: IntArray) -> None:
        read, write = torch.from_numpy(sources), torch.from_numpy(targets)
        for pool in (*self._keys, *self._values):
            pool.index_copy_(1, write, pool.index_select(1, read))
        if self._planes:
            self._features.index_copy_(0, write, self._features.index_select(0, read))
        for carried in self._carried.values():
            carried.index_copy_(0, write, carried.index_select(0, read))

    def feature(self, slot: int) -> FloatArray:
        return np.array(self._features[slot].numpy(), dtype=np.float32)

    def final_norm(self) -> torch.Tensor:
        return self._norm

    def add_rows(self, rows: torch.Tensor) -> int:
        before = len(self._extra)
        self._extra = torch.cat([self._extra, rows.to(torch.float32)])
        return before
