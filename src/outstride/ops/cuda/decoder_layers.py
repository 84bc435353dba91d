"""`DecoderLayers`: the weights of a model, the buffers of a pass, and the kernels of its layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import FloatArray
from outstride.ops.contract import Span
from outstride.ops.cuda.attention import (
    PARTIAL,
    AttentionPartials,
    attend,
    embed_kernel,
    keep_kernel,
)
from outstride.ops.cuda.batch_metadata import AttentionGeometry, BatchMetadata
from outstride.ops.cuda.kv_cache import DeviceKVCache
from outstride.ops.cuda.launch import CudaBatch, PassLauncher
from outstride.ops.cuda.linear import ADDED, GATED, HEADS, linear
from outstride.ops.cuda.lm_head import HiddenRows
from outstride.ops.cuda.matrices import LinearScratch, QkvOutput, round_up
from outstride.ops.cuda.metadata import HEADER_SIZE, ROW_SIZES, RowField
from outstride.ops.cuda.weights import PackedLayer
from outstride.ops.weights import ModelWeights

CUT_AFTER = (1, 9)
"""After which layers a captured pass is cut in two graphs, if the GPU waits for it."""
MAX_ROPE_POSITIONS = 1 << 20


def head_width(head_dim: int) -> int:
    """The padded size of a head."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def geometry_of(model: ModelWeights, device: torch.device) -> AttentionGeometry:
    """How attention is laid out for a model on a device; a CPU interprets few programs."""
    shape, programs = model.shape, 4
    if device.type == "cuda":
        programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    width = head_width(shape.head_dim)
    return AttentionGeometry(
        group=shape.heads // shape.kv_heads,
        kv_heads=shape.kv_heads,
        head_width=width,
        page_size=model.page_size,
        spare_slot=model.slots,
        programs=programs,
        max_partials=PARTIAL // (shape.kv_heads * width),
    )


