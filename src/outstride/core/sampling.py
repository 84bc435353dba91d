"""How a token is chosen from a row of logits. There is one way, for all models and backends.

    logits processors -> temperature -> top-k -> top-p -> min-p -> Gumbel noise -> argmax

The noise belongs to positions: it is a pure function of (seed, sample index, purpose, position,
token id). So a sampled token is verified like a greedy one, by equality. Everything is float32 with
fixed orders of summation; ties go to the lowest id; temperature 0 uses no noise and no filters.

The bits are part of the contract. Integers come from Philox-4x32-10 (Salmon et al., 2011), with all
32 bits used. Logarithms come from one polynomial, evaluated with separate multiplications and
additions, because the float32 logarithms of libraries differ from each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import ModuleType

import numpy as np

from outstride.core.graph import BoolArray, FloatArray, IntArray
from outstride.core.host_library import library


class Purpose(IntEnum):
    """What a random number is used for. Numbers of different purposes are independent."""

    TOKEN = 0
    """The token at a position: shared by target and drafters."""
    ACCEPT = 1
    """Whether a rejection sampler keeps a drafted token."""
    RESIDUAL = 2
    """The replacement of a token that a rejection sampler refused."""
    DRAFT = 3
    """The drafter's own samples, for rejection sampling."""
    ORDER = 4
    """The position that is unmasked next; keyed by the sequence's own step."""


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Temperature, filters and the key of the noise, for one purpose."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0
    purpose: Purpose = Purpose.TOKEN


GREEDY = SamplingSpec()

SHARED_NOISE_SHARPNESS = 2.0
"""By how much logits plus shared noise are scaled before a softmax estimates acceptance.

Two models that sample with the same noise differ by less than that noise spreads, so they agree more
often than the probabilities alone say. `paths` in `core/host.cpp` has the same factor."""


