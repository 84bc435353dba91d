"""`GGUF_ARCHITECTURES`: how GGUF files of each architecture name and order what a family reads.

The metadata of a file becomes a config with the keys of `config.json`, which the family reads as it
reads that of a checkpoint. What files do not state follows from their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from outstride.errors import UnsupportedModel

if TYPE_CHECKING:
    from outstride.models.gguf_file import GgufFile

Config: TypeAlias = dict[str, Any]
Names: TypeAlias = Mapping[str, tuple[str, ...]]
SLIDING, FULL = "sliding_attention", "full_attention"
FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
_NONE = 1e20
"""RoPE factors above this stand for dimensions without RoPE."""


def _nothing(file: GgufFile) -> Config:
    del file
    return {}


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One architecture.

    family: the name of the family that reads it. config: what it has besides the common keys of a
    config. permuted: whether the converter reorders the rows of queries and keys, head by head, for
    RoPE over neighbouring dimensions. names: of tensors of a layer where they differ from
    `TENSOR_NAMES`; several names stand for several matrices in one tensor, row by row.
    """

    family: str
    config: Callable[[GgufFile], Config] = _nothing
    permuted: bool = False
    names: Names = field(default_factory=dict)


OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
"""Tensors outside of layers, and their names in checkpoints."""
TENSOR_NAMES: Names = {
    "attn_norm": ("input_layernorm",),
    "ffn_norm": ("post_attention_layernorm",),
    "post_attention_norm": ("attention_output_norm",),
    "post_ffw_norm": ("mlp_output_norm",),
    "attn_q": ("self_attn.q_proj",),
    "attn_k": ("self_attn.k_proj",),
    "attn_v": ("self_attn.v_proj",),
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": ("self_attn.o_proj",),
    "attn_q_norm": ("self_attn.q_norm",),
    "attn_k_norm": ("self_attn.k_norm",),
    "ffn_gate": ("mlp.gate_proj",),
    "ffn_up": ("mlp.up_proj",),
    "ffn_down": ("mlp.down_proj",),
    "ffn_gate_inp": ("mlp.gate",),
    "ffn_gate_exps": ("mlp.experts.{}.gate_proj",),
    "ffn_up_exps": ("mlp.experts.{}.up_proj",),
    "ffn_down_exps": ("mlp.experts.{}.down_proj",),
    "ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "ffn_gate_shexp": ("mlp.shared_experts.gate_proj",),
    "ffn_up_shexp": ("mlp.shared_experts.up_proj",),
    "ffn_down_shexp": ("mlp.shared_experts.down_proj",),
    "ffn_gate_inp_shexp": ("mlp.shared_expert_gate",),
    "inp_gate": ("per_layer_input_gate",),
    "proj": ("per_layer_projection",),
    "post_norm": ("post_per_layer_input_norm",),
}
"""Tensors of layers, and their names in Llama checkpoints; `{}` stands for the number of an expert."""
BARE_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "layer_output_scale.weight": "layer_scalar",
    "exp_probs_b.bias": "mlp.gate.expert_bias",
}
"""Tensors of layers whose names have another end."""
_MLP_NORM: Names = {"post_attention_norm": ("post_attention_layernorm",)}
_FUSED_MLP: Names = {"ffn_up": ("mlp.gate_proj", "mlp.up_proj")}


def windowed_layers(file: GgufFile, every: int | None) -> list[str]:
    """`layer_types` of a file with a window; every: which layer has none where it does not say."""
    layers, stated = file.layers, file.get("attention.sliding_window_pattern")
    if isinstance(stated, list):
        return [SLIDING if flag else FULL for flag in stated[:layers]]
    every = int(stated) if stated else every
    if not file.get("attention.sliding_window") or every == 1:
        return [FULL] * layers
    if every is None:
        return [SLIDING] * layers
    return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]


def _window(file: GgufFile, every: int | None = None) -> Config:
    size = file.get("attention.sliding_window") or None
    return {
        "sliding_window": size,
        "use_sliding_window": size is not None,
        "layer_types": windowed_layers(file, every),
    }


