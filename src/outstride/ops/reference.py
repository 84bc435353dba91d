"""The operations of a pass in plain torch: the oracle that all other backends are compared with.

A row's bits depend on that row alone, because everything is computed by `arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.core.scoring import select
from outstride.ops.arithmetic import (
    SPARE,
    attention,
    head_norm,
    linear,
    pad,
    padded,
    rms_norm,
    rope,
    rope_tables,
    silu_mul,
    through_experts,
)
from outstride.ops.attention_plan import AttentionPlan, plan
from outstride.ops.contract import HeadInput, Ops, Span, adapter_rows_of
from outstride.ops.reference_draft_heads import ReferenceDraftHeads
from outstride.ops.reference_memory import ReferenceCache, ReferenceEmbedding
from outstride.ops.weights import (
    AdapterWeights,
    LayerWeights,
    LoraWeights,
    ModelShape,
    ModelWeights,
    RopeWeights,
)

LM_HEAD_ROWS = 64
"""How many rows of logits exist at once, however many nodes are wanted: it bounds memory."""


@dataclass(slots=True)
class ReferenceBatch:
    """What is worked out once for a run of layers; `rows` are padded to whole tiles."""

    spans: Sequence[Span]
    slots: torch.Tensor
    """[computed nodes]"""
    positions: torch.Tensor
    """[rows]"""
    cos: torch.Tensor
    """[rows, 1, head_dim / 2]"""
    sin: torch.Tensor
    plans: dict[int | None, AttentionPlan]
    """By window."""
    embeddings: torch.Tensor | None = None
    """[rows, hidden]: what the layer of an EAGLE-3 head reads before the hidden states."""
    adapter_rows: torch.Tensor | None = None
    """The indices of the rows that go through the adapter, if there are any."""

    def adapted(
        self, product: torch.Tensor, x: torch.Tensor, lora: LoraWeights | None
    ) -> torch.Tensor:
        """product [rows, out] of x [rows, in], with what the adapter adds to its rows."""
        if self.adapter_rows is not None and lora is not None:
            added = linear(linear(pad(x[self.adapter_rows]), lora.a), lora.b)
            product[self.adapter_rows] += added[: len(self.adapter_rows)]
        return product


class Reference(Ops):
    """Weights and KV cache in float32, passes in torch."""

    windows: list[int | None]
    draft_heads: ReferenceDraftHeads

    device = "cpu"
    weights = "fp32"

    @classmethod
    def kv_bytes_per_token(cls, shape: ModelShape) -> int:
        return 4 * shape.layers * shape.kv_heads * (2 * shape.head_dim + SPARE)

    def __init__(self, model: ModelWeights) -> None:
        self.shape = shape = model.shape
        self._layers = list(model.layers)
        self.norm = model.norm
        self.lm_head = model.embedding if model.head is None else model.head
        self.embedding = ReferenceEmbedding(model.embedding)
        self._frequencies = torch.tensor(shape.frequencies, dtype=torch.float64).to(torch.float32)
        self.page_size = model.page_size
        self.cache = ReferenceCache(shape, model.slots, model.features)
        self._own_rope: dict[int, tuple[torch.Tensor, float]] = {}
        """Frequencies and scale of layers of draft heads that have their own RoPE."""
        self.adapter: Sequence[AdapterWeights] = ()
        self.windows = list(shape.windows)
        self.name = f"reference fp32 threads {torch.get_num_threads()}"
        self.draft_heads = ReferenceDraftHeads(self)

    def add_layers(
        self, layers: Sequence[LayerWeights], window: int | None, own_rope: RopeWeights | None
    ) -> int:
        """Adds the layers of a draft head after all others; returns the number of the first one."""
        first = len(self._layers)
        self._layers += layers
        self.cache.add_layers(len(layers))
        self.windows += [window] * len(layers)
        if own_rope is not None:
            frequencies = torch.tensor(own_rope.frequencies, dtype=torch.float64).to(torch.float32)
            tables = frequencies, own_rope.scale
            self._own_rope |= dict.fromkeys(range(first, len(self._layers)), tables)
        return first

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> ReferenceBatch:
        shape, rows = self.shape, spans[-1].rows.stop
        positions = np.zeros(padded(rows), dtype=np.int64)
        positions[:rows] = np.concatenate([s.graph.positions[s.first :] for s in spans])
        slots = np.concatenate([s.slots[s.first :] for s in spans])
        cos, sin = rope_tables(torch.from_numpy(positions), self._frequencies, shape.rope_scale)
        plans = {
            window: plan(
                spans,
                group=shape.heads // shape.kv_heads,
                kv_heads=shape.kv_heads,
                window=window,
                page_size=self.page_size,
            )
            for window in dict.fromkeys(windows)
        }
        marked = adapter_rows_of(spans)
        return ReferenceBatch(
            spans,
            torch.from_numpy(slots),
            torch.from_numpy(positions),
            cos,
            sin,
            plans,
            adapter_rows=None if marked is None else torch.from_numpy(np.flatnonzero(marked)),
        )

    def initial_hidden(
        self, batch: ReferenceBatch, hidden: Sequence[torch.Tensor | FloatArray | None]
    ) -> torch.Tensor:
        parts = []
        for span, part in zip(batch.spans, hidden, strict=True):
            if part is None:
                part = self.embedding.of_span(span)
            elif not isinstance(part, torch.Tensor):
                part = torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))
            parts.append(part)
        return pad(torch.cat(parts))

    def project(self, layer: int, x: torch.Tensor, batch: ReferenceBatch) -> torch.Tensor:
        return self.project_with(layer, self._layers[layer], x, batch)

    def project_with(
        self, layer: int, weights: LayerWeights, x: torch.Tensor, batch: ReferenceBatch
    ) -> torch.Tensor:
        """Queries [kv_heads, rows * group, head_dim]; keys and values go to the cache of `layer`."""
        shape, rows = self.shape, len(x)
        kv_heads, size, eps = shape.kv_heads, shape.head_dim, shape.norm_eps
        normed = x
        if len(weights.attention_norm):
            normed = rms_norm(x, weights.attention_norm, eps)
        if batch.embeddings is not None and weights.qkv.shape[1] > x.shape[1]:
            normed = torch.cat([batch.embeddings, normed], dim=1)
        lora = self.adapter[layer].qkv if layer < len(self.adapter) else None
        qkv = linear(normed, weights.qkv, weights.qkv_bias)
        qkv = batch.adapted(qkv, normed, lora).view(rows, -1, size)
        q, k, v = qkv.split_with_sizes([shape.heads, kv_heads, kv_heads], dim=1)
        if weights.query_norm is not None and weights.key_norm is not None:
            q = head_norm(q, weights.query_norm, eps)
            k = head_norm(k, weights.key_norm, eps)
        if weights.clip is not None:
            q, k, v = (part.clamp(-weights.clip, weights.clip) for part in (q, k, v))
        if layer >= shape.layers or shape.rope_layers[layer]:
            cos, sin = batch.cos, batch.sin
            if layer in self._own_rope:
                cos, sin = rope_tables(batch.positions, *self._own_rope[layer])
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        self.cache.write(layer, batch.slots, k, v)
        grouped = (q * size**-0.5).view(rows, kv_heads, -1, size).transpose(0, 1)
        queries: torch.Tensor = grouped.reshape(kv_heads, -1, size)
        return queries

    def attend(self, layer: int, queries: torch.Tensor, batch: ReferenceBatch) -> torch.Tensor:
        shape, cache = self.shape, self.cache
        chosen = batch.plans[self.windows[layer]]
        attended = attention(queries, cache.keys[layer], cache.values[layer], chosen)
        rows = attended.shape[1] * shape.kv_heads // shape.heads
        grouped = attended.view(shape.kv_heads, rows, -1, shape.head_dim)
        return grouped.transpose(0, 1).reshape(rows, -1)

    def output(
        self, layer: int, x: torch.Tensor, attended: torch.Tensor, batch: ReferenceBatch
    ) -> torch.Tensor:
        weights = self._layers[layer]
        lora = self.adapter[layer].output if layer < len(self.adapter) else None
        product = linear(attended, weights.output, weights.output_bias)
        return x + batch.adapted(product, attended, lora)

    def mlp(self, layer: int, x: torch.Tensor, batch: ReferenceBatch) -> torch.Tensor:
        weights = self._layers[layer]
        normed = rms_norm(x, weights.mlp_norm, self.shape.norm_eps)
        if weights.experts is not None:
            x = x + through_experts(normed, weights.experts)
            if not len(weights.gate_up):
                return x
        lora = self.adapter[layer] if layer < len(self.adapter) else None
        inner = linear(normed, weights.gate_up, weights.gate_up_bias)
        inner = batch.adapted(inner, normed, lora.gate_up if lora else None)
        gated = silu_mul(*inner.chunk(2, dim=-1))
        product = linear(gated, weights.down, weights.down_bias)
        return x + batch.adapted(product, gated, lora.down if lora else None)

    def keep_features(self, layer: int, x: torch.Tensor, batch: ReferenceBatch) -> None:
        self.cache.keep_features(layer, x, batch.slots)

    def hidden_of(self, x: torch.Tensor, rows: slice) -> torch.Tensor:
        return x[rows]

    def to_array(self, hidden: torch.Tensor) -> FloatArray:
        return np.array(hidden.numpy(), dtype=np.float32)

    def score(self, wanted: Sequence[HeadInput]) -> Callable[[], list[Scores]]:
        """At most LM_HEAD_ROWS rows of logits at a time."""
        scores: list[list[Scores]] = [
            [self.draft_heads.candidates(item)] if item.proposal.draft_head else []
            for item in wanted
        ]
        lines = [
            (i, int(node)) for i, item in enumerate(wanted) if not scores[i] for node in item.nodes
        ]
        for start in range(0, len(lines), LM_HEAD_ROWS):
            some = lines[start : start + LM_HEAD_ROWS]
            x = torch.stack([wanted[i].hidden[node - wanted[i].first] for i, node in some])
            normed = rms_norm(pad(x), self.norm, self.shape.norm_eps)
            logits = linear(normed, self.lm_head).numpy()
            for i in dict.fromkeys(i for i, _ in some):
                own = [n for n, (owner, _) in enumerate(some) if owner == i]
                nodes = np.asarray([some[n][1] for n in own])
                scores[i].append(select(wanted[i].proposal, nodes, logits[own[0] : own[-1] + 1]))
        nothing = np.zeros((0, self.shape.vocab_size), dtype=np.float32)
        joined = [
            Scores.joined(found or [select(item.proposal, item.nodes, nothing)])
            for item, found in zip(wanted, scores, strict=True)
        ]
        return lambda: joined

    def move(self, sources: IntArray, targets: IntArray) -> None:
        read, write = torch.from_numpy(sources), torch.from_numpy(targets)
        self.cache.move(read, write)
        self.draft_heads.move(read, write)

    def feature(self, slot: int) -> FloatArray:
        return np.array(self.cache.features[slot].numpy(), dtype=np.float32)

    def add_rows(self, rows: torch.Tensor) -> int:
        return self.embedding.add_rows(rows)
