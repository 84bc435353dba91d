"""`Family`: what a family of checkpoints does in its own way; each file here describes some.

The decoder is one and the same for all. A family says how its `config.json` and its tensors are
named, which defaults its code has, and which layers it consists of. Everything that an entry leaves
out is as in Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from outstride.models.diffusion import Diffusion
from outstride.models.experts import Experts
from outstride.models.rope import RopeConfig
from outstride.ops.switches import LLAMA, RopeWeights, Switches

if TYPE_CHECKING:
    import torch

    from outstride.models.config import DecoderConfig

Config: TypeAlias = Mapping[str, Any]
Windows: TypeAlias = tuple[int | None, ...]
LAYER = "model.layers."
TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Of the text part of checkpoints with vision: those of today, and older ones."""
VISION = (
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "vision_tower.",
    "multi_modal_projector.",
    "model.visual.",
    "visual.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
)
"""Beginnings of names of tensors that a text model does not need."""


def _unchanged(config: Config) -> Config:
    return config


def _no_head_norms(config: Config) -> bool:
    del config
    return False


def head_norms_always(config: Config) -> bool:
    """For families whose queries and keys are always normalised per head."""
    del config
    return True


def _rope_everywhere(config: Config, layers: int) -> tuple[bool, ...]:
    del config
    return (True,) * layers


def _no_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del config, rope_layers
    return (None,) * layers


def _no_experts(config: Config, layers: int) -> Experts | None:
    del config, layers
    return None


def _no_switches(config: Config) -> Switches:
    del config
    return LLAMA


Unfuse: TypeAlias = "Callable[[torch.Tensor], Mapping[str, torch.Tensor]]"


def _nothing_fused(config: DecoderConfig) -> Mapping[str, Unfuse]:
    del config
    return {}


@dataclass(frozen=True, slots=True)
class Family:
    """One family. Defaults are used where `config.json` states nothing."""

    classes: tuple[str, ...]
    """The classes that `architectures` in `config.json` names."""
    common_config: Callable[[Config], Config] = _unchanged
    """Translates `config.json` to the names that Llama uses."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of Llama's tensor names, and those of this family; the first match counts."""
    expert_names: Mapping[str, str] = field(default_factory=dict)
    """Names of the matrices of an expert as in Qwen3-MoE, and those of this family."""
    kv_heads: int | None = None
    """The default number of key-value heads; None: as many as query heads."""
    head_dim: int | None = None
    """The default size of a head; None: the hidden size divided by the number of heads."""
    rope_theta: float = 1e4
    tied: bool = False
    """Whether the LM head is the embedding by default."""
    qkv_bias: bool = False
    """Whether queries, keys and values always have biases."""
    attention_bias: bool = False
    """Whether `attention_bias` counts; elsewhere it is ignored, as the published code does."""
    mlp_bias: bool = False
    """Whether `mlp_bias` counts."""
    clip_qkv: bool = False
    """Whether `clip_qkv` counts."""
    partial_rope: bool = False
    """Whether `partial_rotary_factor` counts."""
    head_norms: Callable[[Config], bool] = _no_head_norms
    """Whether queries and keys are normalised per head."""
    wide_norms: bool = False
    """Whether these norms run over all heads of a row together."""
    rope_layers: Callable[[Config, int], tuple[bool, ...]] = _rope_everywhere
    """Which layers apply RoPE."""
    windows: Callable[[Config, int, tuple[bool, ...]], Windows] = _no_windows
    """The sliding window of each layer."""
    experts: Callable[[Config, int], Experts | None] = _no_experts
    switches: Callable[[Config], Switches] = _no_switches
    """How its layers differ from Llama's; the activation is read from the config."""
    norm_offset: float = 0.0
    """Is added to every stored norm weight at load; 1 where files hold w of a norm with 1 + w."""
    interleaved_rope: bool = False
    """Whether RoPE rotates neighbouring dimensions; rows are reordered at load."""
    optional: tuple[str, ...] = ()
    """Ends of names of tensors that files may hold and that are not needed."""
    extra_layers: bool = False
    """Whether files may hold layers after the last one (multi-token prediction), which are not used."""
    prefixes: Mapping[str, str] = field(default_factory=dict)
    """Beginnings of tensor names in files, and what they are replaced with before anything else: models
    with a nested `text_config` have their text part in a module of its own."""
    skipped: tuple[str, ...] = ()
    """Beginnings of names of tensors that a text model does not need (vision, audio)."""
    unfused: Mapping[str, Unfuse] = field(default_factory=dict)
    """Ends of names of tensors that hold several matrices in another order than row by row, and the
    function that takes them apart: Llama's names after that of the layer, and the parts."""
    unfused_by_size: Callable[[DecoderConfig], Mapping[str, Unfuse]] = _nothing_fused
    """The same for tensors whose parts depend on the sizes of the model."""
    diffusion: Diffusion | None = None
    """The conventions of a masked (diffusion) model, with the default block length of its code."""


def two_ropes(config: Config, local: Config) -> Config:
    """`rope_parameters` by kind of layer as those of full and of windowed layers.

    local: the parameters of layers with a window where the config does not state them by kind.
    They go to `local_rope_parameters`.
    """
    ropes = config.get("rope_parameters") or {}
    if "full_attention" not in ropes:
        return {**config, "local_rope_parameters": local}
    return {
        **config,
        "rope_parameters": ropes["full_attention"],
        "local_rope_parameters": ropes.get("sliding_attention") or local,
    }


def local_rope(config: Config, head_dim: int, theta: float) -> RopeWeights:
    """RoPE of the layers with a window, as `two_ropes` found it."""
    found = RopeConfig.from_hf({"rope_parameters": config["local_rope_parameters"]}, 1, theta)
    return RopeWeights(tuple(found.frequencies(head_dim)), found.scale)


def text_config(config: Config) -> Config:
    """The text part of a config that may nest it in `text_config`."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return {**text, "tie_word_embeddings": tied}


def window_size(config: Config, default: int | None) -> int | None:
    """The size of windows, where they are switched on."""
    if not config.get("use_sliding_window", False):
        return None
    size = config.get("sliding_window", default)
    return None if size is None else int(size)


def listed_windows(config: Config, layers: int) -> list[bool] | None:
    """Which layers have a window by `layer_types`; None if the config does not list them."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if len(kinds) < layers:
        raise ValueError(f"layer_types names {len(kinds)} of {layers} layers")
    return [kind == "sliding_attention" for kind in kinds[:layers]]
