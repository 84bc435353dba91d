"""`FAMILIES`: what each family of checkpoints does in its own way, one entry per `model_type`.

The decoder is one and the same for all. A family says how its `config.json` and its tensors are
named, which defaults its code has, and which layers it consists of. To add an architecture, add an
entry; everything that an entry leaves out is as in Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from outstride.errors import UnsupportedModel
from outstride.models import experts
from outstride.models.diffusion import Diffusion
from outstride.models.experts import Experts

Config: TypeAlias = Mapping[str, Any]
Windows: TypeAlias = tuple[int | None, ...]
LAYER = "model.layers."


def _unchanged(config: Config) -> Config:
    return config


def _no_head_norms(config: Config) -> bool:
    del config
    return False


def _head_norms(config: Config) -> bool:
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


@dataclass(frozen=True, slots=True)
class Family:
    """One family. Defaults are used where `config.json` states nothing."""

    classes: tuple[str, ...]
    """The classes that `architectures` in `config.json` names."""
    common_config: Callable[[Config], Config] = _unchanged
    """Translates `config.json` to the names that Llama uses."""
    tensor_names: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of Llama's tensor names, and those of this family; the first match counts."""
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
    diffusion: Diffusion | None = None
    """The conventions of a masked (diffusion) model, with the default block length of its code."""
    gguf: bool = False
    """Whether GGUF files of this family can be read."""
    gguf_permuted: bool = False
    """Whether the GGUF converter reorders the rows of queries and keys, head by head."""


# --- sliding windows ------------------------------------------------------------------------------


def _mistral_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    size = config.get("sliding_window", 4096)
    return (None if size is None else int(size),) * layers


def _window_size(config: Config, default: int | None) -> int | None:
    """The size of windows, where they are switched on."""
    if not config.get("use_sliding_window", False):
        return None
    size = config.get("sliding_window", default)
    return None if size is None else int(size)


def _listed_windows(config: Config, layers: int) -> list[bool] | None:
    """Which layers have a window by `layer_types`; None if the config does not list them."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if len(kinds) < layers:
        raise ValueError(f"layer_types names {len(kinds)} of {layers} layers")
    return [kind == "sliding_attention" for kind in kinds[:layers]]


def _qwen_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    if (size := _window_size(config, 4096)) is None:
        return (None,) * layers
    sliding = _listed_windows(config, layers)
    if sliding is None:
        first = int(config.get("max_window_layers", 28))
        sliding = [layer >= first for layer in range(layers)]
    return tuple(size if flag else None for flag in sliding)


def _qwen3_moe_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    del rope_layers
    return (_window_size(config, 4096),) * layers


# --- SmolLM3 --------------------------------------------------------------------------------------


def _smollm3_rope_layers(config: Config, layers: int) -> tuple[bool, ...]:
    listed = config.get("no_rope_layers")  # 1 for layers with RoPE, in spite of its name
    if listed is None:
        interval = int(config.get("no_rope_layer_interval") or 4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if len(listed) < layers:
        raise ValueError(f"no_rope_layers names {len(listed)} of {layers} layers")
    return tuple(bool(flag) for flag in listed[:layers])


def _smollm3_windows(config: Config, layers: int, rope_layers: tuple[bool, ...]) -> Windows:
    if (size := _window_size(config, None)) is None:
        return (None,) * layers
    sliding = _listed_windows(config, layers)
    if sliding is None:
        sliding = [not rope for rope in rope_layers]
    return tuple(size if flag else None for flag in sliding)


# --- LLaDA, LLaDA-MoE, LLaDA2, OLMoE --------------------------------------------------------------

_LLADA_ONLY = {
    "block_type": ("llama",),
    "block_group_size": (1,),
    "layer_norm_type": ("rms",),
    "activation_type": ("silu",),
    "rope": (True,),
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "include_bias": (False,),
    "bias_for_layer_norm": (False, None),
}
"""Options of LLaDA's config, and the values that are supported: those of its published checkpoints."""
_LLADA_STATED = ("block_type", "layer_norm_type", "activation_type", "rope")
"""Options whose default in LLaDA's code is not supported, so that the config must state them."""


def _llada_config(config: Config) -> Config:
    for key, known in _LLADA_ONLY.items():
        value = config.get(key, None if key in _LLADA_STATED else known[0])
        if value not in known:
            raise UnsupportedModel(f"LLaDA with {key} {value!r} is not supported")
    heads = int(config["n_heads"])
    kv_heads = config.get("n_kv_heads")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query_attention") else heads
    inner = config.get("mlp_hidden_size")
    if inner is None:
        inner = int(config.get("mlp_ratio", 4)) * int(config["d_model"])
    return {
        "hidden_size": config["d_model"],
        "intermediate_size": inner,
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": config["max_sequence_length"],
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-5),
        "rope_theta": config.get("rope_theta", 1e4),
        "tie_word_embeddings": config.get("weight_tying", True),
        "qkv_bias": bool(config.get("include_qkv_bias", False)),
        "mask_token_id": config.get("mask_token_id"),
    }


