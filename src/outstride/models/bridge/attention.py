"""The attention function that transformers calls, and what it works on during a pass.

transformers looks both the attention and the mask up by name. Ours is found through a context
variable, so several models may run at once, each on its own thread. Without an active handler a call
is an error: a model that was loaded by the bridge runs nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

NAME = "outstride"
"""The attention implementation, as transformers knows it."""


class AttentionHandler(Protocol):
    """Answers the calls of one pass."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """[1, rows, heads, value_dim] for query [1, heads, rows, head_dim] and key, value."""
        ...

    def mask(self, visible: Callable[..., torch.Tensor] | None, rows: int) -> torch.Tensor:
        """A stand-in for the mask: [1, 1, rows, rows]. visible(batch, head, query, key) is the rule."""
        ...


_HANDLER: ContextVar[AttentionHandler] = ContextVar("outstride_attention")


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention: hands the call to the handler of the pass."""
    return _HANDLER.get().attend(module, query, key, value, attention_mask, options), None


def mask_function(
    batch_size: int = 1,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The registered mask: visibility follows from token graphs, so it is a stand-in."""
    return _HANDLER.get().mask(mask_function, q_length)


def register() -> None:
    """Tells transformers of our attention and mask."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


@contextmanager
def handled_by(handler: AttentionHandler) -> Iterator[None]:
    """Within it, attention calls on this thread go to the handler."""
    token = _HANDLER.set(handler)
    try:
        yield
    finally:
        _HANDLER.reset(token)


def window_of(visible: Callable[..., torch.Tensor], context: int) -> int | None:
    """How many positions back a mask rule looks, found at some positions up to the context length.

    0: all of them. None: the rule is neither causal attention nor a sliding window of it.
    """
    size = max(context, 2)
    keys = torch.arange(size)
    zero = torch.zeros((), dtype=torch.int64)
    rows = torch.tensor(sorted({0, 1, size // 3, size // 2, size - 2, size - 1}))
    found = visible(zero, zero, rows[:, None], keys[None, :])
    seen = torch.broadcast_to(torch.as_tensor(found, dtype=torch.bool), (len(rows), size))
    window = int(seen[-1].sum())
    expected = (keys[None, :] <= rows[:, None]) & (keys[None, :] > rows[:, None] - window)
    if not window or not torch.equal(seen, expected):
        return None
    return 0 if window == size else window
