"""`Decoder`: one transformer for the Llama, Qwen and LLaDA families, autoregressive or not.

It runs token graphs over a paged cache through operations whose rows do not depend on each other:
a node gets the same bits alone, in a long prompt, in a tree or in a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from threading import Lock

import numpy as np
import torch

from outstride.core.contracts import Filter, Graft, Masking, Work
from outstride.core.graph import MIXTURE, BoolArray, FloatArray, IntArray
from outstride.core.proposal import Proposal, Scores
from outstride.core.sequence import Table
from outstride.models import weights
from outstride.models.config import DecoderConfig
from outstride.ops.contract import (
    AdapterWeights,
    ExpertWeights,
    GraftWeights,
    HeadsWeights,
    LayerWeights,
    Model,
    Ops,
    Span,
    State,
    Wanted,
)
from outstride.ops.reference import Reference


@dataclass(slots=True)
class _Part:
    """One piece of work on its way through the layers."""

    work: Work
    start: int
    stop: int
    state: State | FloatArray | None
    """None until the first layer: its inputs are still to be embedded."""
    hidden: dict[int, FloatArray] = field(default_factory=dict)

    @property
    def proposal(self) -> Proposal:
        return self.work.proposal

    @property
    def count(self) -> int:
        """How many nodes this pass computes."""
        return len(self.work.proposal.graph) - self.work.first

    @property
    def wanted(self) -> IntArray:
        """Nodes that reach the head; those of earlier rounds have had their scores."""
        nodes, first = self.work.proposal.wanted, self.work.first
        return nodes[nodes >= first] if first else nodes


@dataclass(slots=True)
class Pass:
    """A pass: launched and running elsewhere, or run by whoever waits for it.

    On a processor a pass uses all cores, and handing it to a thread and back takes longer than most
    of what could be done meanwhile. It is handed over when a drafter works in the same step.
    """

    result: Callable[[], list[Scores]]
    worker: Executor | None = None
    """The model's own thread, where that is of use."""

    def start(self) -> None:
        if self.worker is not None:
            self.result, self.worker = self.worker.submit(self.result).result, None

    def wait(self) -> list[Scores]:
        return self.result()


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


def _take_layer(
    config: DecoderConfig, tensors: dict[str, torch.Tensor], index: int
) -> LayerWeights:
    """Takes a layer's tensors out of the dictionary."""

    at = f"model.layers.{index}."

    def take(*names: str) -> torch.Tensor:
        return weights.joined([tensors.pop(at + name) for name in names])

    def maybe(present: bool, *names: str) -> torch.Tensor | None:
        return take(*names) if present else None

    def heads(kind: str) -> torch.Tensor:
        q, k, v = (tensors.pop(f"{at}self_attn.{name}_proj.{kind}") for name in "qkv")
        return weights.joined([*(weights.turned_first(part, config) for part in (q, k)), v])

    def norm(name: str) -> torch.Tensor | None:
        if not config.head_norms:
            return None
        return weights.joined([weights.turned_first(tensors.pop(f"{at}self_attn.{name}"), config)])

    experts = config.experts if config.experts and config.experts.layers[index] else None
    mlp, some = ("mlp.shared_experts", experts.shared > 0) if experts else ("mlp", True)
    inner = (f"{mlp}.gate_proj", f"{mlp}.up_proj")
    return LayerWeights(
        attention_norm=take("input_layernorm.weight"),
        qkv=heads("weight"),
        qkv_bias=heads("bias") if config.qkv_bias else None,
        query_norm=norm("q_norm.weight"),
        key_norm=norm("k_norm.weight"),
        output=take("self_attn.o_proj.weight"),
        output_bias=maybe(config.output_bias, "self_attn.o_proj.bias"),
        mlp_norm=take("post_attention_layernorm.weight"),
        gate_up=take(*(f"{name}.weight" for name in inner)) if some else torch.empty(0, 0),
        gate_up_bias=maybe(config.mlp_bias, *(f"{name}.bias" for name in inner)),
        down=take(f"{mlp}.down_proj.weight") if some else torch.empty(0, 0),
        down_bias=maybe(config.mlp_bias, f"{mlp}.down_proj.bias"),
        experts=_take_experts(config, tensors, index) if experts else None,
        clip=config.clip,
    )


def _take_experts(
    config: DecoderConfig, tensors: dict[str, torch.Tensor], index: int
) -> ExpertWeights:
    """Takes the experts of a layer out of the dictionary."""

    def take(*names: str) -> torch.Tensor:
        return weights.joined([tensors.pop(f"model.layers.{index}.{name}") for name in names])

    experts = config.experts
    assert experts is not None
    inner, outer = weights.expert_parts(config)
    size, hidden = experts.size, config.hidden_size
    return ExpertWeights(
        routing=experts.routing,
        router=take("mlp.gate.weight"),
        bias=take("mlp.gate.expert_bias") if experts.bias else None,
        gate_up=take(*(f"{name}.weight" for name in inner)).view(-1, 2 * size, hidden),
        down=take(*(f"{name}.weight" for name in outer)).view(-1, hidden, size),
    )


