"""Drives a model by hand in tests: page tables, slots and work without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from outstride.core.contracts import PassInput
from outstride.core.graph import FloatArray, TokenGraph, chain
from outstride.core.proposal import Proposal, Scores, Wants
from outstride.core.sequence import BlockTable
from outstride.models.config import DecoderConfig, RopeConfig
from outstride.models.decoder import Decoder
from outstride.models.load import Loaded
from outstride.models.load import load as load_model
from outstride.ops.contract import Ops
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelWeights

PAGE = 16


def tiny(**changes: object) -> DecoderConfig:
    """A small decoder; grouped heads whose size is not the usual share of the state."""
    layers = int(str(changes.get("layers", 2)))
    base = DecoderConfig(
        architecture="llama",
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        layers=layers,
        heads=6,
        kv_heads=2,
        head_dim=16,
        context=512,
        norm_eps=1e-5,
        rope=RopeConfig(),
        rope_layers=(True,) * layers,
        windows=(None,) * layers,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def random_decoder(
    config: DecoderConfig,
    *,
    pages: int = 64,
    features: tuple[int, ...] = (),
    seed: int = 0,
    make_ops: Callable[[ModelWeights], Ops] = Reference,
    rounded: bool = False,
) -> Decoder:
    """A decoder with random weights, large enough that attention and logits are not flat.

    rounded: each row of a matrix is a multiple of its own 127th part, as weights in many files are.
    """
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.shapes().items():
        values = torch.randn(shape, generator=source)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * values
        else:
            tensors[name] = values * (0.5 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)
        if rounded and len(shape) == 2:
            step = tensors[name].abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = (tensors[name] / step).round() * step
    return Decoder.from_tensors(
        config, tensors, pages=pages, page_size=PAGE, features=features, make_ops=make_ops
    )


@dataclass
class Hand:
    """One sequence in a model's cache, moved along by hand."""

    model: Decoder
    pages: list[int]
    positions: list[int] = field(default_factory=list)
    stale: int = 0
    adapter: str = ""

    @property
    def table(self) -> BlockTable:
        positions = list(self.positions)
        ordered = positions == list(range(len(positions)))
        return BlockTable(list(self.pages), positions, stale=self.stale, ordered=ordered)

    def slot(self, entry: int) -> int:
        return self.pages[entry // PAGE] * PAGE + entry % PAGE

    def work(
        self,
        graph: TokenGraph,
        wants: Wants | None = None,
        *,
        given: int = 1,
        first: int = 0,
        gap: int = 0,
        **proposal: object,
    ) -> PassInput:
        """Work for a graph in the slots behind what is kept, `gap` further on."""
        if wants is None:
            wants = Wants(nodes=tuple(range(len(graph))), logits=True)
        start = len(self.positions) - self.stale + gap
        slots = np.asarray([self.slot(start + i) for i in range(len(graph))], dtype=np.int64)
        made = Proposal(graph=graph, given=given, wants=wants, **proposal)  # type: ignore[arg-type]
        return PassInput(made, self.table, slots, first, adapter=self.adapter)

    def run(self, graph: TokenGraph, wants: Wants | None = None, **options: object) -> Scores:
        """One pass over this sequence alone."""
        return self.model.forward([self.work(graph, wants, **options)]).wait()[0]  # type: ignore[arg-type]

    def keep(self, graph: TokenGraph, nodes: Sequence[int], *, gap: int = 0) -> None:
        """Keeps nodes of the last graph, in this order, behind what is kept already."""
        start = len(self.positions) - self.stale
        sources = [self.slot(start + gap + n) for n in nodes]
        targets = [self.slot(start + i) for i in range(len(nodes))]
        self.model.move(np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64))
        self.positions = self.positions[:start] + [int(graph.positions[n]) for n in nodes]
        self.stale = 0

    def read(self, tokens: Sequence[int], chunk: int | None = None) -> FloatArray:
        """Reads tokens behind what is kept, in chunks; returns the logits of all of them."""
        size = chunk or len(tokens)
        parts = []
        for start in range(0, len(tokens), size):
            graph = chain(list(tokens[start : start + size]), len(self.positions))
            parts.append(logits(self.run(graph)))
            self.keep(graph, range(len(graph)))
        return np.concatenate(parts)


def logits(scores: Scores) -> FloatArray:
    """Raw logits that were wanted."""
    assert scores.logits is not None
    return scores.logits


def tokens(count: int, seed: int = 0, vocab: int = 97) -> list[int]:
    """Random tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocab, count)]


def load(name: str, **options: Any) -> Loaded:
    """Loads a model to compute in fp32, as transformers does."""
    return load_model(name, weights="fp32", **options)
