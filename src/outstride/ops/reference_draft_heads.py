"""Draft heads in the reference backend: it runs all kinds, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.ops.arithmetic import linear, pad, ranked, rms_norm
from outstride.ops.contract import DraftHeadOps, HeadInput, HeadPlacement, PackedHead, Span
from outstride.ops.eagle_layer import previous_slots
from outstride.ops.medusa_heads import PackedMedusa
from outstride.ops.reference_memory import zeros
from outstride.ops.weights import (
    SKIP_FIRST,
    AdapterWeights,
    BlockDrafterWeights,
    DraftHeadWeights,
    EagleWeights,
    MedusaWeights,
)

if TYPE_CHECKING:
    from outstride.ops.reference import Reference
    from outstride.ops.reference_batch import ReferenceBatch


class ReferenceGemm:
    """Products of numpy rows with torch matrices, for Medusa heads."""

    def times(self, x: FloatArray, matrix: torch.Tensor) -> FloatArray:
        found: FloatArray = linear(pad(torch.from_numpy(x)), matrix)[: len(x)].numpy()
        return found

    def highest(
        self, x: FloatArray, matrix: torch.Tensor, count: int
    ) -> tuple[IntArray, FloatArray]:
        results = torch.from_numpy(self.times(x, matrix))
        places = ranked(results, count)
        return places.numpy(), results.gather(1, places).numpy()


@dataclass(frozen=True, slots=True)
class _AttachedBlock:
    weights: BlockDrafterWeights
    first: int
    """The number of its first layer."""
    lm_head: torch.Tensor


@dataclass(frozen=True, slots=True)
class _AttachedEagle:
    weights: EagleWeights
    first: int
    lm_head: torch.Tensor
    hidden: torch.Tensor
    """[slots, hidden]: what the node after each slot reads."""


class ReferenceDraftHeads(DraftHeadOps):
    """Draft heads by name, on the layers and the cache of a reference backend."""

    def __init__(self, backend: Reference) -> None:
        super().__init__(backend.name)
        self._backend = backend
        self._blocks: dict[str, _AttachedBlock] = {}
        self._eagles: dict[str, _AttachedEagle] = {}
        self._medusas: dict[str, PackedMedusa[torch.Tensor]] = {}
        self._gemm = ReferenceGemm()

    def unsupported_draft_head(self, weights: DraftHeadWeights) -> str | None:
        switches = self._backend.shape.switches
        if switches.latent is None and switches.full_attention is None:
            return None
        return "its layers would need the heads of a model with latent attention or two head sizes"

    def attach(self, name: str, packed: PackedHead) -> HeadPlacement:
        weights: DraftHeadWeights = packed
        backend, cache = self._backend, self._backend.cache
        if isinstance(weights, MedusaWeights):
            cache.store_layers((weights.layer,))
            shared = backend.lm_head[torch.from_numpy(weights.vocabulary)]
            self._medusas[name] = PackedMedusa.pack(
                weights, backend.shape.norm_eps, lambda matrix: matrix, shared
            )
            layers = backend.shape.layers
            return HeadPlacement((layers, layers), cache.feature_range(weights.layer))
        cache.store_layers(weights.aux_layers)
        lm_head = self._lm_head(weights)
        if isinstance(weights, EagleWeights):
            first = backend.add_layers([weights.layer], SKIP_FIRST, weights.rope)
            hidden = zeros(cache.slots, backend.shape.hidden_size)
            self._eagles[name] = _AttachedEagle(weights, first, lm_head, hidden)
            return HeadPlacement((first, first + 1))
        first = backend.add_layers(weights.layers, weights.window, weights.rope)
        self._blocks[name] = _AttachedBlock(weights, first, lm_head)
        return HeadPlacement((first, first + len(weights.layers)))

    def _lm_head(self, weights: BlockDrafterWeights | EagleWeights) -> torch.Tensor:
        """[tokens, hidden]: the draft head's own, or rows of the model's."""
        if weights.lm_head is not None:
            return weights.lm_head
        if len(weights.vocabulary) == self._backend.shape.vocab_size:
            return self._backend.lm_head
        return self._backend.lm_head[torch.from_numpy(weights.vocabulary)]

    def _attach_adapter(self, layers: Sequence[AdapterWeights]) -> int:
        adapters = self._backend.adapters
        number = next(n for n in range(1, len(adapters) + 2) if n not in adapters)
        adapters[number] = layers
        return number

    def detach_adapter(self, number: int) -> None:
        del self._backend.adapters[number]

    def final_norm(self) -> torch.Tensor:
        return self._backend.norm

    def write_kv(self, batch: ReferenceBatch) -> None:
        backend, slots = self._backend, batch.slots
        eps = backend.shape.norm_eps
        for block in self._blocks.values():
            weights = block.weights
            x = pad(backend.cache.features_of(weights.aux_layers, slots))
            x = linear(rms_norm(x, weights.aux_norm, eps), weights.fusion)
            for i, layer in enumerate(weights.layers):
                for_kv = replace(layer, attention_norm=weights.fusion_norm)
                backend.project_with(block.first + i, for_kv, x, batch)
        for name, eagle in self._eagles.items():
            own = eagle.weights
            x = pad(backend.cache.features_of(own.aux_layers, slots))
            if own.aux_norm is not None:
                x = rms_norm(x, own.aux_norm, eps)
            if own.fusion is not None:
                x = linear(x, own.fusion)
            eagle.hidden.index_copy_(0, slots, x[: len(slots)])
            x = self.eagle_input(name, batch)
            backend.project_with(eagle.first, own.layer, x, batch)

    def eagle_input(self, name: str, batch: ReferenceBatch) -> torch.Tensor:
        eagle, eps = self._eagles[name], self._backend.shape.norm_eps
        weights = eagle.weights
        slots = torch.from_numpy(previous_slots(batch.spans, self._backend.page_size))
        x = pad(eagle.hidden[slots.clamp(min=0)] * (slots >= 0)[:, None])
        tokens = pad(torch.cat([self._embed(span, weights) for span in batch.spans]))
        if weights.input_projection is not None:
            both = torch.cat([tokens, x], dim=1)
            x = linear(both, weights.input_projection, weights.input_bias)
        if weights.hidden_norm is not None:
            x = rms_norm(x, weights.hidden_norm, eps)
        if weights.embedding_norm is not None:
            batch.embeddings = rms_norm(tokens, weights.embedding_norm, eps)
        return x

    def _embed(self, span: Span, weights: EagleWeights) -> torch.Tensor:
        """[computed nodes, hidden]: the embeddings that an EAGLE head reads."""
        if weights.embedding is None:
            return self._backend.embedding.of_span(span)
        tokens = span.graph.tokens[span.first :]
        known = np.where(tokens < len(weights.embedding), np.maximum(tokens, 0), 0)
        return weights.embedding[torch.from_numpy(known)]

    def keep_hidden(self, name: str, x: torch.Tensor, batch: ReferenceBatch) -> None:
        eagle = self._eagles[name]
        if eagle.weights.feeds_back_normed and eagle.weights.norm is not None:
            x = rms_norm(x, eagle.weights.norm, self._backend.shape.norm_eps)
        eagle.hidden.index_copy_(0, batch.slots, x[: len(batch.slots)])

    def candidates(self, item: HeadInput) -> Scores:
        """The top-k tokens of each wanted node, and their logits."""
        name = item.proposal.draft_head
        if name in self._medusas:
            return self._medusas[name].candidates(item, self._gemm, self._embedding_rows)
        head = self._blocks.get(name) or self._eagles[name]
        weights = head.weights
        x = item.hidden[torch.from_numpy(item.nodes - item.first)]
        normed = pad(x)
        if weights.norm is not None:
            normed = rms_norm(normed, weights.norm, self._backend.shape.norm_eps)
        logits = linear(normed, head.lm_head)[: len(x)]
        places = ranked(logits, min(item.proposal.wants.best, len(weights.vocabulary)))
        values = logits.gather(1, places).numpy()
        return Scores(item.nodes, weights.vocabulary[places.numpy()], values=values)

    def _embedding_rows(self, tokens: IntArray) -> FloatArray:
        return np.array(self._backend.embedding.rows(tokens).numpy(), dtype=np.float32)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies what EAGLE heads keep from slots to slots."""
        for eagle in self._eagles.values():
            eagle.hidden.index_copy_(0, targets, eagle.hidden.index_select(0, sources))
