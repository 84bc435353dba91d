"""Draft heads of the CPU backend: their KV, their passes, and the candidates that they draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from outstride.core.contracts import PassInput
from outstride.core.graph import FloatArray, IntArray
from outstride.core.host_library import address
from outstride.core.proposal import Scores
from outstride.ops.contract import DraftHeadOps, HeadInput, HeadPlacement, PackedHead, Span
from outstride.ops.cpu import native
from outstride.ops.cpu.draft_head_weights import PackedBlockDrafter, too_wide
from outstride.ops.cpu.eagle_layer import PackedEagle
from outstride.ops.cpu.embedding import PackedEmbedding
from outstride.ops.cpu.gemm import Gemm
from outstride.ops.cpu.int8 import Int8Matrix, rounded
from outstride.ops.cpu.runtime import Runtime
from outstride.ops.cpu.sampler import hidden_rows
from outstride.ops.cpu.workspace import CpuBatch
from outstride.ops.eagle_layer import previous_slots
from outstride.ops.medusa_heads import PackedMedusa
from outstride.ops.weights import (
    AdapterWeights,
    BlockDrafterWeights,
    DraftHeadWeights,
    EagleWeights,
    MedusaWeights,
)

FP32 = "load the model with --weights fp32"


class CpuDraftHeads(DraftHeadOps):
    """Draft heads by name, on the runtime of a model."""

    def __init__(self, name: str, runtime: Runtime, gemm: Gemm, embedding: PackedEmbedding) -> None:
        super().__init__(name)
        self._runtime, self._gemm, self._embedding = runtime, gemm, embedding
        self._blocks: dict[str, PackedBlockDrafter] = {}
        self._eagles: dict[str, PackedEagle] = {}
        self._medusas: dict[str, PackedMedusa[Int8Matrix]] = {}
        self.eagle_layers: dict[int, str] = {}
        """EAGLE heads by the number of their layer; `eagle_input` has projected its QKV already."""

    def unsupported_draft_head(self, weights: DraftHeadWeights) -> str | None:
        if isinstance(weights, MedusaWeights):
            return None
        layers = [weights.layer] if isinstance(weights, EagleWeights) else weights.layers
        for layer in layers:
            if reason := too_wide(layer, self._runtime.shape):
                return f"{reason}; {FP32}"
        if isinstance(weights, BlockDrafterWeights) and weights.rope is not None:
            return f"its RoPE frequencies are not the model's; {FP32}"
        return None

    def _pack(self, weights: DraftHeadWeights) -> PackedHead:
        if isinstance(weights, BlockDrafterWeights):
            return PackedBlockDrafter.pack(weights, self._runtime)
        return weights

    def attach(self, name: str, packed: PackedHead) -> HeadPlacement:
        if isinstance(packed, MedusaWeights):
            return self._attach_medusa(name, packed)
        if isinstance(packed, EagleWeights):
            eagle = PackedEagle.attach(packed, self._runtime, self._gemm, self._embedding)
            self._eagles[name] = eagle
            extra = eagle.extra
            self.eagle_layers[extra.first] = name
        else:
            packed.attach(self._runtime)
            self._blocks[name] = packed
            extra = packed.extra
        return HeadPlacement((extra.first, extra.first + len(extra.layers)))

    def _attach_medusa(self, name: str, weights: MedusaWeights) -> HeadPlacement:
        runtime, deepest = self._runtime, 0

        def packed(matrix: torch.Tensor) -> Int8Matrix:
            nonlocal deepest
            depth = rounded(matrix.shape[1], 32)
            deepest = max(deepest, depth)
            return Int8Matrix.of(matrix.numpy(), None, depth)

        rows = runtime.weights.vocabulary.rows(weights.vocabulary, runtime.shape.hidden_size)
        shared = Int8Matrix.of(rows, None, runtime.width)
        self._medusas[name] = PackedMedusa.pack(weights, runtime.shape.norm_eps, packed, shared)
        runtime.store_layers((weights.layer,))
        runtime.reserve_depth(deepest)
        layers = runtime.shape.layers
        return HeadPlacement((layers, layers), runtime.feature_range(weights.layer))

    def _attach_adapter(self, layers: Sequence[AdapterWeights]) -> int:
        return self._runtime.attach_adapter(layers)

    def detach_adapter(self, number: int) -> None:
        self._runtime.detach_adapter(number)

    def final_norm(self) -> torch.Tensor:
        size = self._runtime.shape.hidden_size
        return torch.from_numpy(self._runtime.weights.norm[:size].copy())

    # --- in a pass --------------------------------------------------------------------------------

    def scores_ahead(self, work: Sequence[PassInput]) -> Callable[[], list[Scores]] | None:
        """A block drafter's pass for one sequence, by one native call: most drafts need it."""
        item, proposal, runtime = work[0], work[0].proposal, self._runtime
        block, graph = self._blocks.get(proposal.draft_head), proposal.graph
        if block is None or len(work) > 1 or item.first or proposal.hidden is not None:
            return None
        rows = len(graph.tokens)
        if (
            proposal.wants.hidden
            or graph.mixtures
            or rows > runtime.space.rows
            or max(graph.positions.tolist()) >= len(runtime.cos)
        ):
            return None
        runtime.space.fill([Span(graph, item.slots, item.table, 0, 0, None)], rows, None)
        x = self._embedding.rows(graph.tokens, runtime.space.x)
        extra = block.extra
        runtime.lib.outstride_layers(runtime.engine, runtime.calls[extra.first], len(extra.layers))
        scores = self.candidates(HeadInput(proposal, proposal.wanted, x, 0))
        return lambda: [scores]

    def write_kv(self, batch: CpuBatch) -> None:
        for block in self._blocks.values():
            self._write_block_kv(block, batch)
        for eagle in self._eagles.values():
            features = self._runtime.features_of(eagle.weights.aux_layers, batch.slots)
            eagle.fuse(features, batch.slots)
            self._project_eagle(eagle, batch)

    def _write_block_kv(self, block: PackedBlockDrafter, batch: CpuBatch) -> None:
        runtime = self._runtime
        size, struct = runtime.shape.hidden_size, runtime.space.struct
        wide = len(block.aux_layers) * size
        if block.aux_layers == runtime.stored_layers and runtime.features.shape[1] == block.depth:
            features = runtime.features[batch.slot_index]
        else:
            features = np.zeros((batch.rows, block.depth), dtype=np.float32)
            features[:, :wide] = runtime.features_of(block.aux_layers, batch.slot_index)
        x = self._gemm.normed_times(features, block.aux_norm, block.fusion, wide)
        if not x.shape[1] == size == runtime.width:
            fused, x = x, np.zeros((batch.rows, runtime.width), dtype=np.float32)
            x[:, :size] = fused[:, :size]
        held, struct.x = struct.x, address(x)
        for call in block.extra.kv_calls:
            runtime.lib.outstride_project(runtime.engine, call)
        struct.x = held

    def eagle_input(self, name: str, batch: CpuBatch) -> FloatArray:
        x = self._runtime.space.x
        x[:, : self._runtime.shape.hidden_size] = self._project_eagle(self._eagles[name], batch)
        return x

    def _project_eagle(self, eagle: PackedEagle, batch: CpuBatch) -> FloatArray:
        """[rows, hidden]: the layer's input. Its queries, keys and values are in place then."""
        runtime = self._runtime
        tokens = np.concatenate([s.graph.tokens[s.first :] for s in batch.spans])
        positions = np.concatenate([s.graph.positions[s.first :] for s in batch.spans])
        x, embedded = eagle.enter(tokens, previous_slots(batch.spans, runtime.page_size))
        queries, *kv = eagle.project(x, embedded, positions)
        keys, values = (np.ascontiguousarray(one, dtype=np.float32) for one in kv)
        call = runtime.calls[eagle.extra.first]
        slots = np.ascontiguousarray(batch.slots, dtype=np.int64)
        runtime.lib.outstride_keep(call, address(slots), batch.rows, address(keys), address(values))
        queries = queries.reshape(batch.rows, -1)
        runtime.space.queries[: batch.rows, : queries.shape[1]] = queries
        return x

    def keep_hidden(self, name: str, x: FloatArray, batch: CpuBatch) -> None:
        self._eagles[name].keep_hidden(x[:, : self._runtime.shape.hidden_size], batch.slots)

    def candidates(self, item: HeadInput) -> Scores:
        """The top-k tokens of each wanted node, and their logits."""
        name = item.proposal.draft_head
        if name in self._medusas:
            embed = self._embedding.narrow_rows
            return self._medusas[name].candidates(item, self._gemm, embed)
        size, x = self._runtime.shape.hidden_size, hidden_rows(item, item.nodes)
        k = min(item.proposal.wants.best, native.MAX_FUSED)
        if name in self._eagles:
            best, values = self._eagles[name].candidates(x[:, :size], k)
            return Scores(item.nodes, best, values=values)
        block = self._blocks[name]
        found, values = self._gemm.normed_highest(x, block.norm, block.lm_head, size, k)
        return Scores(item.nodes, block.vocabulary[found], values=values)

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Copies what EAGLE heads keep between slots."""
        for eagle in self._eagles.values():
            eagle.hidden[targets] = eagle.hidden[sources]
