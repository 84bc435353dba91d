"""`Cuda`: the operations of a pass on one NVIDIA GPU.

Weights and KV cache are bf16 (fp16 on GPUs without it), sums are float32, and so is the residual
stream; products read a copy of it in the format of the weights. Rows are padded to a few sizes; for
each of them the layers are captured once as a CUDA graph and replayed. What changes from pass to pass
is in one buffer, the metadata, which a replay begins by fetching from the host's memory.

A whole pass is launched when its scores are asked for: layers, LM head and sampling are one graph, and
one token a row comes back. The pass that will follow is launched with it, where it can be known (see
`run_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]

from outstride.core.contracts import PassInput
from outstride.core.graph import FloatArray, IntArray
from outstride.core.proposal import Scores
from outstride.ops.contract import HeadInput, Ops, Span
from outstride.ops.cuda.decoder_layers import DecoderLayers, geometry_of
from outstride.ops.cuda.draft_head_ops import CudaDraftHeads
from outstride.ops.cuda.kv_cache import DeviceKVCache
from outstride.ops.cuda.launch import CudaBatch, DeferredPass, PassLauncher
from outstride.ops.cuda.lm_head import DeviceLMHead, HiddenRows, padded
from outstride.ops.cuda.matrices import PackedMatrix
from outstride.ops.cuda.metadata_builder import MetadataBuilder
from outstride.ops.cuda.run_ahead.controller import RunAhead
from outstride.ops.cuda.run_ahead.decode_steps import STAGING_PAGES
from outstride.ops.cuda.scoring import PassScorer
from outstride.ops.weights import ModelShape, ModelWeights, unusual_layers


class Cuda(Ops):
    """Weights, KV cache and passes on a GPU; with device "cpu" under Triton's interpreter."""

    asynchronous = True
    device_chains = True
    device = "cuda"
    weights = "bf16"
    windows: tuple[int | None, ...]
    draft_heads: CudaDraftHeads

    @classmethod
    def supports(cls, shape: ModelShape) -> str | None:
        what = unusual_layers(shape)
        return f"the CUDA kernels cannot run {what} yet" if what else None

    @classmethod
    def kv_bytes_per_token(cls, shape: ModelShape) -> int:
        padded_dim: int = max(16, triton.next_power_of_2(shape.head_dim))
        return 2 * 2 * shape.layers * shape.kv_heads * padded_dim

    @classmethod
    def free_memory(cls) -> int:
        return torch.cuda.mem_get_info()[0]

    def __init__(
        self,
        model: ModelWeights,
        *,
        device: str = "cuda",
        graphs: bool = True,
        pdl: bool | None = None,
    ) -> None:
        """graphs: whether passes are captured (a GPU must be there). pdl: whether kernels overlap."""
        shape, where = model.shape, torch.device(device)
        self.torch_device, on_gpu = where, where.type == "cuda"
        bf16 = on_gpu and torch.cuda.is_bf16_supported()
        self.dtype = dtype = torch.bfloat16 if bf16 else torch.float16
        if pdl is None:
            pdl = on_gpu and torch.cuda.get_device_capability(where)[0] >= 9
        self.pdl, self.windows = pdl, tuple(shape.windows)
        self.geometry = geometry = geometry_of(model, where)
        self._build_metadata = MetadataBuilder(geometry)
        self._cache = DeviceKVCache(
            shape.layers,
            model.slots + (1 + STAGING_PAGES) * model.page_size,
            shape.kv_heads,
            geometry.head_width,
            len(model.features) * shape.hidden_size,
            where,
            dtype,
        )
        self._launcher = PassLauncher(where, self._cache, self._build_metadata, graphs=graphs)
        layers = DecoderLayers(model, geometry, self._cache, self._launcher, where, dtype, pdl=pdl)
        self.layers, self._added_rows = layers, 0
        lm_head = model.embedding if model.head is None else model.head
        self.lm_head_weight = layers.embedding if model.head is None else lm_head.to(dtype)
        matrix = PackedMatrix.pack(lm_head, None, model.norm, where, dtype)
        head = DeviceLMHead(
            matrix, shape.norm_eps, shape.vocab_size, layers.width, where, dtype, pdl
        )
        self._run_ahead = RunAhead(
            self._launcher, self._cache, geometry, head, shape.windows, layers.max_positions
        )
        self._deferred: DeferredPass | None = None
        kind = torch.cuda.get_device_name(where) if on_gpu else "interpreted"
        format_ = "bf16" if bf16 else "fp16"
        self.name = f"cuda {format_} triton {triton.__version__} {kind}"
        self.draft_heads = CudaDraftHeads(self, shape)
        self._scorer = PassScorer(head, self.draft_heads.attached, self._launcher, self._run_ahead)

    def reset(self) -> None:
        """Buffers or weights have changed: what was captured or is under way holds no longer."""
        self._launcher.clear()
        self._run_ahead.reset()

    # --- a pass -----------------------------------------------------------------------------------

    def scores_ahead(self, work: Sequence[PassInput]) -> Callable[[], list[Scores]] | None:
        """The scores of a pass that is under way already; launches what follows it."""
        return self._run_ahead.match(work)

    def begin(self, spans: Sequence[Span], windows: Sequence[int | None]) -> CudaBatch:
        self._deferred = None
        self._run_ahead.cancel()
        rows = padded(spans[-1].rows.stop)
        if rows > self.layers.max_rows:
            size = triton.next_power_of_2(rows)
            self.layers.reserve(size)
            for draft_head in self.draft_heads.attached.values():
                draft_head.reserve(size)
            self.reset()
        mixtures = any(span.graph.mixtures for span in spans)
        return CudaBatch(spans, tuple(dict.fromkeys(windows)), rows, mixtures)

    def initial_hidden(
        self, batch: CudaBatch, states: Sequence[HiddenRows | torch.Tensor | FloatArray | None]
    ) -> HiddenRows:
        return self.layers.embed(batch, states, self._scorer.head.sampled)

    def project(self, layer: int, x: HiddenRows, batch: CudaBatch) -> torch.Tensor:
        return self.layers.project(layer, x, batch)

    def attend(self, layer: int, queries: torch.Tensor, batch: CudaBatch) -> torch.Tensor:
        window = self.windows[layer]
        number = batch.windows.index(window)
        return self.layers.attend(layer, queries, self._launcher.metadata_of(batch), window, number)

    def output(
        self, layer: int, x: HiddenRows, mixed: torch.Tensor, batch: CudaBatch
    ) -> HiddenRows:
        return self.layers.output(layer, x, mixed, batch)

    def mlp(self, layer: int, x: HiddenRows, batch: CudaBatch) -> HiddenRows:
        return self.layers.mlp(layer, x, batch)

    def keep_features(self, layer: int, x: HiddenRows, batch: CudaBatch) -> None:
        for draft_head in self.draft_heads.attached.values():
            draft_head.keep_aux(layer, x.x, batch.rows, self.layers.shape.hidden_size)
        self.layers.keep_features(layer, x, batch)

    def run(
        self, layers: Callable[[], HiddenRows], batch: CudaBatch, whole: tuple[int, int] | None
    ) -> HiddenRows:
        """Runs the layers. A whole pass is only noted here: `score` launches it with its LM head."""
        if whole is not None and not batch.mixtures:
            self._deferred = DeferredPass(layers, batch, whole)
            return HiddenRows(self.layers.x, self.layers.low, 0, batch.rows, whole[1])
        self._cache.flush()
        metadata = self._launcher.metadata_of(batch)  # may replace the ring
        self._launcher.ring.send(metadata.words)
        return layers()

    def hidden_of(self, x: HiddenRows, rows: slice) -> HiddenRows:
        if self._deferred is not None:  # the LM head finds them in the buffer
            return HiddenRows(x.x, x.low, rows.start, rows.stop, x.layer)
        some = slice(rows.start, rows.stop)
        return HiddenRows(
            x.x[some].clone(), x.low[some].clone(), 0, rows.stop - rows.start, x.layer
        )

    def to_array(self, state: HiddenRows) -> FloatArray:
        found = state.x[state.start : state.stop, : self.layers.shape.hidden_size]
        return np.array(found.cpu().numpy(), dtype=np.float32)

    def score(self, wanted: Sequence[HeadInput]) -> Callable[[], list[Scores]]:
        """Launches the deferred pass with its LM head, or the LM head alone."""
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return self._scorer.score_computed(wanted, self.layers.low)
        metadata = self._launcher.metadata_of(deferred.batch)
        return self._scorer.score_deferred(deferred, metadata, wanted, self.layers.low)

    # --- what lasts longer than a pass ------------------------------------------------------------

    def move(self, sources: IntArray, targets: IntArray) -> None:
        self._run_ahead.cancel()
        self._cache.move(sources, targets)

    def feature(self, slot: int) -> FloatArray:
        self._cache.flush()
        return np.array(self._cache.features[slot].cpu().numpy(), dtype=np.float32)

    def add_rows(self, rows: torch.Tensor) -> int:
        before = self._added_rows
        self.layers.add_embedding(rows)
        self._added_rows += len(rows)
        self.reset()
        return before