class DecoderLayers:
    """The layers of a model and of its draft heads, one after the other, on one device."""

    def __init__(
        self,
        model: ModelWeights,
        geometry: AttentionGeometry,
        cache: DeviceKVCache,
        launcher: PassLauncher,
        device: torch.device,
        dtype: torch.dtype,
        *,
        pdl: bool,
    ) -> None:
        """pdl: kernels overlap (programmatic dependent launch)."""
        self.shape = shape = model.shape
        self.width = round_up(shape.hidden_size, 256)
        """Of hidden states, padded."""
        self._geometry, self._cache, self._launcher, self._pdl = geometry, cache, launcher, pdl
        self._device, self._dtype = device, dtype
        self._embedding = model.embedding.to(device, dtype).contiguous()
        self._features = model.features
        self._layers = [
            PackedLayer.pack(layer, shape, geometry.head_width, device, dtype)
            for layer in model.layers
        ]
        inverse = torch.tensor(shape.frequencies, dtype=torch.float64).to(torch.float32)
        positions = torch.arange(min(shape.context, MAX_ROPE_POSITIONS), dtype=torch.float32)
        angles = positions[:, None] * inverse
        scale = torch.where(inverse == 0, 1.0, shape.rope_scale)  # no RoPE, no factor
        self._cos = (angles.cos() * scale).to(device)
        self._sin = (angles.sin() * scale).to(device)
        self._partials = AttentionPartials(device)
        self.reserve(512)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def embedding(self) -> torch.Tensor:
        """[tokens, hidden]; rows may have been added."""
        return self._embedding

    @property
    def max_positions(self) -> int:
        return len(self._cos)

    @property
    def max_rows(self) -> int:
        """The largest pass that there are buffers for."""
        return len(self.x)

    def reserve(self, rows: int) -> None:
        """Makes buffers for passes of this size; CUDA graphs with the old ones are void."""
        shape, heads = self.shape, self.shape.heads * self._geometry.head_width

        def zeros(width: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=dtype, device=self._device)

        self.x = zeros(self.width, torch.float32)
        self.low = zeros(self.width, self._dtype)
        self.queries = zeros(heads, self._dtype)
        self._mixed = zeros(round_up(heads, 128), self._dtype)
        self._inner = zeros(round_up(shape.intermediate_size, 256), self._dtype)
        self._scratch = LinearScratch.make(self._device, rows)

    def append(self, layers: list[PackedLayer]) -> int:
        """Adds the layers of a draft head; returns the number of the first."""
        first = len(self._layers)
        self._layers += layers
        self._cache.grow(len(layers))
        return first

    def add_embedding(self, rows: torch.Tensor) -> None:
        added = rows.to(self._device, self._dtype)
        self._embedding = torch.cat([self._embedding, added]).contiguous()

    # --- a pass -----------------------------------------------------------------------------------

    def _row_words(self, rows: int, field: RowField) -> torch.Tensor:
        """A line [rows] of the row table of the current pass, on the GPU."""
        start = HEADER_SIZE + field * rows
        return self._launcher.words[start : start + rows]

    def embed(
        self,
        batch: CudaBatch,
        hidden: Sequence[HiddenRows | torch.Tensor | FloatArray | None],
        sampled: torch.Tensor,
    ) -> HiddenRows:
        """The hidden states that enter the first layer: given ones, or the embedding of tokens.

        sampled: the tokens of the pass before, for rows that begin with them.
        """
        rows, size = batch.rows, self.shape.hidden_size
        if self._launcher.launching:  # a deferred pass; `hidden` are the states that it will leave
            hidden = [None] * len(hidden)
        given = [self._copied(state) for state in hidden]
        embed_kernel[(rows,)](
            self._row_words(rows, RowField.TOKEN), sampled, self._embedding, self.x, self.low,
            self.width, size, WIDTH=triton.next_power_of_2(size), num_warps=4,
        )  # fmt: skip
        for span, state in zip(batch.spans, given, strict=True):
            if state is None:
                self._embed_mixtures(span)
            else:
                self.x[span.rows, :size] = state
                self.low[span.rows, :size] = state.to(self._dtype)
        return HiddenRows(self.x, self.low, 0, rows, 0)

    def _copied(self, state: HiddenRows | torch.Tensor | FloatArray | None) -> torch.Tensor | None:
        """Hidden states [rows, hidden] in a tensor of their own."""
        if state is None:
            return None
        if isinstance(state, HiddenRows):
            return state.x[state.start : state.stop, : self.shape.hidden_size].clone()
        array = np.ascontiguousarray(state, dtype=np.float32)
        return torch.from_numpy(array).to(self._device)

    def _embed_mixtures(self, span: Span) -> None:
        """Inputs that are mixtures of tokens, summed in the order in which they are given."""
        size = self.shape.hidden_size
        for node, mixture in span.graph.mixtures.items():
            if node >= span.first:
                total = torch.zeros(size, dtype=torch.float32, device=self._device)
                for token, weight in zip(mixture.tokens, mixture.weights, strict=True):
                    total += self._embedding[token].float() * weight
                row = span.row + node - span.first
                self.x[row, :size] = total
                self.low[row, :size] = total.to(self._dtype)

    def qkv_output(self, layer: int, batch: CudaBatch) -> QkvOutput:
        """Where a layer's queries, keys and values go, and what is done to them."""
        shape, weights, rows = self.shape, self._layers[layer], batch.rows
        return QkvOutput(
            positions=self._row_words(rows, RowField.POSITION),
            slots=self._row_words(rows, RowField.SLOT),
            cos=self._cos,
            sin=self._sin,
            keys=self._cache.keys[layer],
            values=self._cache.values[layer],
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            head_width=self._geometry.head_width,
            rope=layer >= shape.layers or shape.rope_layers[layer],
        )

    def project(self, layer: int, x: HiddenRows, batch: CudaBatch) -> torch.Tensor:
        """Queries [rows, heads * head_width]; keys and values go to the cache."""
        linear(
            self._layers[layer].qkv,
            x.low,
            batch.rows,
            HEADS,
            self._scratch,
            low=self.queries,
            norm=self.shape.norm_eps,
            qkv=self.qkv_output(layer, batch),
            pdl=self._pdl,
            summed=x.layer == layer > 0,  # else no product has left these hidden states
        )
        return self.queries

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        metadata: BatchMetadata,
        window: int | None,
        window_number: int,
    ) -> torch.Tensor:
        """What each query gathers from the KV that its node sees [rows, heads * head_width]."""
        shape, words = self.shape, self._launcher.words
        attend(
            queries,
            self._cache.keys[layer],
            self._cache.values[layer],
            self._mixed,
            words[metadata.windows[window_number] :],
            words,
            self._partials,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head=shape.head_dim,
            wide=self._geometry.head_width,
            window=window,
            rows=metadata.tile,
            programs=metadata.programs,
            shared=metadata.paged,
            splits=metadata.splits,
            load=metadata.load,
            page_size=self._geometry.page_size,
            pdl=self._pdl,
        )
        return self._mixed

    def output(
        self, layer: int, x: HiddenRows, mixed: torch.Tensor, batch: CudaBatch
    ) -> HiddenRows:
        """Adds the projection of what attention gathered."""
        rows = batch.rows
        linear(
            self._layers[layer].output,
            mixed,
            rows,
            ADDED,
            self._scratch,
            out=x.x,
            low=x.low,
            pdl=self._pdl,
            prefetch=ROW_SIZES[0] < rows <= ROW_SIZES[-1],  # long attention leaves memory idle
        )
        return x

    def mlp(self, layer: int, x: HiddenRows, batch: CudaBatch) -> HiddenRows:
        """Adds the feed-forward part of the layer."""
        rows, weights, scratch, pdl = batch.rows, self._layers[layer], self._scratch, self._pdl
        norm, inner = self.shape.norm_eps, self._inner
        linear(
            weights.gate_up, x.low, rows, GATED, scratch, low=inner, norm=norm, pdl=pdl, summed=True
        )
        linear(weights.down, inner, rows, ADDED, scratch, out=x.x, low=x.low, pdl=pdl)
        graph = self._launcher.capturing
        if graph is not None and layer in CUT_AFTER and layer + 1 < len(self._layers):
            graph.cut()
        return replace(x, layer=layer + 1)

    def keep_features(self, layer: int, x: HiddenRows, batch: CudaBatch) -> None:
        """Stores the hidden states that enter a layer next to the KV, if they were asked for."""
        if layer in self._features:
            size, at = self.shape.hidden_size, self._features.index(layer)
            rows, features = batch.rows, self._cache.features
            keep_kernel[(rows,)](
                x.x, self._row_words(rows, RowField.SLOT), features[:, at * size :],
                self.width, features.stride(0), size,
                WIDTH=triton.next_power_of_2(size), num_warps=4,
            )  # fmt: skip
