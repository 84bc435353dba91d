# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The most likely chain through a draft head's candidates, found on the GPU.

The host finds trees among the same candidates (`draft.paths`). A chain alone is found here as well, so
that the pass over it can be launched before the host has seen it (see `run_ahead`).
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import FloatArray, IntArray
from outstride.core.sampling import SHARED_NOISE_SHARPNESS, SamplingSpec
from outstride.ops.cuda.kernel_metadata import (
    HEADER_CHAIN_INDEX,
    HEADER_CHAIN_LENGTH,
    HEADER_CHAIN_POSITION,
    HEADER_CHAIN_PURPOSE,
    HEADER_CHAIN_SEED_HIGH,
    HEADER_CHAIN_SEED_LOW,
    HEADER_CHAIN_TEMPERATURE,
    HEADER_REPLY,
    HEADER_SIZE,
    MAX_CANDIDATES,
)
from outstride.ops.cuda.metadata import MAX_CANDIDATES as CANDIDATES
from outstride.ops.cuda.metadata import HeaderField, Int32Array
from outstride.ops.cuda.noise import gumbel

_SHARED_NOISE_SCALE = tl.constexpr(SHARED_NOISE_SHARPNESS)


@triton.jit
def chain_kernel(
    words, picked, sums, rows, vocabulary, left, right, drafted, replies, probabilities,
    RANK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program. Each token is the best after the one that was chosen before it.

    picked, sums [nodes, MAX_CANDIDATES]: candidates of each node. left, right [ids, RANK]: the bigram
    table. `drafted` keeps the chain for the pass over it; `replies` and `probabilities` (the row that
    the header names) bring it to the host.
    """
    place = tl.arange(0, MAX_CANDIDATES)
    k = tl.arange(0, WIDE)
    reply = tl.load(words + HEADER_REPLY) * MAX_CANDIDATES
    temperature = tl.load(words + HEADER_CHAIN_TEMPERATURE).to(tl.float32, bitcast=True)
    first = tl.load(rows + tl.load(words + HEADER_SIZE))
    position = tl.load(words + HEADER_CHAIN_POSITION)
    for i in range(tl.load(words + HEADER_CHAIN_LENGTH)):
        ids = tl.load(picked + i * MAX_CANDIDATES + place)
        there = ids >= 0
        score = tl.load(sums + i * MAX_CANDIDATES + place, mask=there, other=float("-inf"))
        token = tl.load(vocabulary + ids, mask=there, other=0)
        of_left = tl.load(left + first.to(tl.int64) * RANK + k, mask=k < RANK, other=0.0)
        of_right = tl.load(
            right + ids[:, None].to(tl.int64) * RANK + k[None, :],
            mask=there[:, None] & (k < RANK)[None, :],
            other=0.0,
        )
        score += tl.sum(of_right * of_left[None, :], axis=1)
        if temperature > 0:
            noise = gumbel(
                token,
                (position + i).to(tl.uint32),
                tl.load(words + HEADER_CHAIN_INDEX).to(tl.uint32),
                tl.load(words + HEADER_CHAIN_PURPOSE).to(tl.uint32),
                tl.load(words + HEADER_CHAIN_SEED_LOW).to(tl.uint32),
                tl.load(words + HEADER_CHAIN_SEED_HIGH).to(tl.uint32),
            )
            score = _SHARED_NOISE_SCALE * (score / temperature + noise)
        top = tl.max(score, axis=0)
        winner = tl.min(tl.where(score == top, place, MAX_CANDIDATES), axis=0)
        probability = 1.0 / tl.sum(tl.exp(score - top), axis=0)
        first = tl.max(tl.where(place == winner, ids, 0), axis=0)
        found = tl.max(tl.where(place == winner, token, 0), axis=0)
        tl.store(drafted + i, found)
        tl.store(replies + reply + i, found)
        tl.store(probabilities + reply + i, probability)


class ChainFinder:
    """A draft head's bigram table on the GPU, and the last chain that was found with it."""

    def __init__(
        self, vocabulary: IntArray, left: FloatArray, right: FloatArray, vocab: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        def there(array: IntArray | FloatArray, kind: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(array).to(device, kind).contiguous()

        self._vocabulary = there(vocabulary, torch.int32)
        self._left, self._right = there(left, torch.float32), there(right, torch.float32)
        self._rows = torch.full((vocab,), len(vocabulary), dtype=torch.int32, device=device)
        self._rows[torch.from_numpy(vocabulary).to(device)] = torch.arange(
            len(vocabulary), dtype=torch.int32, device=device
        )
        self.drafted = torch.zeros(CANDIDATES, dtype=torch.int32, device=device)

    def find(
        self,
        words: torch.Tensor,
        picked: torch.Tensor,
        sums: torch.Tensor,
        replies: torch.Tensor,
        probabilities: torch.Tensor,
    ) -> None:
        """The chain that the header asks for, through candidates and the sums they were compared by."""
        rank = self._left.shape[1]
        chain_kernel[(1,)](
            words, picked, sums, self._rows, self._vocabulary, self._left, self._right,
            self.drafted, replies, probabilities, RANK=rank, WIDE=max(16, triton.next_power_of_2(rank)),
            num_warps=4,
        )  # fmt: skip


def request_chain(words: Int32Array, length: int, spec: SamplingSpec, position: int) -> None:
    """Asks for a chain of `length` tokens from `position` on, in the header of a draft head's pass."""
    field = HeaderField
    words[field.CHAIN_LENGTH], words[field.CHAIN_POSITION] = length, position
    floats, numbers = words.view("float32"), words.view("uint32")
    floats[field.CHAIN_TEMPERATURE] = spec.temperature
    numbers[field.CHAIN_SEED_LOW] = spec.seed & 0xFFFFFFFF
    numbers[field.CHAIN_SEED_HIGH] = spec.seed >> 32 & 0xFFFFFFFF
    numbers[field.CHAIN_INDEX] = spec.index & 0xFFFFFFFF
    numbers[field.CHAIN_PURPOSE] = int(spec.purpose)
