"""Which draft heads the CUDA backend runs: block drafters of our own recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outstride.errors import UnsupportedModel
from outstride.ops.contract import Batch, DraftHeadOps, HeadPlacement, PackedHead
from outstride.ops.weights import BlockDrafterWeights, DraftHeadWeights, ModelShape

if TYPE_CHECKING:
    from outstride.ops.cuda.backend import Cuda
    from outstride.ops.cuda.draft_heads import CudaDraftHead

OTHERWISE = "load the model on the CPU"
NOT_YET = f"EAGLE and Medusa heads do not run on a GPU yet; {OTHERWISE}"


def unsupported_draft_head(weights: DraftHeadWeights, shape: ModelShape) -> str | None:
    """Why the kernels cannot run a draft head, and what to do instead; None if they can."""
    if not isinstance(weights, BlockDrafterWeights):
        return NOT_YET
    if weights.lm_head is not None or weights.rope is not None:
        return f"it has an LM head or RoPE frequencies of its own; {OTHERWISE}"
    if any(
        layer.down.shape[1] != shape.intermediate_size
        or layer.query_norm is not None
        or layer.qkv_bias is not None
        or layer.output_bias is not None
        for layer in weights.layers
    ):
        return f"its layers have another MLP width, head norms or biases; {OTHERWISE}"
    return None


class CudaDraftHeads(DraftHeadOps):
    """Draft heads of a CUDA backend, which holds them next to its own layers."""

    def __init__(self, backend: Cuda, shape: ModelShape) -> None:
        super().__init__(backend.name)
        self._backend, self._shape = backend, shape
        self.attached: dict[str, CudaDraftHead] = {}

    def unsupported_draft_head(self, weights: DraftHeadWeights) -> str | None:
        return unsupported_draft_head(weights, self._shape)

    def unsupported_adapter(self) -> str | None:
        return f"LoRA adapters do not run on a GPU yet; {OTHERWISE}"

    def attach(self, name: str, packed: PackedHead) -> HeadPlacement:
        weights: DraftHeadWeights = packed
        from outstride.ops.cuda.draft_heads import CudaDraftHead  # needs Triton

        assert isinstance(weights, BlockDrafterWeights)
        backend = self._backend
        first = len(backend.layers)
        head = CudaDraftHead.pack(
            weights,
            self._shape,
            backend.lm_head_weight,
            first_layer=first,
            head_width=backend.geometry.head_width,
            rows=backend.layers.max_rows,
            device=backend.torch_device,
            dtype=backend.dtype,
            pdl=backend.pdl,
        )
        backend.layers.append(head.layers)
        backend.windows += (weights.window,) * len(head.layers)
        self.attached[name] = head
        backend.reset()
        return HeadPlacement((first, first + len(head.layers)))

    def final_norm(self) -> torch.Tensor:
        raise UnsupportedModel(f"{self._name} cannot run this draft head: {NOT_YET}")

    def write_kv(self, batch: Batch) -> None:
        layers = self._backend.layers
        for head in self.attached.values():
            numbers = range(head.first_layer, head.first_layer + len(head.layers))
            outputs = [layers.qkv_output(number, batch) for number in numbers]
            head.write_kv(batch.rows, self._shape.norm_eps, outputs, layers.queries)