def independent(spec: SamplingSpec, *keys: int) -> SamplingSpec:
    """A copy of the spec with independent noise for each combination of keys: a step, a branch.

    For samples that do not belong to positions, in methods that keep the distribution only.
    """
    seed = spec.seed
    for key in keys:  # the finaliser of splitmix64
        seed = (seed ^ (key + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        seed = (seed ^ seed >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        seed ^= seed >> 31
    return replace(spec, seed=seed)


@dataclass(frozen=True, slots=True)
class LogitsProcessors:
    """Changes a node's logits before sampling. It depends only on the node's path.

    The positive logits of `penalized` tokens are divided by `scale`, negative ones multiplied;
    `added` maps tokens to what is added (-inf forbids); `allowed` is a mask over the vocabulary.
    """

    penalized: tuple[int, ...] = ()
    scale: float = 1.0
    added: Mapping[int, float] | None = None
    allowed: BoolArray | None = None

    def apply(self, row: FloatArray) -> FloatArray:
        """A changed copy of `row`."""
        row = row.copy()
        if self.penalized and self.scale != 1.0:
            ids = np.asarray(self.penalized, dtype=np.int64)
            part, factor = row[ids], np.float32(self.scale)
            row[ids] = np.where(part > 0, part / factor, part * factor)
        if self.added:
            ids = np.fromiter(self.added.keys(), dtype=np.int64, count=len(self.added))
            row[ids] += np.fromiter(self.added.values(), dtype=np.float32, count=len(self.added))
        if self.allowed is not None:
            row[~self.allowed[: len(row)]] = -np.inf
        return row


# --- bits -----------------------------------------------------------------------------------------

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_WORD = 0xFFFFFFFF


def philox(
    counters: IntArray, c1: int | IntArray, c2: int, c3: int, key: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Philox-4x32-10 for the counters (counters[i], c1[i], c2, c3) under a 64-bit key."""
    x0 = counters.astype(np.uint64) & _LOW
    x1 = np.broadcast_to(np.asarray(c1 & _WORD, dtype=np.uint64), x0.shape)
    x2 = np.full_like(x0, c2 & _WORD)
    x3 = np.full_like(x0, c3 & _WORD)
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(10):
        p0, p1 = x0 * _M0, x2 * _M1
        x0, x1, x2, x3 = (
            (p1 >> _HALF) ^ x1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _HALF) ^ x3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return tuple(x.astype(np.int64) for x in (x0, x1, x2, x3))  # type: ignore[return-value]


def random_words(spec: SamplingSpec, position: int | IntArray, tokens: IntArray) -> IntArray:
    """One 32-bit word for each token id at a position: word id % 4 of the Philox block id // 4."""
    blocks, lanes = tokens >> 2, tokens & 3
    if len(tokens) and isinstance(position, int):
        first, last = int(blocks.min()), int(blocks.max())
        if last - first + 1 < len(tokens):  # much of the vocabulary: each block once
            dense = np.arange(first, last + 1)
            words = philox(dense, position, spec.index, int(spec.purpose), spec.seed)
            return np.stack(words, axis=1).reshape(-1)[tokens - 4 * first]
    words = philox(blocks, position, spec.index, int(spec.purpose), spec.seed)
    return np.choose(lanes, words).astype(np.int64)


_LOG = tuple(
    np.float32(c)
    for c in (
        0.07149753719568253,
        -0.115712009370327,
        0.11661510914564133,
        -0.12411050498485565,
        0.14249937236309052,
        -0.1666848063468933,
        0.20000708103179932,
        -0.24999989569187164,
        0.3333333134651184,
    )
)
_LN2 = np.float32(0.6931471805599453)
_SQRT2 = np.float32(1.4142135)


def _log1p_poly(f: FloatArray) -> FloatArray:
    """log(1 + f) for f in [sqrt(1/2) - 1, sqrt(2) - 1]."""
    p = np.full_like(f, _LOG[0])
    for c in _LOG[1:]:
        p = p * f
        p = p + c
    z = f * f
    cubic = (f * z) * p
    return (f - np.float32(0.5) * z) + cubic


def log(x: FloatArray) -> FloatArray:
    """Natural logarithm of positive normal float32 numbers, the same bits everywhere."""
    bits = x.view(np.int32)
    exponent = (bits >> 23) - 127
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(np.float32)
    high = mantissa > _SQRT2
    mantissa = np.where(high, mantissa * np.float32(0.5), mantissa)
    exponent = exponent + high
    return exponent.astype(np.float32) * _LN2 + _log1p_poly(mantissa - np.float32(1.0))


_EXP = tuple(
    np.float32(c)
    for c in (
        0.0001989939192,
        0.001393373357,
        0.008333298378,
        0.04166646302,
        0.1666666716,
        0.5,
    )
)
_LN2_HIGH, _LN2_LOW = np.float32(0.693145751953125), np.float32(1.42860682e-06)
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number


def exp(x: FloatArray) -> FloatArray:
    """e**x for x <= 0, the same bits everywhere; 0 below -87."""
    tiny = x < np.float32(-87.0)
    x = np.where(tiny, np.float32(-87.0), x)
    n = x * np.float32(1.44269504)
    n = n + _ROUND
    whole = n.view(np.int32) - np.int32(0x4B400000)
    n = n - _ROUND
    r = x - n * _LN2_HIGH
    r = r - n * _LN2_LOW
    p = np.full_like(r, _EXP[0])
    for c in _EXP[1:]:
        p = p * r
        p = p + c
    p = (p * r) * r
    p = (p + r) + np.float32(1.0)
    result: FloatArray = (p.view(np.int32) + (whole << 23)).view(np.float32)
    return np.where(tiny, np.float32(0.0), result)


_SCALE = np.float32(2.0**-32)
_TOP = 3_037_000_500  # words from here on are uniforms above sqrt(1/2)


def exponential(words: IntArray) -> FloatArray:
    """-log of the uniform (word + 1/2) / 2**32, exact in relative terms at both ends."""
    below = (words.astype(np.float32) + np.float32(0.5)) * _SCALE
    below = np.minimum(below, np.float32(1.0))
    gap = ((2**32 - words).astype(np.float32) - np.float32(0.5)) * _SCALE
    near_one = -_log1p_poly(np.where(words >= _TOP, -gap, np.float32(0.0)))
    return np.where(words >= _TOP, near_one, -log(below))


def gumbel(spec: SamplingSpec, position: int | IntArray, tokens: IntArray) -> FloatArray:
    """The noise of each token id at a position, or at a position of its own."""
    if (lib := library()) is None:
        return _noise(random_words(spec, position, tokens))
    ids = np.ascontiguousarray(tokens, dtype=np.int64)
    at = np.ascontiguousarray(position, dtype=np.int64)
    found = np.empty(ids.shape, dtype=np.float32)
    lib.noise(spec.seed, spec.index, int(spec.purpose), at, ids, found)
    return found


def _noise(words: IntArray) -> FloatArray:
    return -log(exponential(words))


MAX_NOISE = np.float32(22.8739)
"""The largest possible noise: a token further than this below the leader cannot win."""
LARGE_NOISE = np.float32(6.0)
_LARGE = int(2.0**32 * math.exp(-math.exp(-5.99)))
"""Smaller words have noise below LARGE_NOISE. Only one token in 400 has a larger word, so that most
tokens are excluded without a logarithm."""


def uniform(spec: SamplingSpec, position: int, what: int = 0) -> float:
    """One number in (0, 1) for a position; `what` distinguishes several."""
    word = random_words(spec, position, np.asarray([what]))
    return (float(word[0]) + 0.5) * 2.0**-32


# --- sampling -------------------------------------------------------------------------------------


def _descending(x: FloatArray) -> IntArray:
    """The order by falling value; ties keep their order (ids come in rising)."""
    return np.argsort(-x, kind="stable")


def _largest(x: FloatArray, k: int) -> IntArray:
    """Ids of the k largest values in falling order, ties by lowest id."""
    if k < len(x):
        ids = np.flatnonzero(x >= np.partition(x, len(x) - k)[len(x) - k])
    else:
        ids = np.arange(len(x))
    return ids[_descending(x[ids])][:k]


def _nucleus(x: FloatArray, ids: IntArray | None, top_p: float) -> IntArray:
    """The smallest set of most likely ids that holds `top_p` of the probability, in falling order.

    Masses are integers, so that their sums do not depend on the order.
    """
    known = x if ids is None else x[ids]
    top = known.max()
    needed = math.ceil(top_p * float(_masses(known - top).sum()))
    count = 256 if ids is None else len(ids)
    while True:
        order = _largest(x, count) if ids is None else ids
        mass = np.cumsum(_masses(x[order] - top))
        if mass[-1] >= needed or len(order) == len(x) or ids is not None:
            return order[: int(np.searchsorted(mass, needed)) + 1]
        count *= 8


def _masses(below: FloatArray) -> IntArray:
    """e**x in units of 2**-40, rounded down."""
    return (exp(below).astype(np.float64) * 2.0**40).astype(np.int64)


def admitted(row: FloatArray, spec: SamplingSpec) -> tuple[IntArray, FloatArray]:
    """The ids that pass the filters, in rising order, and their logits over temperature."""
    x = row if spec.temperature == 1.0 else row / np.float32(spec.temperature)
    ids: IntArray | None = None
    if 0 < spec.top_k < len(x):
        ids = _largest(x, spec.top_k)
    if spec.top_p < 1.0:
        ids = _nucleus(x, ids, spec.top_p)
    if spec.min_p > 0.0:
        bar = x.max() + np.float32(np.log(spec.min_p))
        ids = np.flatnonzero(x >= bar) if ids is None else ids[x[ids] >= bar]
    if ids is None:
        ids = np.arange(len(x))
        return ids, x
    ids = np.sort(ids)
    return ids, x[ids]


def probabilities(row: FloatArray, spec: SamplingSpec) -> FloatArray:
    """The distribution that samples follow: one-hot at temperature 0."""
    result = np.zeros(len(row), dtype=np.float32)
    if spec.temperature == 0.0:
        result[np.argmax(row)] = 1.0
        return result
    ids, x = admitted(row, spec)
    weights = np.exp((x - x.max()).astype(np.float64))
    result[ids] = weights / weights.sum()
    return result


def best(row: FloatArray, spec: SamplingSpec, position: int, k: int = 1) -> IntArray:
    """The k tokens with the largest sums of logit and noise, best first.

    The first is *the* token at this position; the others are the runners-up (Gumbel top-k).
    """
    if spec.temperature == 0.0:
        return np.asarray([np.argmax(row)]) if k == 1 else _largest(row, k)
    ranked = 0 < spec.top_k < len(row) or spec.top_p < 1.0
    if not ranked and (lib := library()) is not None:
        return _native_best(lib, row, spec, position, k)
    ids, x = admitted(row, spec)
    forbidden = ids[:0]
    if not x.min() > -np.inf:  # they come last with any noise, so they need none
        allowed = x > -np.inf
        forbidden, ids, x = ids[~allowed], ids[allowed], x[allowed]
    if (
        len(ids) > 4 * k
    ):  # a lower bound: tokens that cannot reach it with the largest noise are out
        leaders = np.sort(_largest(x, k))
        bound = (x[leaders] + gumbel(spec, position, ids[leaders])).min()
        able = x + MAX_NOISE >= bound
        ids, x = ids[able], x[able]
        words = random_words(spec, position, ids)
        able = (words >= _LARGE) | (x + LARGE_NOISE >= bound)
        ids, x, words = ids[able], x[able], words[able]
    else:
        words = random_words(spec, position, ids)
    found = ids[_descending(x + _noise(words))[:k]]
    return np.concatenate((found, forbidden[: k - len(found)]))


def _native_best(
    lib: ModuleType, row: FloatArray, spec: SamplingSpec, position: int, k: int
) -> IntArray:
    """`best` in compiled code, without filters that need a ranking (top-k, top-p)."""
    temperature, bar = np.float32(spec.temperature), np.float32(-np.inf)
    if spec.min_p > 0.0:
        bar = row.max() / temperature + np.float32(np.log(spec.min_p))
    whole = np.ascontiguousarray(row, dtype=np.float32)
    key = spec.seed, spec.index, int(spec.purpose), position
    return np.asarray(lib.sample(whole, *key, temperature, bar, k), dtype=np.int64)


def logprobs(row: FloatArray, tokens: Sequence[int], top: int) -> list[tuple[int, float]]:
    """Log-probabilities of raw logits: of the given tokens, then of the `top` most likely ones."""
    shifted = row.astype(np.float64) - np.float64(row.max())
    norm = np.log(np.sum(np.exp(shifted)))
    ids = [int(t) for t in tokens] + ([int(t) for t in _largest(row, top)] if top else [])
    return [(t, float(shifted[t] - norm)) for t in ids]


def sample(weights: FloatArray, spec: SamplingSpec, position: int) -> int:
    """A token sampled in proportion to weights, with the noise of the spec."""
    ids = np.flatnonzero(weights)
    sums = np.log(weights[ids].astype(np.float64)) + gumbel(spec, position, ids)
    return int(ids[np.argmax(sums)])
