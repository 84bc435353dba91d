"""What goes between host and card in a pass: words one way, tokens the other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from outstride.core.graph import IntArray
from outstride.ops.cuda.layout import HEAD_ROWS, Words

RING = 4
"""Transfers that may be under way."""


class Ring:
    """Pinned memory from which words are copied to one place on the card."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.words = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = device.type == "cuda"
        self._host = [
            torch.zeros(size, dtype=torch.int32, pin_memory=self._pinned) for _ in range(RING)
        ]
        self._views = [host.numpy() for host in self._host]
        self._events: list[Any] = [None] * RING
        self._next = 0

    def __len__(self) -> int:
        return len(self.words)

    def send(self, words: Words) -> None:
        """Copies words; returns before they have arrived."""
        at, self._next = self._next, (self._next + 1) % RING
        if self._events[at] is not None:
            self._events[at].synchronize()
        count = len(words)
        self._views[at][:count] = words
        self.words[:count].copy_(self._host[at][:count], non_blocking=True)
        if self._pinned:
            self._events[at] = self._events[at] or torch.cuda.Event()
            self._events[at].record()


class Reply:
    """The tokens of one pass, on their way to the host."""

    def __init__(self, source: Any, event: Any, count: int, place: int) -> None:
        self.place = place
        """Which row of the replies they come to."""
        self._source, self._event, self._count = source, event, count
        self._tokens: IntArray | None = None

    def launched(self) -> None:
        """Called once everything is launched that the tokens wait for."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> IntArray:
        """The tokens, when they are there."""
        if self._tokens is None:
            if self._event is not None:
                self._event.synchronize()
            self._tokens = self._source[: self._count].astype(np.int64)
        return self._tokens


class Replies:
    """Memory of the host to which the card writes tokens."""

    def __init__(self, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.memory = torch.zeros(RING, HEAD_ROWS, dtype=torch.int32, pin_memory=pinned)
        self._rows = self.memory.numpy()
        self._events = [torch.cuda.Event() if pinned else None for _ in range(RING)]
        self._held: list[Reply | None] = [None] * RING
        self._next = 0

    def take(self, count: int) -> Reply:
        """Room for the tokens of one more pass."""
        at, self._next = self._next, (self._next + 1) % RING
        held = self._held[at]
        if held is not None:
            held.wait()
        self._held[at] = reply = Reply(self._rows[at], self._events[at], count, at)
        return reply


def record(work: Callable[[], object]) -> Any:
    """A CUDA graph of what `work` launches; all of it has been launched before."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph
