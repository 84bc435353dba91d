# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""What goes between host and card in a pass: words one way, tokens the other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import FloatArray, IntArray
from outstride.ops.cuda.layout import BEST, HEAD_ROWS, Words

RING = 8
"""Transfers that may be under way; a power of two."""
LEAD = 4
"""Words before those that are sent: the first says how many they are."""
TURNS = (1 << 30) - 1
"""Transfers are counted modulo one more than this."""
_RING, _LEAD, _TURNS = tl.constexpr(RING), tl.constexpr(LEAD), tl.constexpr(TURNS)


@triton.jit
def fetch_kernel(host, words, turn, taken, ld, BLOCK: tl.constexpr):
    """One program. The next words that the host has put down, straight from its memory."""
    now = tl.load(turn)
    source = host + (now & (_RING - 1)) * ld
    count = tl.load(source, cache_modifier=".cv")
    place = tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        inside = start + place < count
        found = tl.load(source + _LEAD + start + place, mask=inside, cache_modifier=".cv")
        tl.store(words + start + place, found, mask=inside)
    tl.debug_barrier()
    following = (now + 1) & _TURNS
    tl.store(turn, following)
    tl.store(taken, following)


class Ring:
    """Pinned memory from which words come to one place on the card.

    The host puts words down, and the card takes them at the beginning of the pass that they describe:
    to have them copied, the host would need several times as long as to put them down.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self.words = torch.zeros(size, dtype=torch.int32, device=device)
        self._size, self._pinned = size, device.type == "cuda"

        def room(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, pin_memory=self._pinned)

        self._host, self._taken = room(RING, LEAD + size), room(1)
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)
        self._slots, self._count = list(self._host.numpy()), self._taken.numpy()
        self._sent = 0

    def __len__(self) -> int:
        return self._size

    def post(self, words: Words) -> None:
        """Puts words down for the next `fetch`."""
        if (self._sent - self._count.item(0)) & TURNS >= RING:
            self.settle()
        slot, count = self._slots[self._sent % RING], len(words)
        slot[LEAD : LEAD + count] = words
        slot[0] = count
        self._sent = (self._sent + 1) & TURNS

    def fetch(self) -> None:
        """Launches what takes the words; may be recorded."""
        if self._pinned:
            fetch_kernel[(1,)](
                self._host, self.words, self._turn, self._taken, LEAD + self._size,
                BLOCK=2048, num_warps=8,
            )  # fmt: skip
            return
        slot = self._slots[self._count.item(0) % RING]
        self.words[: slot[0]] = torch.from_numpy(slot[LEAD : LEAD + slot[0]])
        self._count[0] = (self._count[0] + 1) & TURNS

    def send(self, words: Words) -> None:
        """Words for what is launched next; returns before they have arrived."""
        self.post(words)
        self.fetch()

    def settle(self) -> None:
        """Waits until the card has taken what it was told to take."""
        if self._pinned:
            torch.cuda.synchronize(self.words.device)

    def realign(self) -> None:
        """Forgets words that were put down and never fetched, because a launch failed."""
        self.settle()
        self._turn.fill_(self._sent)
        self._count[0] = self._sent


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
        self.void = False
        """Whether what it works on is there no longer."""
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
