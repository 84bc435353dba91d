"""`Decoder`: one transformer for the Llama, Mistral, Qwen and SmolLM families.

It runs token graphs over a paged cache, all in float32, through operations whose rows do not
depend on each other: a node gets the same bits alone, in a long prompt, in a tree or in a batch.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import torch

from outstride.core.contracts import CAUSAL, Work
from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.select import select
from outstride.core.sequence import Table
from outstride.models import weights
from outstride.models.config import DecoderConfig
from outstride.ops import reference as ops
from outstride.ops.plan import Plan, Span, plan

HEAD_ROWS = 64
"""So many rows of the vocabulary exist at once, however many nodes are wanted."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer; matrices that share their input are one matrix."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class _Part:
    """One piece of work on its way through the layers."""

    work: Work
    start: int
    stop: int
    state: torch.Tensor
    hidden: dict[int, FloatArray] = field(default_factory=dict)

    @property
    def proposal(self) -> Proposal:
        return self.work.proposal

    @property
    def count(self) -> int:
        """How many nodes this pass computes."""
        return len(self.state)

    @property
    def wanted(self) -> IntArray:
        """Nodes that reach the head; those of earlier rounds have had their scores."""
        nodes = self.work.proposal.wanted
        return nodes[nodes >= self.work.first]


@dataclass(frozen=True, slots=True)
class _Batch:
    """The parts that run through the same layers together, row below row."""

    parts: list[_Part]
    rows: list[slice]
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    plans: dict[int | None, Plan]


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass on the model's own thread."""

    future: Future[list[Scores]]

    def wait(self) -> list[Scores]:
        return self.future.result()


