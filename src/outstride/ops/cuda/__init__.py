"""Operations on an NVIDIA card: Triton kernels, replayed from CUDA graphs.

- `matrices`, `linear`: matrix products with a fixed order of sums, and what is fused to them
- `attention`: attention over pages and token graphs
- `noise`, `filters`, `choose`: the choice of tokens
- `head`: the vocabulary, and what comes back to the host
- `moves`: the cache, and entries that are moved in it
- `tiles`, `layout`: the description of a pass, made on the host
- `steps`, `ahead`: passes that can be foreseen, and launched before they are asked for
- `weights`: layers as the kernels read them
- `transfer`: what goes between host and card
- `backend`: `Cuda`, the operations of the contract
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outstride.ops.cuda.backend import Cuda

__all__ = ["Cuda", "available"]


def available() -> bool:
    """Whether there is a card that these operations run on, and a compiler for them."""
    import importlib.util

    import torch

    return torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


def __getattr__(name: str) -> Any:
    if name == "Cuda":
        from outstride.ops.cuda.backend import Cuda

        return Cuda
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
