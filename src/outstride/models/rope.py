"""`RopeConfig`: rotary position embeddings (RoPE)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outstride.errors import CorruptModel, UnsupportedModel

_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base of RoPE, and how it is scaled to longer contexts.

    kind: default, linear, llama3, yarn, longrope, dynamic or proportional. factors: divisors of each
    frequency, where a file stores them instead of the parameters that they follow from.
    short_factors, long_factors: divisors of LongRoPE for contexts up to `original_context`, and for
    longer ones. Frequencies must not change within a text, because its keys are cached. So the
    configured context decides, and not the length of each text.
    Dynamic NTK changes nothing up to the context that the config states, and that is the limit here.
    share: of the pairs that RoPE rotates (proportional).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    factors: tuple[float, ...] | None = None
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    share: float = 1.0

    def frequencies(self, head_dim: int, context: int = 0) -> list[float]:
        """The angle per position of each pair of dimensions, in radians.

        context: the configured length that a text may reach.
        """
        plain = [self.theta ** (-i / head_dim) for i in range(0, head_dim, 2)]
        factors = self.factors
        if self.kind == "longrope":
            factors = self.long_factors if context > self.original_context else self.short_factors
        if factors is not None:
            if len(factors) != len(plain):
                raise CorruptModel(
                    f"{len(factors)} RoPE factors for heads of {head_dim} dimensions"
                )
            return [f / divisor for f, divisor in zip(plain, factors, strict=True)]
        if self.kind == "linear":
            return [f / self.factor for f in plain]
        if self.kind == "proportional":
            count = int(self.share * head_dim // 2)
            return [f / self.factor if i < count else 0.0 for i, f in enumerate(plain)]
        if self.kind == "llama3":
            return [self._llama3(f) for f in plain]
        if self.kind == "yarn":
            return self._yarn(plain, head_dim)
        return plain

    @property
    def scale(self) -> float:
        """The factor of cosines and sines (the attention factor of YaRN and LongRoPE)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context))
        if self.kind != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    def _temperature(self, strength: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * strength * math.log(self.factor) + 1.0

    def _llama3(self, frequency: float) -> float:
        """Low frequencies are divided by the factor, high ones kept, those between interpolated."""
        rotations = self.original_context * frequency / (2 * math.pi)
        if rotations > self.high_freq_factor:
            return frequency
        if rotations < self.low_freq_factor:
            return frequency / self.factor
        share = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - share) * frequency / self.factor + share * frequency

    def _yarn(self, plain: list[float], head_dim: int) -> list[float]:
        """High frequencies are kept, low ones are divided by the factor, with a ramp between them."""

        def dimension(rotations: float) -> float:
            wave = self.original_context / (rotations * 2 * math.pi)
            return head_dim * math.log(wave) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        result = []
        for i, frequency in enumerate(plain):
            slow = min(max((i - low) / (high - low), 0.0), 1.0)
            result.append(frequency / self.factor * slow + frequency * (1 - slow))
        return result

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], context: int, theta: float) -> RopeConfig:
        """From `rope_parameters` or the older `rope_scaling` and `rope_theta`."""
        values = dict(config.get("rope_scaling") or {})
        values.update(config.get("rope_parameters") or {})
        kind = values.get("rope_type") or values.get("type") or "default"
        if kind not in _KINDS:
            raise UnsupportedModel(
                f"rope scaling {kind!r} is not supported; supported are {', '.join(_KINDS[1:])}"
            )
        original = (
            config.get("original_max_position_embeddings")
            or values.get("original_max_position_embeddings")
            or context
        )
        factor = values.get("factor")
        if factor is None:
            factor = context / original if kind in ("yarn", "longrope") else 1.0
        truncate = values.get("truncate")
        return cls(
            theta=float(values.get("rope_theta") or config.get("rope_theta") or theta),
            kind=kind,
            factor=float(factor),
            original_context=int(original),
            low_freq_factor=float(values.get("low_freq_factor", 1.0)),
            high_freq_factor=float(values.get("high_freq_factor", 4.0)),
            beta_fast=float(values.get("beta_fast") or 32.0),
            beta_slow=float(values.get("beta_slow") or 1.0),
            truncate=True if truncate is None else bool(truncate),
            attention_factor=values.get("attention_factor")
            if kind in ("yarn", "longrope")
            else None,
            mscale=values.get("mscale"),
            mscale_all_dim=values.get("mscale_all_dim"),
            short_factors=_factors(values, "short_factor", kind),
            long_factors=_factors(values, "long_factor", kind),
            share=float(values.get("partial_rotary_factor", 1.0))
            if kind == "proportional"
            else 1.0,
        )


def _factors(values: Mapping[str, Any], key: str, kind: str) -> tuple[float, ...] | None:
    """The divisors that LongRoPE needs; None for other kinds."""
    if kind != "longrope":
        return None
    if key not in values:
        raise CorruptModel(f"config.json lacks {key!r} of its rope scaling")
    return tuple(float(value) for value in values[key])