class Decoder:
    """A decoder with a paged cache. Implements `core.contracts.Model`.

    Who sees whom is the graphs' affair: one pass may hold chains and masked blocks. `digest` names
    the weights that the operations work with.
    """

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        digest: str,
        *,
        pages: int,
        page_size: int = 16,
        masking: Masking | None = None,
    ) -> None:
        self.config = config
        self.ops = ops
        self.vocab_size = config.vocab_size
        self.layers = config.layers
        self.context = config.context
        self.vision = config.vision
        self.masking = masking
        self.page_size = page_size
        self.pages = pages
        self.digest = digest
        self.grafts: dict[str, Graft] = {}
        self.filters: dict[str, Filter] = {}
        self._ranges: dict[str, tuple[int, int]] = {"": (0, config.layers)}
        self._following: dict[int, str] = {}
        """Parts that go on from states, by their first layer."""
        self._busy = Lock()
        """Held during a pass, and while something is attached."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="outstride-model")
        build = f"{digest} {self.ops.name} torch {torch.__version__}"
        self.fingerprint = hashlib.sha256(build.encode()).hexdigest()[:16]

    @classmethod
    def from_tensors(
        cls,
        config: DecoderConfig,
        tensors: dict[str, torch.Tensor],
        *,
        pages: int,
        page_size: int = 16,
        features: tuple[int, ...] = (),
        make_ops: Callable[[Model], Ops] = Reference,
        masking: Masking | None = None,
    ) -> Decoder:
        """From tensors named as in a Llama checkpoint of Hugging Face.

        They are taken out of the dictionary one by one, so that no second copy of the model exists
        at any time. `features` names layers whose entering states are stored beside the cache entry
        of each node, for trained drafters.
        """
        weights.check(config, tensors)
        if any(not 0 <= layer <= config.layers for layer in features):
            raise ValueError(f"features must name layers from 0 to {config.layers}: {features}")
        digest = _digest(config, tensors)
        model = Model(
            shape=config,
            embedding=weights.joined([tensors.pop("model.embed_tokens.weight")]),
            layers=[_take_layer(config, tensors, i) for i in range(config.layers)],
            norm=weights.joined([tensors.pop("model.norm.weight")]),
            head=None if config.tied else weights.joined([tensors.pop("lm_head.weight")]),
            slots=pages * page_size,
            page_size=page_size,
            features=features,
        )
        ops = make_ops(model)
        return cls(config, ops, digest, pages=pages, page_size=page_size, masking=masking)

    def add_rows(self, rows: torch.Tensor) -> int:
        """Adds embedding rows (masks, prompt tokens); returns the id of the first."""
        return self.vocab_size + self.ops.add_rows(weights.joined([rows]))

    def attach(self, name: str, graft: Graft, weights: GraftWeights) -> None:
        """Takes in a trained part. It guesses and no more: no text depends on it."""
        if any(not 0 <= tap <= self.layers for tap in weights.taps):
            raise ValueError(f"it taps layers {weights.taps} of a model that has {self.layers}")
        listed = weights.vocabulary
        if not len(listed) or listed.min() < 0 or listed.max() >= self.vocab_size:
            raise ValueError(f"its vocabulary is not part of the model's {self.vocab_size} tokens")
        with self._busy:
            first = self.ops.attach(name, weights)
            self._ranges[name] = first, first + len(weights.layers)
            if weights.follow is not None:
                self._following[first] = name
            swift = self.ops.chains and weights.before is not None
            self.grafts[name] = replace(graft, swift=True) if swift else graft

    def attach_heads(self, name: str, graft: Graft, weights: HeadsWeights) -> None:
        """Takes in trained heads, which have no layers: they start from states that are stored."""
        with self._busy:
            plane = self.ops.attach_heads(name, weights)
            self._ranges[name] = self.layers, self.layers
            self.grafts[name] = replace(graft, plane=plane)

    def adapt(self, mask: torch.Tensor, block: int, layers: Sequence[AdapterWeights]) -> Masking:
        """Takes in an adapter: nodes of blocks with masks go through it, and no other ones do."""
        with self._busy:
            self.ops.adapt(layers)
            token = self.add_rows(mask)
            self.masking = Masking(token, block, shifted=True, causal=True, gated=True)
            with_it = self.fingerprint.encode() + mask.float().numpy().tobytes()
            self.fingerprint = hashlib.sha256(with_it).hexdigest()[:16]
            return self.masking

    # --- the contract -----------------------------------------------------------------------------

    def forward(self, work: Sequence[Work]) -> Pass:
        """One pass over all graphs."""
        if self.ops.remote:
            with self._busy:
                return Pass(self.ops.whole(work) or self._launch(list(work)))
        return Pass(partial(self._forward, list(work)), self._worker)

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies cache entries between slots, all read before any is written."""
        if len(sources):
            self._move(sources, targets)

    def feature(self, table: Table, position: int) -> FloatArray:
        """The stored states at a kept position, one layer behind the other."""
        entry = table.positions.index(position)
        slot = table.pages[entry // self.page_size] * self.page_size + entry % self.page_size
        return self.ops.feature(slot)

    def close(self) -> None:
        """Ends the model's thread; nothing may be asked of it afterwards."""
        self._worker.shutdown()

    # --- the pass ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def _move(self, sources: IntArray, targets: IntArray) -> None:
        self.ops.move(np.asarray(sources), np.asarray(targets))

    def _forward(self, work: list[Work]) -> list[Scores]:
        with self._busy:
            return (self.ops.whole(work) or self._launch(work))()

    @torch.inference_mode()
    def _launch(self, work: list[Work]) -> Callable[[], list[Scores]]:
        parts = [self._part(piece) for piece in work]
        bounds = sorted({edge for part in parts for edge in (part.start, part.stop)})
        for low, high in pairwise(bounds):
            active = [p for p in parts if p.count and p.start <= low and high <= p.stop]
            if active:
                alone = len(active) == sum(part.count > 0 for part in parts)
                self._run_layers(active, low, high, alone)
        wanted = [Wanted(p.proposal, p.wanted, p.state, p.work.first) for p in parts]
        collect = self.ops.score(wanted)

        def scores() -> list[Scores]:
            return [
                replace(found, hidden=part.hidden) if part.hidden else found
                for part, found in zip(parts, collect(), strict=True)
            ]

        return scores

    def _part(self, work: Work) -> _Part:
        proposal = work.proposal
        start, stop = proposal.layers or self._ranges[proposal.graft]
        part = _Part(work, start, stop, proposal.hidden if start else None)
        if start and proposal.hidden is None and not proposal.graft:
            raise ValueError(f"a pass from layer {start} on needs hidden states")
        if proposal.hidden is not None and len(proposal.hidden) != part.count:
            raise ValueError("hidden states need one row for each node to be computed")
        return part

    def _run_layers(self, parts: list[_Part], low: int, high: int, alone: bool) -> None:
        """Takes the parts' states from the entrance of layer `low` to that of layer `high`.

        alone: this is all that is computed before the head.
        """
        ops, spans, row = self.ops, [], 0
        for part in parts:
            work = part.work
            graph, gates = part.proposal.graph, self._gates(part)
            spans.append(Span(graph, work.slots, work.table, work.first, row, gates))
            row += part.count
        batch = ops.begin(spans, ops.windows[low:high])
        following = self._following.get(low, "")

        def layers() -> State:
            if following:
                x = ops.follow(following, batch)
            else:
                x = ops.enter(batch, [part.state for part in parts])
            for layer in range(low, high):
                ops.keep_features(layer, x, batch)
                self._record(parts, spans, layer, x)
                queries = ops.project(layer, x, batch)
                x = ops.output(layer, x, ops.attend(layer, queries, batch), batch)
                x = ops.mlp(layer, x, batch)
            if high == self.config.layers:
                ops.keep_features(high, x, batch)
                ops.digest(batch)
            if following:
                ops.carry(following, x, batch)
            return x

        fresh = all(part.state is None and not part.proposal.wants.hidden for part in parts)
        whole = (
            (low, high)
            if fresh and alone and not following and (low, high) in self._ranges.values()
            else None
        )
        x = ops.run(layers, batch, whole)
        self._record(parts, spans, high, x)
        for part, span in zip(parts, spans, strict=True):
            part.state = ops.leave(x, span.rows)

    def _gates(self, part: _Part) -> BoolArray | None:
        """The nodes of blocks in which a mask stands: they go through the adapter."""
        if self.masking is None or not self.masking.gated or part.proposal.graft:
            return None
        graph = part.proposal.graph
        masks = (graph.tokens == self.masking.token) | (graph.tokens == MIXTURE)
        if not masks.any():
            return None
        return np.isin(graph.blocks, graph.blocks[masks])[part.work.first :]

    def _record(self, parts: list[_Part], spans: list[Span], layer: int, x: State) -> None:
        """Reads out the states that proposals want of those that enter a layer."""
        for part, span in zip(parts, spans, strict=True):
            if layer in part.proposal.wants.hidden:
                part.hidden[layer] = self.ops.read(self.ops.leave(x, span.rows))
