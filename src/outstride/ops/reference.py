"""The operations of a pass in plain torch: the oracle that all other backends are compared with.

A row's bits depend on that row alone, because everything is computed by `arithmetic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.core.recurrent import StateUpdate
from outstride.core.scoring import select
from outstride.ops.arithmetic import (
    SPARE,
    attention,
    gelu_mul,
    head_norm,
    linear,
    pad,
    padded,
    rms_norm,
    rope,
    rope_tables,
    sigmoid_gate,
    silu_mul,
    softcap,
    through_experts,
)
from outstride.ops.attention_plan import plan
from outstride.ops.contract import HeadInput, Ops, Span, adapter_rows_of
from outstride.ops.recurrent_plan import plan as plan_recurrent
from outstride.ops.recurrent_states import RecurrentStates, sigmoid
from outstride.ops.reference_batch import ReferenceBatch
from outstride.ops.reference_draft_heads import ReferenceDraftHeads
from outstride.ops.reference_latent import expanded, project_latent
from outstride.ops.reference_memory import ReferenceCache, ReferenceEmbedding
from outstride.ops.reference_per_layer import per_layer_inputs, per_layer_output
from outstride.ops.switches import GELU_TANH, RopeWeights
from outstride.ops.weights import (
    AdapterWeights,
    LayerWeights,
    ModelShape,
    ModelWeights,
    attention_scale,
    head_sizes,
)

LM_HEAD_ROWS = 64
"""How many rows of logits exist at once, however many nodes are wanted: it bounds memory."""


def _rope_of(frequencies: Sequence[float], scale: float) -> tuple[torch.Tensor, float]:
    return torch.tensor(frequencies, dtype=torch.float64).to(torch.float32), scale


class Reference(Ops):
    """Weights and KV cache in float32, passes in torch."""

    windows: list[int | None]
    draft_heads: ReferenceDraftHeads

    device = "cpu"
    weights = "fp32"

    @classmethod
    def kv_bytes_per_token(cls, shape: ModelShape) -> int:
        own = {*(shape.switches.kv_layers or range(shape.layers))}
        if (recurrent := shape.switches.recurrent) is not None:
            own -= {layer for layer in own if recurrent.layers[layer]}
        sizes = [head_sizes(shape, layer) for layer in own]
        return sum(4 * heads * (2 * size + SPARE) for heads, size in sizes)

    def __init__(self, model: ModelWeights) -> None:
        self.shape = shape = model.shape
        self._layers = list(model.layers)
        self.norm = model.norm
        self.lm_head = model.embedding if model.head is None else model.head
        self.embedding = ReferenceEmbedding(model.embedding)
        self._ropes = {False: _rope_of(shape.frequencies, shape.rope_scale)}
        if (local := shape.switches.local_rope) is not None:
            self._ropes[True] = _rope_of(local.frequencies, local.scale)
        self._per_layer = model.per_layer
        self.page_size = model.page_size
        self.cache = ReferenceCache(shape, model.slots, model.features)
        self.states = RecurrentStates.of(shape, model.state_slots)
        self._own_rope: dict[int, tuple[torch.Tensor, float]] = {}
        """Frequencies and scale of layers of draft heads that have their own RoPE."""
        self.adapters: dict[int, Sequence[AdapterWeights]] = {}
        """LoRA adapters by number: what each adds to the model's own layers."""
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
            tables = _rope_of(own_rope.frequencies, own_rope.scale)
            self._own_rope |= dict.fromkeys(range(first, len(self._layers)), tables)
        return first

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> ReferenceBatch:
        shape, rows = self.shape, spans[-1].rows.stop
        positions = np.zeros(padded(rows), dtype=np.int64)
        positions[:rows] = np.concatenate([s.graph.positions[s.first :] for s in spans])
        slots = np.concatenate([s.slots[s.first :] for s in spans])
        where = torch.from_numpy(positions)
        growth = None
        if (grows := shape.switches.query_growth) is not None:
            steps = torch.log(1 + (where // grows.interval).to(torch.float32))
            growth = (1 + grows.beta * steps)[:, None, None]
        full = shape.switches.full_attention
        kv_heads = {shape.kv_heads, shape.kv_heads if full is None else full.kv_heads}
        plans = {
            (window, count): plan(
                spans,
                group=shape.heads // count,
                kv_heads=count,
                window=window,
                page_size=self.page_size,
            )
            for window in dict.fromkeys(windows)
            for count in kv_heads
        }
        numbers = adapter_rows_of(spans)
        return ReferenceBatch(
            spans,
            torch.from_numpy(slots),
            where,
            {local: rope_tables(where, *table) for local, table in self._ropes.items()},
            plans,
            growth,
            adapters=()
            if numbers is None
            else [
                (self.adapters[number], torch.from_numpy(np.flatnonzero(numbers == number)))
                for number in np.unique(numbers[numbers > 0]).tolist()
            ],
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
        if self._per_layer is not None:
            embedded = pad(torch.cat([self.embedding.of_span(span) for span in batch.spans]))
            batch.per_layer = per_layer_inputs(self.shape, self._per_layer, batch.spans, embedded)
        return pad(torch.cat(parts))

    def project(self, layer: int, x: torch.Tensor, batch: ReferenceBatch) -> torch.Tensor:
        return self.project_with(layer, self._layers[layer], x, batch)

    def project_with(
        self, layer: int, weights: LayerWeights, x: torch.Tensor, batch: ReferenceBatch
    ) -> torch.Tensor:
        """Queries [kv_heads, rows * group, head_dim]; keys and values go to the cache of `layer`."""
        if weights.latent is not None:
            tables, scale = batch.ropes[False], attention_scale(self.shape, layer)
            queries, k, v = project_latent(self.shape, weights, x, tables)
            self.cache.write(layer, batch.slots, k, v)
            return (queries * scale).view(1, len(x) * self.shape.heads, -1)
        shape, rows, switches = self.shape, len(x), self.shape.switches
        (kv_heads, size), eps = head_sizes(shape, layer), shape.norm_eps
        own, windowed = layer < shape.layers, self.windows[layer] is not None
        normed = x
        if len(weights.attention_norm):
            normed = rms_norm(x, weights.attention_norm, eps)
        if batch.embeddings is not None and weights.qkv.shape[1] > x.shape[1]:
            normed = torch.cat([batch.embeddings, normed], dim=1)
        qkv = linear(normed, weights.qkv, weights.qkv_bias)
        qkv = batch.adapted(qkv, normed, layer, "qkv")
        if weights.recurrent is not None:
            return qkv
        if own and switches.attention_gate:
            wide = shape.heads * size
            qkv, batch.gates = qkv.split_with_sizes([qkv.shape[1] - wide, wide], dim=1)
        qkv = qkv.reshape(rows, -1, size)
        q, kv = qkv[:, : shape.heads], qkv[:, shape.heads :]
        tables = batch.ropes[own and windowed and switches.local_rope is not None]
        if layer in self._own_rope:
            tables = rope_tables(batch.positions, *self._own_rope[layer])
        rotates = not own or shape.rope_layers[layer]

        def finished(heads: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
            if norm is not None:
                heads = head_norm(heads, norm, eps)
            if weights.clip is not None:
                heads = heads.clamp(-weights.clip, weights.clip)
            return rope(heads, *tables) if rotates else heads

        q = finished(q, weights.query_norm)
        if batch.growth is not None and own:
            q = q * batch.growth
        if kv.shape[1]:
            k, v = kv.chunk(2, dim=1)
            if weights.clip is not None:
                v = v.clamp(-weights.clip, weights.clip)
            if switches.value_norms and own:
                v = rms_norm(v.contiguous(), v.new_ones(size), eps)
            self.cache.write(layer, batch.slots, finished(k, weights.key_norm), v)
        scale = attention_scale(shape, layer) if own else size**-0.5
        grouped = (q * scale).view(rows, kv_heads, -1, size).transpose(0, 1)
        return torch.reshape(grouped, (kv_heads, -1, size))

    def attend(self, layer: int, queries: torch.Tensor, batch: ReferenceBatch) -> torch.Tensor:
        shape, cache, sinks = self.shape, self.cache, self._layers[layer].sinks
        if (recurrent := self._layers[layer].recurrent) is not None:
            assert self.states is not None
            if batch.recurrent is None:
                batch.recurrent = plan_recurrent(batch.spans, self.states.shape.kernel)
            return self.states.run(layer, recurrent, queries, batch.recurrent)
        kv_heads, size = head_sizes(shape, layer)
        chosen = batch.plans[self.windows[layer], kv_heads]
        if sinks is not None:
            sinks = sinks.view(kv_heads, -1).repeat(1, queries.shape[1] * kv_heads // shape.heads)
        cap = shape.switches.attention_softcap if layer < shape.layers else None
        attended = attention(queries, cache.keys[layer], cache.values[layer], chosen, cap, sinks)
        rows = attended.shape[1] * kv_heads // shape.heads
        grouped = attended.view(kv_heads, rows, -1, size)
        found = grouped.transpose(0, 1).reshape(rows, -1)
        if batch.gates is not None and layer < shape.layers:
            found = found * sigmoid(batch.gates)
        return found

    def output(
        self, layer: int, x: torch.Tensor, attended: torch.Tensor, batch: ReferenceBatch
    ) -> torch.Tensor:
        weights = self._layers[layer]
        if weights.latent is not None:
            attended = expanded(weights.latent, attended, self.shape.heads)
        product = linear(attended, weights.output, weights.output_bias)
        product = batch.adapted(product, attended, layer, "output")
        if weights.attention_post_norm is not None:
            product = rms_norm(product, weights.attention_post_norm, self.shape.norm_eps)
        return x + product

    def mlp(self, layer: int, x: torch.Tensor, batch: ReferenceBatch) -> torch.Tensor:
        weights, eps = self._layers[layer], self.shape.norm_eps
        normed = rms_norm(x, weights.mlp_norm, eps) if len(weights.mlp_norm) else x
        if weights.experts is not None:
            x = x + through_experts(normed, weights.experts)
            if not len(weights.gate_up):
                return x
        inner = linear(normed, weights.gate_up, weights.gate_up_bias)
        inner = batch.adapted(inner, normed, layer, "gate_up")
        gated = self._activation(layer)(*inner.chunk(2, dim=-1))
        product = linear(gated, weights.down, weights.down_bias)
        product = batch.adapted(product, gated, layer, "down")
        if weights.experts is not None and weights.experts.shared_gate is not None:
            product = product * sigmoid_gate(normed, weights.experts.shared_gate)
        if weights.mlp_post_norm is not None:
            product = rms_norm(product, weights.mlp_post_norm, eps)
        x = x + product
        if batch.per_layer is not None and weights.per_layer_gate is not None:
            x = x + per_layer_output(weights, x, batch.per_layer[:, layer], eps)
        return x if weights.scale == 1.0 else x * weights.scale

    def _activation(self, layer: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """The activation of a layer; those of draft heads have SiLU."""
        own = layer < self.shape.layers
        return gelu_mul if own and self.shape.switches.activation == GELU_TANH else silu_mul

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
            found = linear(normed, self.lm_head)
            if (cap := self.shape.switches.logit_softcap) is not None:
                found = softcap(found, cap)
            logits = found.numpy()
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

    def update_states(self, updates: Sequence[StateUpdate]) -> None:
        assert self.states is not None
        self.states.update(updates)

    def feature(self, slot: int) -> FloatArray:
        return np.array(self.cache.features[slot].numpy(), dtype=np.float32)

    def add_rows(self, rows: torch.Tensor) -> int:
        return self.embedding.add_rows(rows)
