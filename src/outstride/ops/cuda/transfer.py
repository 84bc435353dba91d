"""What goes between host and card in a pass: words one way, tokens the other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from outstride.core.graph import FloatArray, IntArray
from outstride.ops.cuda.layout import BEST, HEAD_ROWS, Words

RING = 8
"""Transfers that may be under way."""


class Ring:
    """Pinned memory from which words are copied to one place on the card."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.words = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._pinned else None
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
            self._events[at].record(self._stream)


class Reply:
    """The tokens of one pass, on their way to the host."""

    def __init__(self, source: tuple[Any, ...], event: Any, stream: Any, count: int, place: int):
        self.place = place
        """Which row of the replies they come to."""
        self.length = 0
        """How long a chain was asked for."""
        self.sums: FloatArray | None = None
        """What they were compared by, where that comes too; there after `wait`."""
        self.chain: IntArray | None = None
        """The likeliest chain through them, where that was asked for; there after `wait`."""
        self.chances: FloatArray | None = None
        """How sure the part is of each token of the chain."""
        self._source, self._event, self._stream = source, event, stream
        self._count = count
        self._tokens: IntArray | None = None

    def launched(self) -> None:
        """Called once everything is launched that the tokens wait for."""
        if self._event is not None:
            self._event.record(self._stream)

    def wait(self) -> IntArray:
        """The tokens, when they are there: a line for each row, as many as it wanted in front."""
        if self._tokens is None:
            if self._event is not None:
                self._event.synchronize()
            tokens, *further = self._source
            self._tokens = tokens[: self._count].astype(np.int64)
            if further:
                sums, chain, chances = further
                self.sums = sums[: self._count].copy()
                if self.length:
                    self.chain = chain[: self.length].astype(np.int64)
                    self.chances = chances[: self.length].copy()
        return self._tokens


class Replies:
    """Memory of the host to which the card writes tokens.

    guesses: they are a part's. What they were compared by comes, too, and the chain through them.
    """

    def __init__(self, device: torch.device, *, guesses: bool = False) -> None:
        pinned = device.type == "cuda"

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(RING, *shape, dtype=dtype, pin_memory=pinned)

        self.memory = room(HEAD_ROWS, BEST)
        self.sums = room(HEAD_ROWS, BEST, dtype=torch.float32) if guesses else None
        self.chains = room(BEST)
        self.chances = room(BEST, dtype=torch.float32)
        further = (self.sums, self.chains, self.chances) if self.sums is not None else ()
        self._rows = list(zip(*(made.numpy() for made in (self.memory, *further)), strict=True))
        self._events = [torch.cuda.Event() if pinned else None for _ in range(RING)]
        self._stream = torch.cuda.current_stream(device) if pinned else None
        self._held: list[Reply | None] = [None] * RING
        self._next = 0

    def take(self, count: int) -> Reply:
        """Room for the tokens of one more pass."""
        at, self._next = self._next, (self._next + 1) % RING
        held = self._held[at]
        if held is not None:
            held.wait()
        reply = Reply(self._rows[at], self._events[at], self._stream, count, at)
        self._held[at] = reply
        return reply


class Recording:
    """What a pass launches, as CUDA graphs that are replayed one behind the other.

    All of it has been launched before. A graph is handed to the card as a whole, which takes the host
    as long as it is large: where the card waits for it, it is cut, and small pieces come first.
    """

    def __init__(self, work: Callable[[Recording], object]) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._begin()
            try:
                work(self)
            finally:
                self._graphs[-1].capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        self._graphs.append(graph)

    def cut(self) -> None:
        """What is launched from here on is a graph of its own."""
        self._graphs[-1].capture_end()
        self._begin()

    def replay(self) -> None:
        for graph in self._graphs:
            graph.replay()
