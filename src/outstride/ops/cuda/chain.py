# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The likeliest chain through what a trained part guesses, found on the card.

The host finds trees among the same candidates (`draft.paths`). A chain alone is found here as well, so
that the pass over it can be launched before the host has seen it (see `relay`).
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.graph import FloatArray, IntArray
from outstride.core.sampling import Draw
from outstride.ops.cuda.layout import BEST, HEADER, Words
from outstride.ops.cuda.noise import gumbel

_BEST = tl.constexpr(BEST)
_HEADER = tl.constexpr(HEADER)
LENGTH, WARMTH, SEED, INDEX, PURPOSE, PLACE = 7, 8, 9, 11, 12, 13
"""Words of the header: how long a chain is wanted, the request's draw, where the chain begins."""
_LENGTH, _WARMTH, _SEED = tl.constexpr(LENGTH), tl.constexpr(WARMTH), tl.constexpr(SEED)
_INDEX, _PURPOSE, _PLACE = tl.constexpr(INDEX), tl.constexpr(PURPOSE), tl.constexpr(PLACE)
SHARP = 2.0
"""How much surer a guess is taken to be where the noise of the draw is known."""
_SHARP = tl.constexpr(SHARP)


@triton.jit
def chain_kernel(
    words, picked, sums, rows, listed, before, after, drafted, replies, chances,
    RANK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program. Each token is the best behind the one that was chosen before it.

    `drafted` keeps the chain for the pass over it; the row of `replies` that the words name, and that
    of `chances`, bring it to the host.
    """
    place = tl.arange(0, _BEST)
    k = tl.arange(0, WIDE)
    reply = tl.load(words) * _BEST
    warmth = tl.load(words + _WARMTH).to(tl.float32, bitcast=True)
    first = tl.load(rows + tl.load(words + _HEADER))
    position = tl.load(words + _PLACE)
    for i in range(tl.load(words + _LENGTH)):
        ids = tl.load(picked + i * _BEST + place)
        there = ids >= 0
        score = tl.load(sums + i * _BEST + place, mask=there, other=float("-inf"))
        token = tl.load(listed + ids, mask=there, other=0)
        in_front = tl.load(before + first.to(tl.int64) * RANK + k, mask=k < RANK, other=0.0)
        behind = tl.load(
            after + ids[:, None].to(tl.int64) * RANK + k[None, :],
            mask=there[:, None] & (k < RANK)[None, :],
            other=0.0,
        )
        score += tl.sum(behind * in_front[None, :], axis=1)
        if warmth > 0:
            noise = gumbel(
                token,
                (position + i).to(tl.uint32),
                tl.load(words + _INDEX).to(tl.uint32),
                tl.load(words + _PURPOSE).to(tl.uint32),
                tl.load(words + _SEED).to(tl.uint32),
                tl.load(words + _SEED + 1).to(tl.uint32),
            )
            score = _SHARP * (score / warmth + noise)
        top = tl.max(score, axis=0)
        winner = tl.min(tl.where(score == top, place, _BEST), axis=0)
        chance = 1.0 / tl.sum(tl.exp(score - top), axis=0)
        first = tl.max(tl.where(place == winner, ids, 0), axis=0)
        found = tl.max(tl.where(place == winner, token, 0), axis=0)
        tl.store(drafted + i, found)
        tl.store(replies + reply + i, found)
        tl.store(chances + reply + i, chance)


class Chain:
    """A part's table of what follows what, on the card, and the last chain that it gave."""

    def __init__(
        self, listed: IntArray, before: FloatArray, after: FloatArray, vocab: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        def there(array: IntArray | FloatArray, kind: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(array).to(device, kind).contiguous()

        self._listed = there(listed, torch.int32)
        self._before, self._after = there(before, torch.float32), there(after, torch.float32)
        self._rows = torch.full((vocab,), len(listed), dtype=torch.int32, device=device)
        self._rows[torch.from_numpy(listed).to(device)] = torch.arange(
            len(listed), dtype=torch.int32, device=device
        )
        self.drafted = torch.zeros(BEST, dtype=torch.int32, device=device)

    def find(
        self,
        words: torch.Tensor,
        picked: torch.Tensor,
        sums: torch.Tensor,
        replies: torch.Tensor,
        chances: torch.Tensor,
    ) -> None:
        """The chain that the words ask for, through candidates and what they were compared by."""
        rank = self._before.shape[1]
        chain_kernel[(1,)](
            words, picked, sums, self._rows, self._listed, self._before, self._after,
            self.drafted, replies, chances, RANK=rank, WIDE=max(16, triton.next_power_of_2(rank)),
            num_warps=4,
        )  # fmt: skip


def describe(words: Words, length: int, draw: Draw, place: int) -> None:
    """Asks for a chain in the header of a part's pass."""
    words[LENGTH], words[PLACE] = length, place
    floats, numbers = words.view("float32"), words.view("uint32")
    floats[WARMTH] = draw.temperature
    numbers[SEED], numbers[SEED + 1] = draw.seed & 0xFFFFFFFF, draw.seed >> 32 & 0xFFFFFFFF
    numbers[INDEX], numbers[PURPOSE] = draw.index & 0xFFFFFFFF, int(draw.purpose)
