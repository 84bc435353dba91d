# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The choice of tokens on the card: the rule of `core.sampling`, bit for bit where it has bits.

Philox, the logarithms and the sum of logit and noise are the same operations in the same order, with
no fused multiplications. Filters find their bar by bisection instead of sorting; the exponentials
that top-p adds up are the card's own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

from outstride.core.sampling import Draw

PLACES = 12
"""Words that describe a row's draw."""
_PLACES = tl.constexpr(PLACES)
_CHUNK = 4096

_LN2 = tl.constexpr(0.6931471805599453)
_SQRT2 = tl.constexpr(1.4142135)
_TOP = tl.constexpr(3037000500)


@triton.jit
def _log1p(f):
    p = 0.07149753719568253 * f
    p = (p + -0.115712009370327) * f
    p = (p + 0.11661510914564133) * f
    p = (p + -0.12411050498485565) * f
    p = (p + 0.14249937236309052) * f
    p = (p + -0.1666848063468933) * f
    p = (p + 0.20000708103179932) * f
    p = (p + -0.24999989569187164) * f
    p = p + 0.3333333134651184
    z = f * f
    cubic = (f * z) * p
    return (f - 0.5 * z) + cubic


@triton.jit
def _log(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    high = mantissa > _SQRT2
    mantissa = tl.where(high, mantissa * 0.5, mantissa)
    exponent = exponent + high.to(tl.int32)
    return exponent.to(tl.float32) * _LN2 + _log1p(mantissa - 1.0)


@triton.jit
def _gumbel(ids, position, index, purpose, key_low, key_high):
    """The noise of token ids at a position."""
    x0 = (ids >> 2).to(tl.uint32)
    x1 = tl.full(ids.shape, 0, tl.uint32) + position
    x2 = tl.full(ids.shape, 0, tl.uint32) + index
    x3 = tl.full(ids.shape, 0, tl.uint32) + purpose
    k0, k1 = key_low, key_high
    for _ in tl.static_range(10):
        a, b = tl.full(ids.shape, 0xD2511F53, tl.uint32), tl.full(ids.shape, 0xCD9E8D57, tl.uint32)
        high0, low0 = tl.umulhi(x0, a), x0 * a
        high1, low1 = tl.umulhi(x2, b), x2 * b
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
        k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    word = ids & 3
    words = tl.where(word == 0, x0, tl.where(word == 1, x1, tl.where(word == 2, x2, x3)))
    scale: tl.constexpr = 2.0**-32
    below = tl.minimum((words.to(tl.float32) + 0.5) * scale, 1.0)
    top = words >= _TOP
    gap = ((0 - words).to(tl.uint32).to(tl.float32) - 0.5) * scale
    near = -_log1p(tl.where(top, -gap, 0.0))
    return -_log(tl.where(top, near, -_log(below)))


@triton.jit
def _rank(x):
    """Integers in the order of floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def choose_kernel(
    logits, draws, bars, best, part_values, part_ids, tickets, ld, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """The id with the largest logit, or sum of logit and noise, among those above the bar."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    draw = draws + row * _PLACES
    temperature = tl.load(draw).to(tl.float32, bitcast=True)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    x = tl.load(logits + row.to(tl.int64) * ld + ids, mask=inside, other=float("-inf"))
    if temperature > 0:
        x = tl.math.div_rn(x, tl.full((CHUNK,), 1.0, tl.float32) * temperature)
        bar, tie = tl.load(bars + row * 2), tl.load(bars + row * 2 + 1)
        filtered = tl.load(draw + 9)
        rank = _rank(x)
        x = tl.where(
            (filtered == 0) | (rank > bar) | ((rank == bar) & (ids <= tie)), x, float("-inf")
        )
        x += _gumbel(
            ids,
            tl.load(draw + 8).to(tl.uint32),
            tl.load(draw + 6).to(tl.uint32),
            tl.load(draw + 7).to(tl.uint32),
            tl.load(draw + 4).to(tl.uint32),
            tl.load(draw + 5).to(tl.uint32),
        )
    x = tl.where(inside, x, float("-inf"))
    top = tl.max(x, axis=0)
    winner = tl.min(tl.where((x == top) & inside, ids, vocab), axis=0)
    at = row * CHUNKS + chunk
    tl.store(part_values + at, top)
    tl.store(part_ids + at, winner)
    tl.debug_barrier()
    if tl.atomic_add(tickets + row, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
        k = tl.arange(0, ROUND)
        at_all = row * CHUNKS + k
        tops = tl.load(
            part_values + at_all, mask=k < CHUNKS, other=float("-inf"), cache_modifier=".cg"
        )
        winners = tl.load(part_ids + at_all, mask=k < CHUNKS, other=vocab, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        winner = tl.min(tl.where(tops == top, winners, vocab), axis=0)
        tl.store(best + row, tl.where(winner < vocab, winner, 0))
        tl.store(tickets + row, 0)


@triton.jit
def _measure(row_logits, temperature, vocab, peak, cut, tie_cut, at, tie,
             CHUNK: tl.constexpr):  # fmt: skip
    """How many ids, and what mass, stand at or above rank `at` (among those within the cut)."""
    lane = tl.arange(0, CHUNK)
    count = tl.zeros((CHUNK,), dtype=tl.int32)
    mass = tl.zeros((CHUNK,), dtype=tl.float32)
    for start in range(0, vocab, CHUNK):
        ids = start + lane
        x = tl.load(row_logits + ids, mask=ids < vocab, other=float("-inf"))
        x = tl.math.div_rn(x, tl.full((CHUNK,), 1.0, tl.float32) * temperature)
        rank = _rank(x)
        within = (ids < vocab) & ((rank > cut) | ((rank == cut) & (ids <= tie_cut)))
        above = within & ((rank > at) | ((rank == at) & (ids <= tie)))
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp(x - peak), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _bisect(row_logits, temperature, vocab, peak, cut, tie_cut, want_count, want_mass,
            CHUNK: tl.constexpr):  # fmt: skip
    """The highest bar at which enough ids (or mass) stand above, and the last id admitted at it."""
    all_ids = vocab
    low, high = tl.full((), -2147483647, tl.int64), _rank(peak).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count, mass = _measure(row_logits, temperature, vocab, peak, cut, tie_cut,
                               middle.to(tl.int32), all_ids, CHUNK)  # fmt: skip
        enough = (count >= want_count) & (mass >= want_mass)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    bar = low.to(tl.int32)
    first, last = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32) + (vocab - 1)
    while first < last:
        middle = (first + last) // 2
        count, mass = _measure(row_logits, temperature, vocab, peak, cut, tie_cut, bar, middle,
                               CHUNK)  # fmt: skip
        enough = (count >= want_count) & (mass >= want_mass)
        last = tl.where(enough, middle, last)
        first = tl.where(enough, first, middle + 1)
    return bar, last


@triton.jit
def filter_kernel(logits, draws, bars, ld, vocab, CHUNK: tl.constexpr):
    """Top-k, top-p and min-p as one bar per row."""
    row = tl.program_id(0)
    draw = draws + row * _PLACES
    if tl.load(draw + 9) != 0:
        temperature = tl.load(draw).to(tl.float32, bitcast=True)
        top_k = tl.load(draw + 1)
        top_p = tl.load(draw + 2).to(tl.float32, bitcast=True)
        log_min_p = tl.load(draw + 3).to(tl.float32, bitcast=True)
        mine = logits + row.to(tl.int64) * ld
        lane = tl.arange(0, CHUNK)
        tops = tl.full((CHUNK,), float("-inf"), tl.float32)
        for start in range(0, vocab, CHUNK):
            ids = start + lane
            x = tl.load(mine + ids, mask=ids < vocab, other=float("-inf"))
            tops = tl.maximum(tops, x)
        one = tl.full((), 1.0, tl.float32)
        peak = tl.math.div_rn(tl.max(tops, axis=0), one * temperature)
        bar, tie = tl.full((), -2147483647, tl.int32), tl.full((), 0, tl.int32) + vocab
        if (top_k > 0) & (top_k < vocab):
            bar, tie = _bisect(mine, temperature, vocab, peak, bar, tie, top_k, 0.0, CHUNK)
        if top_p < 1.0:
            _, total = _measure(mine, temperature, vocab, peak, bar, tie, bar, tie, CHUNK)
            bar, tie = _bisect(mine, temperature, vocab, peak, bar, tie, 1, top_p * total, CHUNK)
        if log_min_p > float("-inf"):
            least = _rank(peak + log_min_p)
            if least > bar:
                bar, tie = least, tl.full((), 0, tl.int32) + vocab
        tl.store(bars + row * 2, bar)
        tl.store(bars + row * 2 + 1, tie)


class Chooser:
    """Room for the choice among rows of logits."""

    def __init__(self, device: torch.device, rows: int, vocab: int) -> None:
        self.vocab, self.chunks = vocab, -(-vocab // _CHUNK)
        self.bars = torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self.best = torch.zeros(rows, dtype=torch.int32, device=device)
        self._values = torch.zeros(rows * self.chunks, dtype=torch.float32, device=device)
        self._ids = torch.zeros(rows * self.chunks, dtype=torch.int32, device=device)
        self._tickets = torch.zeros(rows, dtype=torch.int32, device=device)

    def choose(self, logits: torch.Tensor, draws: torch.Tensor, rows: int, filtered: bool) -> None:
        """Fills `best` for the first rows of logits."""
        if filtered:
            filter_kernel[(rows,)](
                logits, draws, self.bars, logits.stride(0), self.vocab,
                CHUNK=_CHUNK, num_warps=16, enable_fp_fusion=False,
            )  # fmt: skip
        choose_kernel[(rows, self.chunks)](
            logits, draws, self.bars, self.best, self._values, self._ids, self._tickets,
            logits.stride(0), self.vocab,
            CHUNK=_CHUNK, CHUNKS=self.chunks, ROUND=triton.next_power_of_2(self.chunks),
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


def fill(row: npt.NDArray[np.int32], draw: Draw, position: int) -> bool:
    """Describes a row's draw; says whether it has filters."""
    if draw.temperature == 0.0:
        row[0] = 0
        return False
    floats = row.view(np.float32)
    floats[0], floats[2] = draw.temperature, draw.top_p
    floats[3] = np.float32(np.log(draw.min_p)) if draw.min_p > 0.0 else -np.inf
    filtered = draw.top_k > 0 or draw.top_p < 1.0 or draw.min_p > 0.0
    words = row.view(np.uint32)
    words[1] = draw.top_k
    words[4], words[5] = draw.seed & 0xFFFFFFFF, draw.seed >> 32 & 0xFFFFFFFF
    words[6], words[7] = draw.index & 0xFFFFFFFF, int(draw.purpose)
    words[8], words[9] = position & 0xFFFFFFFF, filtered
    return filtered
