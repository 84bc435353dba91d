"""`RopeConfig`: rotary position embeddings (RoPE)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outstride.errors import CorruptModel, UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base of RoPE, and how it is scaled to longer contexts.

    kind: default, linear, llama3 or yarn. factors: divisors of each frequency, where a file stores
    them instead of the parameters that they follow from.
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

    def frequencies(self, head_dim: int) -> list[float]:
        """The angle per position of each pair of dimensions, in radians."""
        plain = [self.theta ** (-i / head_dim) for i in range(0, head_dim, 2)]
        if self.factors is not None:
            if len(self.factors) != len(plain):
                raise CorruptModel(
                    f"{len(self.factors)} RoPE factors for heads of {head_dim} dimensions"
                )
            return [f / divisor for f, divisor in zip(plain, self.factors, strict=True)]
        if self.kind == "linear":
            return [f / self.factor for f in plain]
        if self.kind == "llama3":
            return [self._llama3(f) for f in plain]
        if self.kind == "yarn":
            return self._yarn(plain, head_dim)
        return plain

    @property
    def scale(self) -> float:
        """The factor of cosines and sines (YaRN's attention factor)."""
        if self.attention_factor is not None:
            return self.attention_factor
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
        if kind not in ("default", "linear", "llama3", "yarn"):
            raise UnsupportedModel(
                f"rope scaling {kind!r} is not supported; supported are linear, llama3 and yarn"
            )
        original = (
            config.get("original_max_position_embeddings")
            or values.get("original_max_position_embeddings")
            or context
        )
        factor = values.get("factor")
        if factor is None:
            factor = context / original if kind == "yarn" else 1.0
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
            attention_factor=values.get("attention_factor") if kind == "yarn" else None,
            mscale=values.get("mscale"),
            mscale_all_dim=values.get("mscale_all_dim"),
        )