def _experts(file: GgufFile, *, normalized: bool) -> Config:
    """normalized: whether the weights of a token's experts sum to one, where the file is silent."""
    layers = [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in range(file.layers)]
    stated = file.get("expert_weights_norm")
    size = file.get("expert_feed_forward_length") or file.get("feed_forward_length")
    for name, info in file.tensors.items():
        if name.endswith(".ffn_down_exps.weight"):
            size = info.shape[-1]
    return {
        "num_experts": int(file.need("expert_count")),
        "num_local_experts": int(file.need("expert_count")),
        "num_experts_per_tok": int(file.need("expert_used_count")),
        "norm_topk_prob": normalized if stated is None else bool(stated),
        "moe_intermediate_size": size,
        "mlp_only_layers": [i for i, sparse in enumerate(layers) if not sparse],
        "decoder_sparse_step": 1,
    }


def _qwen3_moe(file: GgufFile) -> Config:
    return {**_window(file), **_experts(file, normalized=True)}


def _qwen2_moe(file: GgufFile) -> Config:
    found = {**_window(file), **_experts(file, normalized=False)}
    return {**found, "shared_expert_intermediate_size": _shared_size(file)}


def _shared_size(file: GgufFile) -> int:
    """The inner size of the shared expert."""
    stated, info = (
        file.get("expert_shared_feed_forward_length"),
        file.tensors.get("blk.0.ffn_up_shexp.weight"),
    )
    return int(stated or (info.shape[0] if info else 0))


def _mixtral(file: GgufFile) -> Config:
    found = _experts(file, normalized=True)
    return {**_window(file), **found, "intermediate_size": found["moe_intermediate_size"]}


def _olmoe(file: GgufFile) -> Config:
    found = _experts(file, normalized=False)
    return {
        **found,
        "intermediate_size": found["moe_intermediate_size"],
        "clip_qkv": file.get("attention.clamp_kqv"),
    }


def _gpt_oss(file: GgufFile) -> Config:
    found = _experts(file, normalized=True)
    return {
        **_window(file, every=2),
        **found,
        "intermediate_size": found["moe_intermediate_size"],
        "attention_bias": True,
    }


def _gemma(file: GgufFile, largest: int, every: int) -> Config:
    """largest: how many layers the model has whose queries are scaled by the width of all heads."""
    heads = int(file.need("attention.head_count"))
    whole = int(file.need("embedding_length")) // heads
    return {
        **_window(file, every),
        "query_pre_attn_scalar": whole if file.layers == largest else file.head_dim,
        "attn_logit_softcapping": file.get("attn_logit_softcapping"),
        "final_logit_softcapping": file.get("final_logit_softcapping"),
    }


def _gemma2(file: GgufFile) -> Config:
    return {
        **_gemma(file, 46, 2),
        "attn_logit_softcapping": file.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.get("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GgufFile) -> Config:
    return {**_gemma(file, 62, 6), "rope_local_base_freq": file.get("rope.freq_base_swa", 1e4)}


def _gemma4(file: GgufFile) -> Config:
    if file.get("expert_count", 0):
        raise UnsupportedModel("Gemma 4 with a mixture of experts is not supported")
    kinds = windowed_layers(file, 6)
    local, full = kinds.index(SLIDING), kinds.index(FULL)
    kv_heads, inner = (
        file.per_layer("attention.head_count_kv"),
        file.per_layer("feed_forward_length"),
    )
    factors = file.tensor(FACTORS).floats(slice(None)) if FACTORS in file.tensors else None
    share = 1.0 if factors is None else float((factors < _NONE).mean())
    table = file.tensors.get("per_layer_token_embd.weight")
    theta = {"rope_theta": file.get("rope.freq_base", 1e6), "partial_rotary_factor": share}
    return {
        "sliding_window": file.need("attention.sliding_window"),
        "layer_types": kinds,
        "final_logit_softcapping": file.get("final_logit_softcapping"),
        "head_dim": file.need("attention.key_length_swa"),
        "global_head_dim": file.need("attention.key_length"),
        "num_key_value_heads": kv_heads[local],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors
        and f"blk.{full}.attn_qkv.weight" not in file.tensors,
        "num_kv_shared_layers": file.get("attention.shared_kv_layers", 0),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] != inner[0],
        "hidden_size_per_layer_input": file.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": table.shape[0] if table else 0,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", **theta},
            SLIDING: {"rope_theta": file.get("rope.freq_base_swa", 1e4)},
        },
    }


