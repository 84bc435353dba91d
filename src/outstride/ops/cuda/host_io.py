# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Between host and GPU in a pass: metadata one way, sampled tokens the other way."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import FloatArray, IntArray
from outstride.ops.cuda.metadata import MAX_CANDIDATES, MAX_HEAD_ROWS, Int32Array

RING = 8
"""Transfers that may be under way; a power of two."""
LEAD = 4
"""Words of a ring slot before the metadata: the first says how long it is."""
COUNT_MASK = (1 << 30) - 1
"""Transfers are counted modulo one more than this."""
_RING, _LEAD, _COUNT_MASK = tl.constexpr(RING), tl.constexpr(LEAD), tl.constexpr(COUNT_MASK)


@triton.jit
def fetch_kernel(host, words, count_at, taken, ld, BLOCK: tl.constexpr):
    """One program. Copies the next metadata that the host has posted, straight from its memory."""
    now = tl.load(count_at)
    source = host + (now & (_RING - 1)) * ld
    count = tl.load(source, cache_modifier=".cv")
    place = tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        inside = start + place < count
        found = tl.load(source + _LEAD + start + place, mask=inside, cache_modifier=".cv")
        tl.store(words + start + place, found, mask=inside)
    tl.debug_barrier()
    following = (now + 1) & _COUNT_MASK
    tl.store(count_at, following)
    tl.store(taken, following)


class MetadataRing:
    """A ring of pinned memory through which metadata comes to one buffer on the GPU.

    The host posts metadata, and the GPU fetches it at the beginning of the pass that it belongs to: a
    copy that the host starts would take it several times as long.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self.words = torch.zeros(size, dtype=torch.int32, device=device)
        self._size, self._pinned = size, device.type == "cuda"

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, pin_memory=self._pinned)

        self._host, self._taken = zeros(RING, LEAD + size), zeros(1)
        self._fetched = torch.zeros(1, dtype=torch.int32, device=device)
        self._slots, self._count = list(self._host.numpy()), self._taken.numpy()
        self._sent = 0

    def __len__(self) -> int:
        return self._size

    def post(self, words: Int32Array) -> None:
        """Leaves metadata for the next `fetch`; waits if the ring is full."""
        if (self._sent - self._count.item(0)) & COUNT_MASK >= RING:
            self.synchronize()
        slot, count = self._slots[self._sent % RING], len(words)
        slot[LEAD : LEAD + count] = words
        slot[0] = count
        self._sent = (self._sent + 1) & COUNT_MASK

    def fetch(self) -> None:
        """Launches the copy to the GPU; may be captured in a CUDA graph."""
        if self._pinned:
            fetch_kernel[(1,)](
                self._host, self.words, self._fetched, self._taken, LEAD + self._size,
                BLOCK=2048, num_warps=8,
            )  # fmt: skip
            return
        slot = self._slots[self._count.item(0) % RING]
        self.words[: slot[0]] = torch.from_numpy(slot[LEAD : LEAD + slot[0]])
        self._count[0] = (self._count[0] + 1) & COUNT_MASK

    def send(self, words: Int32Array) -> None:
        """Metadata for what is launched next; returns before it has arrived."""
        self.post(words)
        self.fetch()

    def synchronize(self) -> None:
        """Waits until the GPU has fetched all that was launched."""
        if self._pinned:
            torch.cuda.synchronize(self.words.device)

    def realign(self) -> None:
        """Forgets metadata that was posted and never fetched, because a launch failed."""
        self.synchronize()
        self._fetched.fill_(self._sent)
        self._count[0] = self._sent


class PassReply:
    """The tokens of one pass, on their way to the host."""

    def __init__(self, source: tuple[Any, ...], event: Any, stream: Any, count: int, slot: int):
        self.slot = slot
        """Which reply buffer the tokens come to."""
        self.chain_length = 0
        """How long a chain was asked for."""
        self.sums: FloatArray | None = None
        """By what candidates were compared [count, MAX_CANDIDATES], from a draft head; after `wait`."""
        self.chain: IntArray | None = None
        """The most likely chain through the candidates, where it was asked for; after `wait`."""
        self.probabilities: FloatArray | None = None
        """The draft head's probability of each token of the chain."""
        self._source, self._event, self._stream = source, event, stream
        self._count = count
        self._tokens: IntArray | None = None

    def launched(self) -> None:
        """Called once all kernels are launched that the tokens depend on."""
        if self._event is not None:
            self._event.record(self._stream)

    def wait(self) -> IntArray:
        """Waits for the tokens [count, MAX_CANDIDATES]: of each row as many as it wanted, first."""
        if self._tokens is None:
            if self._event is not None:
                self._event.synchronize()
            tokens, *further = self._source
            self._tokens = tokens[: self._count].astype(np.int64)
            if further:
                sums, chain, probabilities = further
                self.sums = sums[: self._count].copy()
                if self.chain_length:
                    self.chain = chain[: self.chain_length].astype(np.int64)
                    self.probabilities = probabilities[: self.chain_length].copy()
        return self._tokens


class ReplyBuffers:
    """Buffers in the host's memory to which the GPU writes sampled tokens.

    candidates: they are a draft head's. Their sums come, too, and the chain through them.
    """

    def __init__(self, device: torch.device, *, candidates: bool = False) -> None:
        pinned = device.type == "cuda"

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(RING, *shape, dtype=dtype, pin_memory=pinned)

        self.tokens = zeros(MAX_HEAD_ROWS, MAX_CANDIDATES)
        shape = MAX_HEAD_ROWS, MAX_CANDIDATES
        self.sums = zeros(*shape, dtype=torch.float32) if candidates else None
        self.chains = zeros(MAX_CANDIDATES)
        self.probabilities = zeros(MAX_CANDIDATES, dtype=torch.float32)
        further = (self.sums, self.chains, self.probabilities) if self.sums is not None else ()
        self._rows = list(zip(*(made.numpy() for made in (self.tokens, *further)), strict=True))
        self._events = [torch.cuda.Event() if pinned else None for _ in range(RING)]
        self._stream = torch.cuda.current_stream(device) if pinned else None
        self._held: list[PassReply | None] = [None] * RING
        self._next = 0

    def take(self, count: int) -> PassReply:
        """A buffer for the tokens of one more pass."""
        at, self._next = self._next, (self._next + 1) % RING
        held = self._held[at]
        if held is not None:
            held.wait()
        reply = PassReply(self._rows[at], self._events[at], self._stream, count, at)
        self._held[at] = reply
        return reply
