"""`DecoderConfig`: what tells one decoder of the Llama family from another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from outstride.core.contracts import Vision
from outstride.errors import CorruptModel, UnsupportedModel
from outstride.models.dialects import common
from outstride.models.diffusion import Diffusion, read_diffusion, vision_of
from outstride.models.experts import Experts, read_experts
from outstride.models.rope import RopeConfig

__all__ = ["ARCHITECTURES", "DecoderConfig", "RopeConfig", "unsupported"]

ARCHITECTURES = {
    "DreamModel": "Dream",
    "Fast_dLLM_QwenForCausalLM": "Fast_dLLM_Qwen",
    "LLaDA2MoeModelLM": "llada2_moe",
    "LLaDAModelLM": "llada",
    "LLaDAMoEModel": "lladamoe",
    "LLaDAMoEModelLM": "lladamoe",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "OlmoeForCausalLM": "olmoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SDARForCausalLM": "sdar",
    "SmolLM3ForCausalLM": "smollm3",
}
"""Classes that checkpoints name, and the kinds of models that they are."""

_QKV_BIASED = ("qwen2", "Dream", "Fast_dLLM_Qwen")
"""Queries, keys and values have biases, whatever the config says."""
_MAY_BE_BIASED = ("llama", "qwen3", "qwen3_moe", "smollm3", "sdar", "olmoe", "lladamoe")
"""`attention_bias` counts."""
_WINDOWED = ("qwen2", "qwen3", "qwen3_moe", "smollm3")
"""`use_sliding_window` counts; the code of diffusion models never looks at it."""
_PARTIAL = ("lladamoe", "llada2_moe")
"""`partial_rotary_factor` counts."""


def unsupported(name: str, known: Iterable[str] = ()) -> UnsupportedModel:
    """The error for an architecture that is not implemented, or is not in this kind of file."""
    listed = ", ".join(sorted(set(known or ARCHITECTURES.values()), key=str.lower))
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
    wide_norms: bool = False
    """Whether head norms run over all heads of a row together."""
    clip: float | None = None
    """What queries, keys and values are cut to, on both sides."""
    rotary: int | None = None
    """How many dimensions of a head are turned; None: all."""
    experts: Experts | None = None
    diffusion: Diffusion | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise CorruptModel(
                f"{self.heads} heads cannot be grouped over {self.kv_heads} key-value heads"
            )
        turned = self.head_dim if self.rotary is None else self.rotary
        if self.head_dim % 2 or turned % 2 or not 0 < turned <= self.head_dim:
            raise CorruptModel(
                f"{turned} of {self.head_dim} dimensions of a head cannot be turned in pairs"
            )

    @property
    def vision(self) -> Vision:
        """How settled tokens see each other."""
        return vision_of(self.diffusion)

    @property
    def plain(self) -> bool:
        """Whether its layers are of the kind that every implementation of the operations runs."""
        return self.experts is None and not self.wide_norms and self.clip is None

    @property
    def frequencies(self) -> list[float]:
        """Radians per position of each pair of dimensions of a head; those that rest have none."""
        turned = self.head_dim if self.rotary is None else self.rotary
        return self.rope.frequencies(turned) + [0.0] * ((self.head_dim - turned) // 2)

    @property
    def rope_scale(self) -> float:
        """What cosines and sines are multiplied with."""
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
            if named or kind not in ARCHITECTURES.values():
                raise unsupported(str(named[0]) if named else kind)
            architecture = kind
        if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
            raise UnsupportedModel(f"the activation {act!r} is not supported; supported is silu")
        try:
            return cls._read(common(config, architecture), architecture)
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
            head_dim = 128 if architecture in ("qwen3", "sdar") else hidden // heads
        context = int(config["max_position_embeddings"])
        turning = _rope_layers(config, architecture, layers)
        biased = bool(config.get("attention_bias", False)) and architecture in _MAY_BE_BIASED
        tied = config.get("tie_word_embeddings")
        clip = config.get("clip_qkv") if architecture in ("olmoe", "lladamoe") else None
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
            qkv_bias=biased or architecture in _QKV_BIASED or bool(config.get("qkv_bias")),
            output_bias=biased or bool(config.get("output_bias")),
            mlp_bias=bool(config.get("mlp_bias", False)) and architecture in ("llama", "smollm3"),
            head_norms=_head_norms(config, architecture),
            tied=architecture == "smollm3" if tied is None else bool(tied),
            wide_norms=architecture == "olmoe",
            clip=None if clip is None else float(clip),
            rotary=_rotary(config, architecture, int(head_dim)),
            experts=read_experts(config, architecture, layers),
            diffusion=read_diffusion(config, architecture),
        )


def _head_norms(config: Mapping[str, Any], architecture: str) -> bool:
    if architecture == "lladamoe":
        return bool(config.get("qk_layernorm"))
    if architecture == "llada2_moe":
        return bool(config.get("use_qk_norm", True))
    return architecture in ("qwen3", "qwen3_moe", "sdar", "olmoe")


def _rotary(config: Mapping[str, Any], architecture: str, head_dim: int) -> int | None:
    """How many dimensions of a head are turned."""
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    share = values.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    if share is None or float(share) == 1:
        return None
    if architecture not in _PARTIAL:
        raise UnsupportedModel("partial rotary embeddings are not supported for this architecture")
    return int(head_dim * float(share))


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
    if architecture not in _WINDOWED or not config.get("use_sliding_window", False):
        return everywhere
    size = config.get("sliding_window", None if architecture == "smollm3" else 4096)
    if size is None:
        return everywhere
    kinds = config.get("layer_types")
    if architecture == "qwen3_moe":
        return (int(size),) * layers
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