def _phi3(file: GgufFile) -> Config:
    found: Config = {"sliding_window": file.get("attention.sliding_window") or None}
    original = file.get("rope.scaling.original_context_length")
    if LONG_FACTORS not in file.tensors:
        return found
    long, short = (
        file.tensor(name).floats(slice(None)).tolist() for name in (LONG_FACTORS, SHORT_FACTORS)
    )
    scaling = {
        "rope_type": "longrope",
        "rope_theta": float(file.get("rope.freq_base", 1e4)),
        "long_factor": long,
        "short_factor": short,
        "attention_factor": file.get("rope.scaling.attn_factor"),
    }
    return {**found, "rope_scaling": scaling, "original_max_position_embeddings": original}


def _granite(file: GgufFile) -> Config:
    if file.get("rope.scaling.finetuned") is False:
        raise UnsupportedModel("Granite without RoPE is not supported")
    return {
        "attention_multiplier": file.get("attention.scale") or file.head_dim**-0.5,
        "embedding_multiplier": file.get("embedding_scale") or 1.0,
        "residual_multiplier": file.get("residual_scale") or 1.0,
        "logits_scaling": file.get("logit_scale") or 1.0,
    }


def _mistral3(file: GgufFile) -> Config:
    """The factor of queries is next to the parameters of RoPE in configs."""
    beta, strength = (
        file.get("attention.temperature_scale"),
        file.get("rope.scaling.yarn_log_multiplier"),
    )
    values = {"llama_4_scaling_beta": beta, "mscale": strength, "mscale_all_dim": strength}
    found = {key: float(value) for key, value in values.items() if value}
    return {**_window(file), "rope_scaling": found}


def _olmo3(file: GgufFile) -> Config:
    """Layers with a window have RoPE without scaling."""
    theta = file.get("rope.freq_base_swa") or file.get("rope.freq_base")
    return {**_window(file, every=4), "rope_theta": theta}


GGUF_ARCHITECTURES = {
    "llama": GgufArchitecture("llama", permuted=True),
    "mistral": GgufArchitecture("mistral", _window, permuted=True),
    "mixtral": GgufArchitecture("mixtral", _mixtral, permuted=True),
    "mistral3": GgufArchitecture("mistral3", _mistral3, permuted=True),
    "qwen2": GgufArchitecture("qwen2", _window),
    "qwen2moe": GgufArchitecture("qwen2_moe", _qwen2_moe),
    "qwen3": GgufArchitecture("qwen3", _window),
    "qwen3moe": GgufArchitecture("qwen3_moe", _qwen3_moe),
    "qwen3vl": GgufArchitecture("qwen3_vl"),
    "smollm3": GgufArchitecture("smollm3", permuted=True),
    "olmo2": GgufArchitecture("olmo2"),
    "olmo3": GgufArchitecture("olmo3", _olmo3),
    "olmoe": GgufArchitecture("olmoe", _olmoe),
    "phi3": GgufArchitecture("phi3", _phi3, names=_FUSED_MLP),
    "granite": GgufArchitecture("granite", _granite, permuted=True),
    "gemma2": GgufArchitecture("gemma2", _gemma2),
    "gemma3": GgufArchitecture("gemma3_text", _gemma3),
    "gemma4": GgufArchitecture("gemma4_text", _gemma4),
    "gpt-oss": GgufArchitecture("gpt_oss", _gpt_oss, names=_MLP_NORM),
    "glm4": GgufArchitecture("glm4", names=_FUSED_MLP),
}
"""Architectures by the name in the file, or by that of `architecture_of`."""
_VARIANTS = ("mistral", "mixtral", "olmo3")
"""Names that no file has."""


def known_architectures() -> list[str]:
    """The names that files may have."""
    return [name for name in GGUF_ARCHITECTURES if name not in _VARIANTS]


def architecture_of(file: GgufFile) -> str:
    """The key of GGUF_ARCHITECTURES for a file: some names stand for several families."""
    name, window = file.architecture, bool(file.get("attention.sliding_window"))
    if name == "llama" and file.get("expert_count", 0):
        return "mixtral"
    if name == "llama" and window:
        return "mistral"
    return "olmo3" if name == "olmo2" and window else name
