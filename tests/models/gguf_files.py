"""GGUF files of transformers models, written with the `gguf` package as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

Kind = gguf.GGMLQuantizationType
BIG = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
"""Rows that are whole blocks of 32."""
ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_text": "qwen3vl",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "olmo3": "olmo2",
}
"""Of files, by `model_type`, where they differ."""
PERMUTED = ("llama", "mistral", "mixtral", "ministral3", "smollm3", "granite")


def interleave(values: Any, heads: int) -> Any:
    """The order of rows that llama.cpp's converter writes for queries and keys."""
    half = values.shape[0] // heads // 2
    split = values.reshape(heads, 2, half, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))


def write(
    model: Any, path: Path, kind: Any = Kind.F32, *, permuted: bool | None = None, **options: Any
) -> Path:
    """Writes a model; with a lossy kind, the model's own weights are rounded alike.

    architecture: of the file; metadata: functions of the writer; tensors: more of them; without:
    names that are left out; kinds: by parts of names of tensors that are not rounded in the model;
    shards: tensors in each file.
    """
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    named = options.get("architecture", architecture)
    writer = gguf.GGUFWriter(path, named, split_max_tensors=options.get("shards", 0))
    describe(writer, config, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    size = config.vocab_size
    writer.add_token_list(["w", "1", "w1", *(f"x{i}" for i in range(size - 3))])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["w 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for add in options.get("metadata", ()):
        add(writer)
    for name, values in options.get("tensors", {}).items():
        writer.add_tensor(name, values)
    permuted = config.model_type in PERMUTED if permuted is None else permuted
    round_weights(model, kind)
    for name, values in tensors(model, architecture, permuted=permuted):
        if name in options.get("without", ()):
            continue
        used = Kind.F32 if values.ndim == 1 or "ffn_gate_inp" in name else kind
        for part, other in options.get("kinds", {}).items():
            used = other if part in name and values.ndim > 1 else used
        if used == Kind.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def round_weights(model: Any, kind: Any) -> None:
    """Rounds the matrices of a model to what a type of block can hold, row by row."""
    if kind == Kind.F32:
        return
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or ".router." in name or name.endswith("mlp.gate.weight"):
            continue
        values = parameter.detach().numpy()
        packed = gguf.quants.quantize(values, kind)
        rounded = gguf.quants.dequantize(packed, kind).astype(np.float32)
        parameter.data.copy_(torch.from_numpy(rounded))


def describe(writer: Any, config: Any, architecture: str) -> None:
    """The metadata that the converter writes."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture != "gemma4":  # has its own
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
        if (size := getattr(config, "head_dim", None)) is not None:
            writer.add_key_length(size)
            writer.add_value_length(size)
    ropes = config.rope_parameters
    full = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(full["rope_theta"])
    if "sliding_attention" in ropes:
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    _scaling(writer, config, full)
    if count := getattr(config, "num_local_experts", getattr(config, "num_experts", None)):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if inner := getattr(config, "moe_intermediate_size", None):
            writer.add_expert_feed_forward_length(inner)
        if architecture == "gpt-oss":
            writer.add_expert_feed_forward_length(config.intermediate_size)
        if (norm := getattr(config, "norm_topk_prob", None)) is not None:
            writer.add_expert_weights_norm(norm)
    if shared := getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(shared)
    own = {"granite": _granite, "gemma4": _gemma4}.get(architecture)
    if own is not None:
        own(writer, config)
    if getattr(config, "clip_qkv", None) is not None:
        writer.add_clamp_kqv(config.clip_qkv)
    for name in ("attn", "final"):
        cap = getattr(config, f"{name}_logit_softcapping", None)
        if cap is not None:
            getattr(writer, f"add_{name}_logit_softcapping")(cap)
    _windows(writer, config)


def _scaling(writer: Any, config: Any, rope: Any) -> None:
    if rope["rope_type"] == "proportional":
        return
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if (share := rope.get("partial_rotary_factor")) is not None and rope["rope_type"] == "default":
        writer.add_rope_dimension_count(int(size * share))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "llama_4_scaling_beta" in rope:
            writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_dimension_count(2 * len(rope["short_factor"]))
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
        for name in ("long", "short"):
            values = np.array(rope[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", values)


def _windows(writer: Any, config: Any) -> None:
    size, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if size is None or getattr(config, "use_sliding_window", True) is False:
        return
    writer.add_sliding_window(size)
    if kinds and "sliding_attention" in kinds and "full_attention" in kinds:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])


def _granite(writer: Any, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


def _gemma4(writer: Any, config: Any) -> None:
    local = [kind == "sliding_attention" for kind in config.layer_types]
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    full = layers[local.index(False)].head_dim
    windowed = layers[local.index(True)].head_dim
    shared, wide = config.num_kv_shared_layers, config.use_double_wide_mlp
    first = config.num_hidden_layers - shared
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_key_length(full)
    writer.add_value_length(full)
    writer.add_key_length_swa(windowed)
    writer.add_value_length_swa(windowed)
    inner = config.intermediate_size
    writer.add_feed_forward_length(
        [inner * (2 if wide and i >= first else 1) for i in range(config.num_hidden_layers)]
    )
    writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(windowed)
    share = config.rope_parameters["full_attention"]["partial_rotary_factor"]
    half = full // 2
    rotated = int(half * share)
    values = [1.0] * rotated + [1e30] * (half - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(values, dtype=np.float32))


def tensors(model: Any, architecture: str, *, permuted: bool) -> Iterator[tuple[str, Any]]:
    """Names and values as the converter writes them."""
    config = model.config
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], config.num_hidden_layers)
    listed = [*model.named_parameters(), *model.named_buffers()]
    for name, parameter in listed:
        if "inv_freq" in name or "embed_scale" in name or name.endswith("_scale"):
            continue
        for own, tensor in _experts(name, parameter.detach(), config.model_type):
            values = np.ascontiguousarray(tensor.numpy())
            if permuted and ".q_proj." in own:
                values = interleave(values, config.num_attention_heads)
            if permuted and ".k_proj." in own:
                values = interleave(values, config.num_key_value_heads)
            if architecture in ("gemma2", "gemma3") and own.endswith("norm.weight"):
                values = values + 1
            if own.endswith("shared_expert_gate.weight"):
                values = values[0]
            own = own + ".weight" if own.endswith(("sinks", "layer_scalar")) else own
            found = names.get_name(own, try_suffixes=(".weight", ".bias"))
            assert found is not None, own
            yield found, values


def _experts(name: str, tensor: Any, kind: str) -> Iterator[tuple[str, Any]]:
    """Stacked experts of transformers as the tensors that the converter makes of them."""
    if "experts.gate_up_proj" in name:
        end = ".bias" if name.endswith("_bias") else ".weight"
        at = name.removesuffix("_bias").removesuffix("gate_up_proj")
        if kind == "gpt_oss":
            rows = tensor if end == ".bias" else tensor.transpose(1, 2)
            parts = rows[:, 0::2], rows[:, 1::2]
        else:
            parts = tensor.chunk(2, dim=1)
        yield f"{at}gate_proj{end}", parts[0]
        yield f"{at}up_proj{end}", parts[1]
    elif "experts.down_proj" in name and "shared" not in name:
        end = ".bias" if name.endswith("_bias") else ".weight"
        down = tensor.transpose(1, 2) if kind == "gpt_oss" and end == ".weight" else tensor
        yield name.removesuffix("_bias") + end, down
    else:
        yield name, tensor