def _digest(config: DecoderConfig, tensors: dict[str, torch.Tensor]) -> str:
    """Names the weights: every bit counts in a fold, and a sample of each tensor in order."""
    digest = hashlib.sha256(repr(config).encode())
    for name in sorted(tensors):
        words = tensors[name].contiguous().view(-1).numpy().view(np.uint32)
        sample = words[:: max(1, len(words) // 1024)]
        digest.update(f"{name}{tuple(tensors[name].shape)}".encode())
        digest.update(np.bitwise_xor.reduce(words).tobytes())
        digest.update(np.ascontiguousarray(sample).tobytes())
    return digest.hexdigest()


def _pool(*shape: int) -> torch.Tensor:
    """Zeros that take memory only once they are written, a small page at a time.

    numpy would ask for huge pages here, and a first entry in each layer would cost megabytes.
    """
    if not (count := math.prod(shape)):
        return torch.zeros(shape)
    memory = mmap.mmap(-1, count * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


class Decoder:
    """A causal decoder with a paged cache. Implements `core.contracts.Model`.

    `tensors` are named as in a Hugging Face checkpoint; they are taken out of the dictionary one
    by one, so that no second copy of the model exists at any time. `features` names layers whose
    entering states are stored beside the cache entry of each node, for trained drafters.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tensors: dict[str, torch.Tensor],
        *,
        pages: int,
        page_size: int = 16,
        features: tuple[int, ...] = (),
    ) -> None:
        weights.check(config, tensors)
        if any(not 0 <= layer <= config.layers for layer in features):
            raise ValueError(f"features must name layers from 0 to {config.layers}: {features}")
        self.config = config
        self.vocab_size = config.vocab_size
        self.context = config.context
        self.vision = CAUSAL
        self.page_size = page_size
        self.pages = pages
        self.features = features
        digest = _digest(config, tensors)
        self.embedding = weights.joined([tensors.pop("model.embed_tokens.weight")])
        self.layers = [self._take_layer(tensors, i) for i in range(config.layers)]
        self.norm = weights.joined([tensors.pop("model.norm.weight")])
        self.head = (
            self.embedding if config.tied else weights.joined([tensors.pop("lm_head.weight")])
        )
        self.extra = torch.empty(0, config.hidden_size)
        self._inverse = torch.tensor(
            config.rope.frequencies(config.head_dim), dtype=torch.float64
        ).to(torch.float32)
        slots, heads = pages * page_size, config.kv_heads
        self._keys = [_pool(heads, slots, config.head_dim) for _ in range(config.layers)]
        self._values = [
            _pool(heads, slots, config.head_dim + ops.SPARE) for _ in range(config.layers)
        ]
        self._features = _pool(slots, len(features) * config.hidden_size)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outstride-model")
        build = f"{digest} {ops.NAME} torch {torch.__version__} threads {torch.get_num_threads()}"
        self.fingerprint = hashlib.sha256(build.encode()).hexdigest()[:16]

    def _take_layer(self, tensors: dict[str, torch.Tensor], index: int) -> Layer:
        """Takes a layer's tensors out of the dictionary."""
        config = self.config

        def take(*names: str) -> torch.Tensor:
            return weights.joined([tensors.pop(f"model.layers.{index}.{name}") for name in names])

        def maybe(present: bool, *names: str) -> torch.Tensor | None:
            return take(*names) if present else None

        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        return Layer(
            attention_norm=take("input_layernorm.weight"),
            qkv=take(*(f"{name}.weight" for name in qkv)),
            qkv_bias=maybe(config.qkv_bias, *(f"{name}.bias" for name in qkv)),
            query_norm=maybe(config.head_norms, "self_attn.q_norm.weight"),
            key_norm=maybe(config.head_norms, "self_attn.k_norm.weight"),
            output=take("self_attn.o_proj.weight"),
            output_bias=maybe(config.output_bias, "self_attn.o_proj.bias"),
            mlp_norm=take("post_attention_layernorm.weight"),
            gate_up=take("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            gate_up_bias=maybe(config.mlp_bias, "mlp.gate_proj.bias", "mlp.up_proj.bias"),
            down=take("mlp.down_proj.weight"),
            down_bias=maybe(config.mlp_bias, "mlp.down_proj.bias"),
        )

    def add_rows(self, rows: torch.Tensor) -> int:
        """Adds embedding rows (masks, prompt tokens); returns the id of the first."""
        first = self.vocab_size + len(self.extra)
        self.extra = torch.cat([self.extra, weights.joined([rows])])
        return first

    # --- the contract -----------------------------------------------------------------------------

    def forward(self, work: Sequence[Work]) -> Pass:
        """One pass over all graphs, on the model's own thread."""
        return Pass(self._worker.submit(self._forward, list(work)))

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies cache entries between slots, all read before any is written."""
        if len(sources):
            self._worker.submit(self._move, sources, targets).result()

    def feature(self, table: Table, position: int) -> FloatArray:
        """The stored states at a kept position, one layer behind the other."""
        entry = table.positions.index(position)
        slot = table.pages[entry // self.page_size] * self.page_size + entry % self.page_size
        return np.array(self._features[slot].numpy(), dtype=np.float32)

    def close(self) -> None:
        """Ends the model's thread; nothing may be asked of it afterwards."""
        self._worker.shutdown()

    # --- the pass ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def _move(self, sources: IntArray, targets: IntArray) -> None:
        read, write = torch.from_numpy(np.asarray(sources)), torch.from_numpy(np.asarray(targets))
        for pool in (*self._keys, *self._values):
            pool.index_copy_(1, write, pool.index_select(1, read))
        if self.features:
            self._features.index_copy_(0, write, self._features.index_select(0, read))

    @torch.inference_mode()
    def _forward(self, work: list[Work]) -> list[Scores]:
        parts = [self._part(piece) for piece in work]
        bounds = sorted({edge for part in parts for edge in (part.start, part.stop)})
        for low, high in pairwise(bounds):
            active = [p for p in parts if p.count and p.start <= low and high <= p.stop]
            if active:
                self._run_layers(active, low, high)
        return self._score(parts)

    def _part(self, work: Work) -> _Part:
        proposal = work.proposal
        start, stop = proposal.layers or (0, self.config.layers)
        if start == 0:
            state = self._embed(proposal, work.first)
        elif proposal.hidden is None:
            raise ValueError(f"a pass from layer {start} on needs hidden states")
        else:
            state = torch.from_numpy(np.ascontiguousarray(proposal.hidden, dtype=np.float32))
            if len(state) != len(proposal.graph) - work.first:
                raise ValueError("hidden states need one row for each node to be computed")
        return _Part(work, start, stop, state)

    def _embed(self, proposal: Proposal, first: int) -> torch.Tensor:
        """The inputs of the nodes from `first` on."""
        graph = proposal.graph
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
        beyond = ids >= self.vocab_size
        if not bool(beyond.any()):
            return self.embedding.index_select(0, ids)
        state = self.embedding.index_select(0, ids.masked_fill(beyond, 0))
        state[beyond] = self.extra.index_select(0, ids[beyond] - self.vocab_size)
        return state

    def _batch(self, parts: list[_Part], low: int, high: int) -> _Batch:
        """Puts parts below each other and works out who attends to what."""
        rows, spans, row = [], [], 0
        for part in parts:
            rows.append(slice(row, row + part.count))
            work = part.work
            spans.append(Span(part.proposal.graph, work.slots, work.table, work.first, row))
            row += part.count
        positions = np.zeros(ops.padded(row), dtype=np.int64)
        positions[:row] = np.concatenate(
            [p.proposal.graph.positions[p.work.first :] for p in parts]
        )
        slots = np.concatenate([p.work.slots[p.work.first :] for p in parts])
        cos, sin = ops.rope_tables(
            torch.from_numpy(positions), self._inverse, self.config.rope.scale
        )
        plans = {
            window: plan(
                spans,
                group=self.config.heads // self.config.kv_heads,
                kv_heads=self.config.kv_heads,
                window=window,
                page_size=self.page_size,
            )
            for window in dict.fromkeys(self.config.windows[low:high])
        }
        return _Batch(parts, rows, torch.from_numpy(slots), cos, sin, plans)

    def _run_layers(self, parts: list[_Part], low: int, high: int) -> None:
        """Takes the parts' states from the entrance of layer `low` to that of layer `high`."""
        batch = self._batch(parts, low, high)
        x = ops.pad(torch.cat([part.state for part in parts]))
        for index in range(low, high):
            self._record(batch, index, x)
            layer = self.layers[index]
            x = x + self._attend(index, ops.rms_norm(x, layer.attention_norm, self._eps), batch)
            x = x + self._mlp(layer, ops.rms_norm(x, layer.mlp_norm, self._eps))
        self._record(batch, high, x, last=True)
        for part, rows in zip(parts, batch.rows, strict=True):
            part.state = x[rows]

    @property
    def _eps(self) -> float:
        return self.config.norm_eps

    def _attend(self, index: int, x: torch.Tensor, batch: _Batch) -> torch.Tensor:
        config, layer = self.config, self.layers[index]
        rows, size, kv_heads = len(x), config.head_dim, config.kv_heads
        qkv = ops.linear(x, layer.qkv, layer.qkv_bias).view(rows, -1, size)
        q, k, v = torch.split(qkv, [config.heads, kv_heads, kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            q = ops.rms_norm(q.contiguous(), layer.query_norm, self._eps)
            k = ops.rms_norm(k.contiguous(), layer.key_norm, self._eps)
        if config.rope_layers[index]:
            q, k = ops.rope(q, batch.cos, batch.sin), ops.rope(k, batch.cos, batch.sin)
        keys, values, count = self._keys[index], self._values[index], len(batch.slots)
        keys.index_copy_(1, batch.slots, k[:count].transpose(0, 1))
        kept = x.new_ones(kv_heads, count, size + ops.SPARE)
        kept[..., :size] = v[:count].transpose(0, 1)
        values.index_copy_(1, batch.slots, kept)
        q = (q * size**-0.5).view(rows, kv_heads, -1, size).transpose(0, 1)
        mixed = ops.attention(
            q.reshape(kv_heads, -1, size), keys, values, batch.plans[config.windows[index]]
        )
        mixed = mixed.view(kv_heads, rows, -1, size).transpose(0, 1).reshape(rows, -1)
        return ops.linear(mixed, layer.output, layer.output_bias)

    @staticmethod
    def _mlp(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = ops.linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return ops.linear(ops.silu_mul(gate, up), layer.down, layer.down_bias)

    def _record(self, batch: _Batch, layer: int, x: torch.Tensor, *, last: bool = False) -> None:
        """Keeps what drafters want of the states that enter a layer.

        Where a run of layers ends in the middle, the next run records the same state again.
        """
        if layer in self.features and (not last or layer == self.config.layers):
            size, at = self.config.hidden_size, self.features.index(layer)
            plane = self._features[:, at * size : (at + 1) * size]
            plane.index_copy_(0, batch.slots, x[: len(batch.slots)])
        for part, rows in zip(batch.parts, batch.rows, strict=True):
            if layer in part.proposal.wants.hidden:
                part.hidden[layer] = x[rows].numpy().copy()

    # --- the head ---------------------------------------------------------------------------------

    def _score(self, parts: list[_Part]) -> list[Scores]:
        """Only wanted nodes reach the head, those of all parts together and a few at a time."""
        lines = [(part, node) for part in parts for node in part.wanted.tolist()]
        pieces: dict[int, list[Scores]] = {id(part): [] for part in parts}
        for start in range(0, len(lines), HEAD_ROWS):
            some = lines[start : start + HEAD_ROWS]
            x = torch.stack([part.state[node - part.work.first] for part, node in some])
            raw = ops.linear(ops.rms_norm(ops.pad(x), self.norm, self._eps), self.head).numpy()
            row = 0
            for _, group in groupby(some, key=lambda line: id(line[0])):
                mine = list(group)
                part, nodes = mine[0][0], np.asarray([node for _, node in mine])
                found = select(part.proposal, nodes, raw[row : row + len(mine)])
                pieces[id(part)].append(found)
                row += len(mine)
        return [self._gather(part, pieces[id(part)]) for part in parts]

    def _gather(self, part: _Part, pieces: list[Scores]) -> Scores:
        """A part's scores from those of its rows."""
        if not pieces:
            nothing = np.zeros((0, self.vocab_size), dtype=np.float32)
            pieces = [select(part.proposal, part.wanted, nothing)]
        wants = part.proposal.wants
        return Scores(
            nodes=part.wanted,
            best=np.concatenate([piece.best for piece in pieces]),
            logprobs=tuple(line for piece in pieces for line in piece.logprobs),
            rows=np.concatenate([p.rows for p in pieces if p.rows is not None])
            if wants.rows
            else None,
            logits=np.concatenate([p.logits for p in pieces if p.logits is not None])
            if wants.logits
            else None,
            hidden=part.hidden,
        )
