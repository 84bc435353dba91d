"""`DecoderConfig`: the shapes and switches in which decoders differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outstride.core.contracts import AttentionPattern
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.diffusion import Diffusion, attention_pattern_of, read_diffusion
from outstride.models.experts import Experts
from outstride.models.families import ARCHITECTURES, FAMILIES, Family
from outstride.models.rope import RopeConfig

__all__ = ["DecoderConfig", "RopeConfig", "unsupported"]


def unsupported(name: str, known: Iterable[str] = ()) -> UnsupportedModel:
    """The error for an architecture that is not implemented, or not for this file format."""
    listed = ", ".join(sorted(known or FAMILIES, key=str.lower))
    return UnsupportedModel(f"the architecture {name!r} is not supported; supported are {listed}")


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
        """RoPE angle per position of each pair of dimensions of a head; 0 for pairs without RoPE."""
        rotated = self.head_dim if self.rotary is None else self.rotary
        return self.rope.frequencies(rotated) + [0.0] * ((self.head_dim - rotated) // 2)

    @property
    def rope_scale(self) -> float:
        """The factor of cosines and sines (YaRN)."""
        return self.rope.scale

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that the model needs, and its shape."""
        hidden = self.hidden_size
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
                sizes = (wide, narrow) if self.wide_norms else (self.head_dim,) * 2
                result[at + "self_attn.q_norm.weight"] = sizes[:1]
                result[at + "self_attn.k_norm.weight"] = sizes[1:]
            result.update({at + name: shape for name, shape in self._mlp_shapes(layer).items()})
        return result

    def _mlp_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, experts = self.hidden_size, self.experts
        parts = {"mlp.": self.intermediate_size}
        result: dict[str, tuple[int, ...]] = {}
        if experts is not None and experts.layers[layer]:
            parts = {f"mlp.experts.{i}.": experts.size for i in range(experts.count)}
            if experts.shared:
                parts["mlp.shared_experts."] = experts.shared
            result["mlp.gate.weight"] = (experts.count, hidden)
            if experts.bias:
                result["mlp.gate.expert_bias"] = (experts.count,)
        for part, inner in parts.items():
            for name, shape in (
                ("gate", (inner, hidden)),
                ("up", (inner, hidden)),
                ("down", (hidden, inner)),
            ):
                result[f"{part}{name}_proj.weight"] = shape
                if self.mlp_bias:
                    result[f"{part}{name}_proj.bias"] = shape[:1]
        return result

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
        if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise UnsupportedModel(f"the activation {act!r} is not supported; supported is silu")
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
        )


def _stated(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value of the config; the default where it is missing or null."""
    value = config.get(key)
    return default if value is None else value


def _rotated_dimensions(config: Mapping[str, Any], family: Family, head_dim: int) -> int | None:
    """How many dimensions of a head RoPE rotates; None: all."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = values.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if share is None or float(share) == 1:
        return None
    if not family.partial_rope:
        raise UnsupportedModel("partial rotary embeddings are not supported for this architecture")
    return int(head_dim * float(share))
