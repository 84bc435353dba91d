"""`DecoderConfig`: the shapes and switches in which decoders differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from outstride.core.contracts import AttentionPattern
from outstride.errors import CorruptModel, UnknownArchitecture, UnsupportedModel
from outstride.models.diffusion import Diffusion, attention_pattern_of, read_diffusion
from outstride.models.experts import Experts
from outstride.models.families import ARCHITECTURES, FAMILIES, Family
from outstride.models.rope import RopeConfig
from outstride.models.tensor_shapes import tensor_shapes
from outstride.ops.switches import GELU_TANH, LLAMA, SILU, Switches

_ACTIVATIONS = {
    "silu": SILU,
    "swish": SILU,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_new": GELU_TANH,
}
"""Activations by the names that configs use."""

__all__ = ["DecoderConfig", "RopeConfig", "described", "unsupported"]


def unsupported(name: str, known: Iterable[str] = ()) -> UnsupportedModel:
    """The error for an architecture that is not implemented, or not for this file format."""
    listed = ", ".join(sorted(known or FAMILIES, key=str.lower))
    return UnknownArchitecture(
        f"the architecture {name!r} is not supported; supported are {listed}"
    )


_LATER = {
    "DecoderConfig": (
        "switches",
        "embedding_scale",
        "logit_scale",
        "norm_offset",
        "interleaved_rope",
        "shared_projection",
        "double_wide_mlp",
        "per_layer_vocab_size",
    ),
    "RopeConfig": ("short_factors", "long_factors", "share"),
    "Experts": ("shared_gate", "router_bias", "projection_bias"),
}
"""Fields that came later than others of their class."""


def described(value: object) -> str:
    """A config as text, for digests: they must not change where a new field has its default."""
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    later = _LATER.get(type(value).__name__, ())
    found = ((field, getattr(value, field.name)) for field in fields(value))
    shown = [
        f"{field.name}={described(own)}"
        for field, own in found
        if field.name not in later or own != field.default
    ]
    return f"{type(value).__qualname__}({', '.join(shown)})"


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
    """Which layers apply RoPE."""
    windows: tuple[int | None, ...]
    """The sliding window of each layer; None: attention over the whole context."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """Whether queries and keys are normalised per head."""
    tied: bool = False
    """Whether the LM head is the embedding."""
    wide_norms: bool = False
    """Whether head norms run over all heads of a row together."""
    clip: float | None = None
    """The absolute value to which queries, keys and values are clipped."""
    rotary: int | None = None
    """How many dimensions of a head RoPE rotates; None: all."""
    experts: Experts | None = None
    diffusion: Diffusion | None = None
    switches: Switches = LLAMA
    embedding_scale: float = 1.0
    """The factor of embeddings. It is multiplied into the table at load; where that is the LM head as
    well, the final norm is divided by it."""
    logit_scale: float = 1.0
    """The factor of logits, multiplied into the final norm at load."""
    norm_offset: float = 0.0
    """Is added to all norm weights at load."""
    interleaved_rope: bool = False
    """Whether checkpoints store the dimensions of heads for RoPE over neighbouring ones."""
    shared_projection: bool = False
    """Whether layers without a window have one projection for keys and values."""
    double_wide_mlp: bool = False
    """Whether layers that read the KV of another one have an MLP of twice the size."""
    per_layer_vocab_size: int = 0
    """How many rows the embedding per layer has."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CorruptModel(
                f"{self.heads} heads cannot be grouped over {self.kv_heads} key-value heads"
            )
        rotated = self.head_dim if self.rotary is None else self.rotary
        if self.head_dim % 2 or rotated % 2 or not 0 < rotated <= self.head_dim:
            raise CorruptModel(
                f"RoPE cannot rotate {rotated} of {self.head_dim} dimensions of a head in pairs"
            )

    @property
    def attention_pattern(self) -> AttentionPattern:
        """Which settled tokens attend to each other."""
        return attention_pattern_of(self.diffusion)

    @property
    def frequencies(self) -> list[float]:
        """RoPE angle per position of each pair of dimensions of a head; 0 for pairs without RoPE.

        Of layers without a window, where the others differ (`Switches.local_rope`).
        """
        full, latent = self.switches.full_attention, self.switches.latent
        if latent is not None:
            return self.rope.frequencies(latent.rope_dim, self.context)
        size = self.head_dim if full is None else full.head_dim
        rotated = size if self.rotary is None else self.rotary
        angles = self.rope.frequencies(rotated, self.context)
        return angles + [0.0] * ((size - rotated) // 2)

    @property
    def rope_scale(self) -> float:
        """The factor of cosines and sines (YaRN)."""
        return self.rope.scale

    def limited(self, tokens: int) -> DecoderConfig:
        """The same model where texts cannot grow beyond this number of tokens.

        LongRoPE has other factors for short contexts (`RopeConfig`); nothing else changes.
        """
        if self.rope.kind != "longrope" or tokens >= self.context:
            return self
        return replace(self, context=tokens)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model needs, and its shape."""
        return tensor_shapes(self)

    def inner_size(self, layer: int) -> int:
        """The inner size of the MLP of a layer; Gemma 4 has wider ones where KV is shared."""
        shared = self.switches.kv_layers is not None and self.switches.kv_layers[layer] != layer
        return self.intermediate_size * (2 if self.double_wide_mlp and shared else 1)

    def keys_are_values(self, layer: int) -> bool:
        """Whether a layer has one projection for keys and values (Gemma 4)."""
        return self.shared_projection and self.windows[layer] is None

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """From the `config.json` of a checkpoint."""
        named = config.get("architectures") or []
        architecture = next((ARCHITECTURES[n] for n in named if n in ARCHITECTURES), None)
        if architecture is None:
            kind = str(config.get("model_type"))
            if named or kind not in FAMILIES:
                raise unsupported(str(named[0]) if named else kind)
            architecture = kind
        family = FAMILIES[architecture]
        try:
            return cls._read(family.common_config(config), architecture, family)
        except KeyError as error:
            raise CorruptModel(f"config.json lacks {error.args[0]!r}") from error
        except (TypeError, ValueError) as error:
            raise CorruptModel(f"config.json is malformed: {error}") from error

    @classmethod
    def _read(cls, config: Mapping[str, Any], architecture: str, family: Family) -> DecoderConfig:
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        hidden, context = int(config["hidden_size"]), int(config["max_position_embeddings"])
        head_dim = _stated(config, "head_dim", family.head_dim)
        head_dim = hidden // heads if head_dim is None else int(head_dim)
        rope_layers = family.rope_layers(config, layers)
        biased = bool(config.get("attention_bias", False)) and family.attention_bias
        clip = config.get("clip_qkv") if family.clip_qkv else None
        return cls(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            layers=layers,
            heads=heads,
            kv_heads=int(_stated(config, "num_key_value_heads", family.kv_heads or heads)),
            head_dim=head_dim,
            context=context,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(config, context, family.rope_theta),
            rope_layers=rope_layers,
            windows=family.windows(config, layers, rope_layers),
            qkv_bias=biased or family.qkv_bias or bool(config.get("qkv_bias")),
            output_bias=biased or bool(config.get("output_bias")),
            mlp_bias=bool(config.get("mlp_bias", False)) and family.mlp_bias,
            head_norms=family.head_norms(config),
            tied=bool(_stated(config, "tie_word_embeddings", family.tied)),
            wide_norms=family.wide_norms,
            clip=None if clip is None else float(clip),
            rotary=_rotated_dimensions(config, family, head_dim),
            experts=family.experts(config, layers),
            diffusion=read_diffusion(config, family.diffusion),
            switches=replace(family.switches(config), activation=_activation(config)),
            embedding_scale=float(config.get("embedding_scale", 1.0)),
            logit_scale=float(config.get("logit_scale", 1.0)),
            norm_offset=family.norm_offset,
            interleaved_rope=family.interleaved_rope,
            shared_projection=bool(config.get("attention_k_eq_v", False)),
            double_wide_mlp=bool(config.get("use_double_wide_mlp", False)),
            per_layer_vocab_size=int(config.get("vocab_size_per_layer_input") or 0),
        )


def _activation(config: Mapping[str, Any]) -> str:
    """The activation of the MLP."""
    stated = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if stated not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"the activation {stated!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[stated]


def _stated(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value of the config; the default where it is missing or null."""
    value = config.get(key)
    return default if value is None else value


def _rotated_dimensions(config: Mapping[str, Any], family: Family, head_dim: int) -> int | None:
    """How many dimensions of a head RoPE rotates; None: all."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = values.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    kind = values.get("rope_type") or values.get("type")
    if share is None or float(share) == 1 or kind == "proportional":
        return None
    if not family.partial_rope:
        raise UnsupportedModel("partial rotary embeddings are not supported for this architecture")
    return int(head_dim * float(share))
