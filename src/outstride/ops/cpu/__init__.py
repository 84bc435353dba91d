"""The CPU backend in native code: int8 or int4 weights, int8 activations and KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch

from outstride.core.contracts import PassInput
from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.core.scoring import select
from outstride.ops.contract import HeadInput, Ops, Span, adapter_rows_of
from outstride.ops.cpu import native
from outstride.ops.cpu.draft_heads import CpuDraftHeads
from outstride.ops.cpu.embedding import PackedEmbedding
from outstride.ops.cpu.float_rows import dense_model
from outstride.ops.cpu.gemm import Gemm
from outstride.ops.cpu.packed_reference import PackedReference
from outstride.ops.cpu.runtime import Runtime
from outstride.ops.cpu.sampler import Sampler
from outstride.ops.cpu.weights import PackedModel
from outstride.ops.cpu.workspace import CpuBatch, as_slice
from outstride.ops.weights import ModelShape, ModelWeights, unusual_layers

__all__ = ["Cpu", "native"]

RUNS = (
    "experts",
    "wide_norms",
    "clip",
    "activation",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "pre_norms",
    "post_norms",
    "sinks",
    "local_rope",
    "query_growth",
    "expert_activation",
)
"""What the kernels run beyond dense Llama layers, as `unusual_layers` names it."""


class Cpu(Ops):
    """Joins the components: runtime (weights, KV cache, threads), embedding, products, sampler,
    draft heads.

    Hidden states are float32 rows [rows, width], where `width` is the padded hidden size.
    """

    draft_heads: CpuDraftHeads

    def __init__(
        self,
        shape: ModelShape,
        weights: PackedModel,
        *,
        slots: int,
        page_size: int,
        features: tuple[int, ...] = (),
        isa: int | None = None,
        count: int | None = None,
    ) -> None:
        """isa: an index of `native.ISAS`; None: the chosen one. count: of threads; None: all cores."""
        self.runtime = runtime = Runtime(
            shape,
            weights,
            slots=slots,
            page_size=page_size,
            features=features,
            isa=isa,
            count=count,
        )
        self._size = shape.hidden_size
        stored = (
            "int8 x 8 bit" if weights.bits == 8 else "int4 x 8 bit in groups (head int8 x 8 bit)"
        )
        self.weights = f"int{weights.bits}"
        self.name = f"cpu {native.ISAS[runtime.isa]} {stored}, cache int8"
        self.windows = runtime.windows
        self.embedding = PackedEmbedding(runtime)
        self.gemm = Gemm(runtime)
        self.sampler = Sampler(runtime, self.gemm)
        self.draft_heads = CpuDraftHeads(self.name, runtime, self.gemm, self.embedding)

    @classmethod
    def of(
        cls, model: ModelWeights, isa: int | None = None, count: int | None = None, bits: int = 8
    ) -> Self:
        """From float32 weights, which are packed and dropped one by one."""
        return cls(
            model.shape,
            PackedModel.pack(model.shape, dense_model(model), bits),
            slots=model.slots,
            page_size=model.page_size,
            features=model.features,
            isa=isa,
            count=count,
        )

    device = "cpu"

    @classmethod
    def supports(cls, shape: ModelShape) -> str | None:
        native.chosen_isa()  # a wrong OUTSTRIDE_ISA is an error before anything is loaded
        if shape.switches.recurrent is not None:
            return PackedReference.supports(shape)
        if what := unusual_layers(shape, runs=RUNS):
            return f"the native CPU kernels cannot run {what} yet"
        if not native.library().outstride_record(shape.head_dim):
            return f"the native CPU kernels cannot run heads of {shape.head_dim} dimensions"
        return None

    @classmethod
    def kv_bytes_per_token(cls, shape: ModelShape) -> int:
        if shape.switches.recurrent is not None:
            return PackedReference.kv_bytes_per_token(shape)
        per_block: int = native.library().outstride_record(shape.head_dim)  # of 16 keys or values
        return -(-2 * shape.layers * shape.kv_heads * per_block // 16)

    # --- the pass ---------------------------------------------------------------------------------

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> CpuBatch:
        runtime, rows = self.runtime, spans[-1].rows.stop
        runtime.reserve(rows)
        space = runtime.space
        space.fill(spans, rows, adapter_rows_of(spans))
        runtime.reserve_positions(max(space.layout.positions[:rows].tolist()))
        slots = space.layout.slots[:rows].copy()
        return CpuBatch(spans, rows, slots, as_slice(slots))

    def initial_hidden(self, batch: CpuBatch, hidden: Sequence[FloatArray | None]) -> FloatArray:
        x, spans = self.runtime.space.x, batch.spans
        if not any(part is not None for part in hidden) and not any(
            span.graph.mixtures for span in spans
        ):
            tokens = [span.graph.tokens[span.first :] for span in spans]
            return self.embedding.rows(tokens[0] if len(tokens) == 1 else np.concatenate(tokens), x)
        for span, part in zip(spans, hidden, strict=True):
            if part is None:
                x[span.rows] = self.embedding.of_span(span)
            else:
                x[span.rows, : part.shape[1]] = part
        return x

    def run(
        self, layers: Callable[[], FloatArray], batch: CpuBatch, whole: tuple[int, int] | None
    ) -> FloatArray:
        """A whole pass is one native call between two layers whose hidden states are stored."""
        if whole is None:
            return layers()
        runtime = self.runtime
        x, (start, end) = self.initial_hidden(batch, [None] * len(batch.spans)), whole
        of_model = start == 0
        for stop in sorted({*runtime.stored_layers, end}) if of_model else (end,):
            if stop > start:
                runtime.lib.outstride_layers(runtime.engine, runtime.calls[start], stop - start)
            if of_model:
                self.keep_features(stop, x, batch)
            start = stop
        if end == runtime.shape.layers:
            self.draft_heads.write_kv(batch)
        return x

    def project(self, layer: int, x: FloatArray, batch: CpuBatch) -> None:
        if layer not in self.draft_heads.eagle_layers:  # `eagle_input` has done it there
            self.runtime.lib.outstride_project(self.runtime.engine, self.runtime.calls[layer])

    def attend(self, layer: int, queries: None, batch: CpuBatch) -> None:
        self.runtime.lib.outstride_attend(self.runtime.engine, self.runtime.calls[layer])

    def output(self, layer: int, x: FloatArray, attended: None, batch: CpuBatch) -> FloatArray:
        self.runtime.lib.outstride_output(self.runtime.engine, self.runtime.calls[layer])
        return x

    def mlp(self, layer: int, x: FloatArray, batch: CpuBatch) -> FloatArray:
        self.runtime.lib.outstride_mlp(self.runtime.engine, self.runtime.calls[layer])
        return x

    def keep_features(self, layer: int, x: FloatArray, batch: CpuBatch) -> None:
        runtime = self.runtime
        if layer in runtime.stored_layers:
            low, high = runtime.feature_range(layer)
            runtime.features[batch.slot_index, low:high] = x[:, : self._size]

    def hidden_of(self, x: FloatArray, rows: slice) -> FloatArray:
        return x[rows]

    def to_array(self, hidden: FloatArray) -> FloatArray:
        return hidden[:, : self._size].copy()

    def score(self, wanted: Sequence[HeadInput]) -> Callable[[], list[Scores]]:
        results: list[list[Scores]] = [
            [self.draft_heads.candidates(item)] if item.proposal.draft_head else []
            for item in wanted
        ]
        self.sampler.score(wanted, results)
        nothing = np.zeros((0, self.runtime.shape.vocab_size), dtype=np.float32)
        joined = [
            found[0]  # the usual case
            if len(found) == 1
            else Scores.joined(found or [select(item.proposal, item.nodes, nothing)])
            for item, found in zip(wanted, results, strict=True)
        ]
        return lambda: joined

    def scores_ahead(self, work: Sequence[PassInput]) -> Callable[[], list[Scores]] | None:
        return self.draft_heads.scores_ahead(work)

    # --- what lasts longer than a pass ------------------------------------------------------------

    def move(self, sources: IntArray, targets: IntArray) -> None:
        self.runtime.move(sources, targets)
        self.draft_heads.move(sources, targets)

    def feature(self, slot: int) -> FloatArray:
        return np.array(self.runtime.features[slot], dtype=np.float32)

    def add_rows(self, rows: torch.Tensor) -> int:
        return self.embedding.add_rows(rows)
