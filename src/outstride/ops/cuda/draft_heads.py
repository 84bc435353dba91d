"""Draft heads on a GPU: their KV is made at the end of a pass, candidates in a pass of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outstride.ops.cuda.chain import ChainFinder
from outstride.ops.cuda.linear import FLOATS, HEADS, linear
from outstride.ops.cuda.lm_head import DeviceLMHead
from outstride.ops.cuda.matrices import LinearScratch, PackedMatrix, QkvOutput, round_up
from outstride.ops.cuda.weights import PackedLayer
from outstride.ops.weights import BlockDrafterWeights, ModelShape


@dataclass(slots=True)
class CudaDraftHead:
    """One draft head: its layers, numbered after the model's, and what makes their KV.

    KV comes from the model's hidden states, fused to one state per token.
    """

    first_layer: int
    aux_layers: tuple[int, ...]
    """The layers whose input it reads."""
    layers: list[PackedLayer]
    kv_matrices: list[PackedMatrix]
    """Queries, keys and values of each layer, with the norm of the fused states folded in."""
    fusion: PackedMatrix
    head: DeviceLMHead
    aux_hidden: torch.Tensor
    """The inputs of its auxiliary layers in this pass, side by side: [rows, layers * hidden]."""
    fused: torch.Tensor
    """[rows, width] in float32, and in the format of the weights."""
    low: torch.Tensor
    scratch: LinearScratch

    @classmethod
    def pack(
        cls,
        weights: BlockDrafterWeights,
        shape: ModelShape,
        vocabulary: torch.Tensor,
        *,
        first_layer: int,
        head_width: int,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        pdl: bool,
    ) -> CudaDraftHead:
        """Takes a draft head over; `vocabulary` is the matrix of the model's LM head."""

        def layer(one: Any) -> PackedLayer:
            return PackedLayer.pack(one, shape, head_width, device, dtype)

        def zeros(count: int, width: int, kind: torch.dtype) -> torch.Tensor:
            return torch.zeros(count, width, dtype=kind, device=device)

        fusion = PackedMatrix.pack(weights.fusion, None, weights.aux_norm, device, dtype)
        listed = vocabulary[torch.from_numpy(weights.vocabulary).to(vocabulary.device)]
        width = round_up(shape.hidden_size, 256)
        chain = None
        if weights.bigram is not None:
            tables = weights.vocabulary, weights.bigram.left, weights.bigram.right
            chain = ChainFinder(*tables, shape.vocab_size, device)
        head = DeviceLMHead(
            PackedMatrix.pack(listed, None, weights.norm, device, dtype),
            shape.norm_eps,
            len(weights.vocabulary),
            width,
            device,
            dtype,
            pdl,
            weights.vocabulary,
            chain,
        )
        return cls(
            first_layer=first_layer,
            aux_layers=weights.aux_layers,
            layers=[layer(one) for one in weights.layers],
            kv_matrices=[
                layer(replace(one, attention_norm=weights.fusion_norm)).qkv
                for one in weights.layers
            ],
            fusion=fusion,
            head=head,
            aux_hidden=zeros(rows, fusion.weight.shape[1], dtype),
            fused=zeros(rows, width, torch.float32),
            low=zeros(rows, width, dtype),
            scratch=LinearScratch.make(device, rows),
        )

    def reserve(self, rows: int) -> None:
        """Makes buffers for passes of this size."""
        self.aux_hidden = self.aux_hidden.new_zeros(rows, self.aux_hidden.shape[1])
        self.fused = self.fused.new_zeros(rows, self.fused.shape[1])
        self.low = self.low.new_zeros(rows, self.low.shape[1])
        self.scratch = LinearScratch.make(self.low.device, rows)

    def keep_aux(self, layer: int, x: torch.Tensor, rows: int, size: int) -> None:
        """Keeps the hidden states that enter a layer, if it is an auxiliary layer."""
        if layer in self.aux_layers:
            at = self.aux_layers.index(layer) * size
            self.aux_hidden[:rows, at : at + size].copy_(x[:rows, :size])

    def write_kv(
        self, rows: int, eps: float, outputs: Sequence[QkvOutput], queries: torch.Tensor
    ) -> None:
        """Makes the KV of all layers; `queries` is a buffer that nothing reads afterwards."""
        linear(self.fusion, self.aux_hidden, rows, FLOATS, self.scratch, out=self.fused, norm=eps)
        self.low[:rows].copy_(self.fused[:rows])
        for matrix, qkv in zip(self.kv_matrices, outputs, strict=True):
            linear(matrix, self.low, rows, HEADS, self.scratch, low=queries, norm=eps, qkv=qkv)