_LLADA_NAMES = {
    LAYER: "model.transformer.blocks.",
    "model.embed_tokens.": "model.transformer.wte.",
    "model.norm.": "model.transformer.ln_f.",
    "lm_head.": "model.transformer.ff_out.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ff_norm.",
    "self_attn.o_proj.": "attn_out.",
    "self_attn.": "",
    "mlp.gate_proj.": "ff_proj.",
    "mlp.up_proj.": "up_proj.",
    "mlp.down_proj.": "ff_out.",
}


def _olmoe_config(config: Config) -> Config:
    return {"rms_norm_eps": 1e-5, **config}


def _lladamoe_config(config: Config) -> Config:
    dense = max(int(config.get("dense_intermediate_size") or 0), 0)
    return {"rms_norm_eps": 1e-5, **config, "intermediate_size": dense}


def _lladamoe_head_norms(config: Config) -> bool:
    return bool(config.get("qk_layernorm"))


def _llada2_config(config: Config) -> Config:
    if config.get("norm_head"):
        raise UnsupportedModel("LLaDA2 with norm_head is not supported")
    return {
        "rms_norm_eps": 1e-5,
        "intermediate_size": 0,
        "partial_rotary_factor": 0.5,
        **config,
        "qkv_bias": config.get("use_qkv_bias", False),
        "output_bias": config.get("use_bias", True),
    }


def _llada2_head_norms(config: Config) -> bool:
    return bool(config.get("use_qk_norm", True))


_LLADA2_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    "self_attn.q_proj.": "attention.query_key_value.",
    "self_attn.k_proj.": "attention.query_key_value.",
    "self_attn.v_proj.": "attention.query_key_value.",
    "self_attn.o_proj.": "attention.dense.",
    "self_attn.q_norm.": "attention.query_layernorm.",
    "self_attn.k_norm.": "attention.key_layernorm.",
}

# --- the table ------------------------------------------------------------------------------------

FAMILIES = {
    "llama": Family(
        classes=("LlamaForCausalLM",),
        attention_bias=True,
        mlp_bias=True,
        gguf=True,
        gguf_permuted=True,
    ),
    "mistral": Family(classes=("MistralForCausalLM",), kv_heads=8, windows=_mistral_windows),
    "qwen2": Family(classes=("Qwen2ForCausalLM",), qkv_bias=True, windows=_qwen_windows, gguf=True),
    "qwen3": Family(
        classes=("Qwen3ForCausalLM",),
        head_dim=128,
        attention_bias=True,
        head_norms=_head_norms,
        windows=_qwen_windows,
        gguf=True,
    ),
    "qwen3_moe": Family(
        classes=("Qwen3MoeForCausalLM",),
        attention_bias=True,
        head_norms=_head_norms,
        windows=_qwen3_moe_windows,
        experts=experts.qwen3_moe,
    ),
    "smollm3": Family(
        classes=("SmolLM3ForCausalLM",),
        rope_theta=2e6,
        tied=True,
        attention_bias=True,
        mlp_bias=True,
        rope_layers=_smollm3_rope_layers,
        windows=_smollm3_windows,
        gguf=True,
        gguf_permuted=True,
    ),
    "olmoe": Family(
        classes=("OlmoeForCausalLM",),
        common_config=_olmoe_config,
        attention_bias=True,
        clip_qkv=True,
        head_norms=_head_norms,
        wide_norms=True,
        experts=experts.olmoe,
    ),
    "llada": Family(
        classes=("LLaDAModelLM",),
        common_config=_llada_config,
        tensor_names=_LLADA_NAMES,
        diffusion=Diffusion(),
    ),
    "lladamoe": Family(
        classes=("LLaDAMoEModel", "LLaDAMoEModelLM"),
        common_config=_lladamoe_config,
        tensor_names={
            "mlp.gate.expert_bias": "mlp.expert_bias",
            "mlp.shared_experts.": "shared_expert.",
        },
        attention_bias=True,
        clip_qkv=True,
        partial_rope=True,
        head_norms=_lladamoe_head_norms,
        experts=experts.lladamoe,
        diffusion=Diffusion(),
    ),
    "llada2_moe": Family(
        classes=("LLaDA2MoeModelLM",),
        common_config=_llada2_config,
        tensor_names=_LLADA2_NAMES,
        partial_rope=True,
        head_norms=_llada2_head_norms,
        experts=experts.llada2,
        diffusion=Diffusion(block=32),
    ),
    "Dream": Family(classes=("DreamModel",), qkv_bias=True, diffusion=Diffusion(shifted=True)),
    "sdar": Family(
        classes=("SDARForCausalLM",),
        head_dim=128,
        attention_bias=True,
        head_norms=_head_norms,
        diffusion=Diffusion(block=4, causal=True),
    ),
    "Fast_dLLM_Qwen": Family(
        classes=("Fast_dLLM_QwenForCausalLM",),
        qkv_bias=True,
        diffusion=Diffusion(block=32, shifted=True, causal=True),
    ),
}
ARCHITECTURES = {name: kind for kind, family in FAMILIES.items() for name in family.classes}
"""Classes that checkpoints name, and their families."""
