# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""The arithmetic of `core.sampling` on the GPU, bit for bit.

Philox, logarithms and powers are the same operations in the same order, without fused
multiplications.
"""

from __future__ import annotations

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]

_ROUND = tl.constexpr(12582912.0)

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
def gumbel(ids, position, index, purpose, key_low, key_high):
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
def exp(x):
    """e**x for x <= 0."""
    tiny = x < -87.0
    x = tl.where(tiny, -87.0, x)
    n = x * 1.44269504
    n = n + _ROUND
    whole = n.to(tl.int32, bitcast=True) - 0x4B400000
    n = n - _ROUND
    r = x - n * 0.693145751953125
    r = r - n * 1.42860682e-06
    p = 0.0001989939192 * r
    p = (p + 0.001393373357) * r
    p = (p + 0.008333298378) * r
    p = (p + 0.04166646302) * r
    p = (p + 0.1666666716) * r
    p = p + 0.5
    p = (p * r) * r
    p = (p + r) + 1.0
    result = (p.to(tl.int32, bitcast=True) + (whole << 23)).to(tl.float32, bitcast=True)
    return tl.where(tiny, 0.0, result)


@triton.jit
def mass(x, peak):
    """e**(x - peak) in units of 2**-40, rounded down."""
    return (exp(x - peak) * 1099511627776.0).to(tl.int64)


@triton.jit
def rank(x):
    """Integers in the order of floats; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unrank(place):
    """The floats of such integers."""
    return tl.where(place < 0, place ^ 0x7FFFFFFF, place).to(tl.float32, bitcast=True)


@triton.jit
def over(x, temperature, WIDTH: tl.constexpr):
    """x [WIDTH] divided by the temperature, rounded to nearest."""
    return tl.math.div_rn(x, tl.full((WIDTH,), 1.0, tl.float32) * temperature)
