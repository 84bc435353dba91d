"""`DecoderConfig`: what tells one decoder of the Llama family from another."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outstride.errors import CorruptModel, UnsupportedModel

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
"""Names in checkpoints, and ours."""


def unsupported(name: str) -> UnsupportedModel:
    """The error for an architecture that is not implemented."""
    known = ", ".join(sorted(set(ARCHITECTURES.values())))
    return UnsupportedModel(f"the architecture {name!r} is not supported; supported are {known}")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn heads: base, and the way it was stretched to longer contexts.

    kind: default, linear, llama3 or yarn. factors: divisors of each frequency, where a file
    states them instead of the rule that they follow from.
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
        """Radians per position of each pair of dimensions."""
        plain = [self.theta ** (-i / head_dim) for i in range(0, head_dim, 2)]
        if self.factors is not None:
            if len(self.factors) != len(plain):
                raise CorruptModel(
                    f"{len(self.factors)} rotary factors for heads of {head_dim} dimensions"
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
        """What cosines and sines are multiplied with."""
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
        """Long waves are stretched, short ones kept, those between are blended."""
        turns = self.original_context * frequency / (2 * math.pi)
        if turns > self.high_freq_factor:
            return frequency
        if turns < self.low_freq_factor:
            return frequency / self.factor
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - share) * frequency / self.factor + share * frequency

    def _yarn(self, plain: list[float], head_dim: int) -> list[float]:
        """Dimensions that turn often within the original context are kept, slow ones stretched."""

        def dimension(turns: float) -> float:
            wave = self.original_context / (turns * 2 * math.pi)
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
        if (
            float(values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1)
            != 1
        ):
            raise UnsupportedModel("partial rotary embeddings are not supported")
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


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and switches of one decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    rope: RopeConfig
    rope_layers: tuple[bool, ...]
    """Which layers turn their heads at all."""
    windows: tuple[int | None, ...]
    """How far back each layer sees; None: to the beginning."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """Whether queries and keys are normalised per head."""
    tied: bool = False
    """Whether the head is the embedding."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CorruptModel(
                f"{self.heads} heads cannot be grouped over {self.kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise CorruptModel(f"heads of {self.head_dim} dimensions cannot be turned in pairs")

    @property
    def frequencies(self) -> list[float]:
        """Radians per position of each pair of dimensions of a head."""
        return self.rope.frequencies(self.head_dim)

    @property
    def rope_scale(self) -> float:
        """What cosines and sines are multiplied with."""
        return self.rope.scale

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model needs, and its shape."""
        hidden, inner = self.hidden_size, self.intermediate_size
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        result: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            result["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            result[at + "input_layernorm.weight"] = (hidden,)
            result[at + "post_attention_layernorm.weight"] = (hidden,)
            for name, size in (("q", wide), ("k", narrow), ("v", narrow)):
                result[at + f"self_attn.{name}_proj.weight"] = (size, hidden)
                if self.qkv_bias:
                    result[at + f"self_attn.{name}_proj.bias"] = (size,)
            result[at + "self_attn.o_proj.weight"] = (hidden, wide)
            if self.output_bias:
                result[at + "self_attn.o_proj.bias"] = (hidden,)
            if self.head_norms:
                result[at + "self_attn.q_norm.weight"] = (self.head_dim,)
                result[at + "self_attn.k_norm.weight"] = (self.head_dim,)
            for name, shape in (
                ("gate", (inner, hidden)),
                ("up", (inner, hidden)),
                ("down", (hidden, inner)),
            ):
                result[at + f"mlp.{name}_proj.weight"] = shape
                if self.mlp_bias:
                    result[at + f"mlp.{name}_proj.bias"] = shape[:1]
        return result

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """From the `config.json` of a checkpoint."""
        named = config.get("architectures") or []
        architecture = next((ARCHITECTURES[n] for n in named if n in ARCHITECTURES), None)
        if architecture is None:
            kind = str(config.get("model_type"))
            if named or kind not in ARCHITECTURES.values():
                raise unsupported(str(named[0]) if named else kind)
            architecture = kind
        if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise UnsupportedModel(f"the activation {act!r} is not supported; supported is silu")
        try:
            return cls._read(config, architecture)
        except KeyError as error:
            raise CorruptModel(f"config.json lacks {error.args[0]!r}") from error
        except (TypeError, ValueError) as error:
            raise CorruptModel(f"config.json is malformed: {error}") from error

    @classmethod
    def _read(cls, config: Mapping[str, Any], architecture: str) -> DecoderConfig:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        kv_heads = config.get("num_key_value_heads")
        if kv_heads is None:
            kv_heads = 8 if architecture == "mistral" else heads
        head_dim = config.get("head_dim")
        if head_dim is None:
            head_dim = 128 if architecture == "qwen3" else hidden // heads
        context = int(config["max_position_embeddings"])
        turning = _rope_layers(config, architecture, layers)
        biased = bool(config.get("attention_bias", False)) and architecture in (
            "llama",
            "qwen3",
            "smollm3",
        )
        tied = config.get("tie_word_embeddings")
        return cls(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(kv_heads),
            head_dim=int(head_dim),
            context=context,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config, context, 2e6 if architecture == "smollm3" else 1e4),
            rope_layers=turning,
            windows=_windows(config, architecture, layers, turning),
            qkv_bias=biased or architecture == "qwen2",
            output_bias=biased,
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture in ("llama", "smollm3"),
            head_norms=architecture == "qwen3",
            tied=architecture == "smollm3" if tied is None else bool(tied),
        )


def _rope_layers(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[bool, ...]:
    if architecture != "smollm3":
        return (True,) * layers
    listed = config.get("no_rope_layers")
    if listed is None:
        every = int(config.get("no_rope_layer_interval") or 4)
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if len(listed) < layers:
        raise ValueError(f"no_rope_layers names {len(listed)} of {layers} layers")
    return tuple(bool(flag) for flag in listed[:layers])


def _windows(
    config: Mapping[str, Any], architecture: str, layers: int, turning: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """How far each layer looks back; each family has its own way of saying it."""
    everywhere = (None,) * layers
    if architecture == "mistral":
        size = config.get("sliding_window", 4096)
        return everywhere if size is None else (int(size),) * layers
    if architecture == "llama" or not config.get("use_sliding_window", False):
        return everywhere
    size = config.get("sliding_window", None if architecture == "smollm3" else 4096)
    if size is None:
        return everywhere
    kinds = config.get("layer_types")
    if kinds is not None:
        if len(kinds) < layers:
            raise ValueError(f"layer_types names {len(kinds)} of {layers} layers")
        sliding = [kind == "sliding_attention" for kind in kinds[:layers]]
    elif architecture == "smollm3":
        sliding = [not turns for turns in turning]
    else:
        first = int(config.get("max_window_layers", 28))
        sliding = [layer >= first for layer in range(layers)]
    return tuple(int(size) if flag else None for flag in sliding)
