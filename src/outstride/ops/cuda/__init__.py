"""Operations on an NVIDIA GPU: Triton kernels, replayed from CUDA graphs.

- `backend`: `Cuda`, the operations of the contract
- `decoder_layers`, `weights`: the layers of a model, their weights and buffers
- `linear`, `epilogue`, `matrices`: matrix products with a fixed order of sums, and fused epilogues
- `attention`: attention over a paged KV cache and token graphs
- `kv_cache`: the KV cache, and copies between its slots
- `lm_head`, `sampler`, `filters`, `noise`: logits and sampling; `scoring`: passes with their LM head
- `draft_heads`, `chain`: draft heads, and the chains that they draft
- `metadata`, `kernel_metadata`: the fields of the metadata of a pass, for host and kernels
- `batch_metadata`, `metadata_builder`: the metadata of a pass, made on the host
- `launch`, `cuda_graph`, `host_io`: launching passes, and what goes between host and GPU
- `run_ahead`: passes that are launched before the engine asks for them

These can be imported without Triton: `metadata`, `batch_metadata`, `metadata_builder`,
`matrices`, and the host's part of `run_ahead`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outstride.ops.cuda.backend import Cuda

__all__ = ["Cuda", "available"]


def available() -> bool:
    """Whether there is a GPU that these operations run on, and a compiler for them."""
    import importlib.util

    import torch

    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def __getattr__(name: str) -> Any:
    if name == "Cuda":
        from outstride.ops.cuda.backend import Cuda

        return Cuda
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
