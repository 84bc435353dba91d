"""Tiny random checkpoints in the published formats of diffusion models.

Names and shapes are written down here as those models' own code has them, apart from what the
loader believes. Values are a function of the tensor's name alone, from a generator that numpy has
frozen, so that logits which the published code gave once can be compared for ever.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, SIZE = 64, 48, 80, 3, 6, 2, 8
EXPERTS, EXPERT, CONTEXT = 8, 20, 256
MASK, BLOCK = 61, 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": HIDDEN,
        "n_heads": HEADS,
        "n_kv_heads": KV_HEADS,
        "n_layers": LAYERS,
        "mlp_hidden_size": INNER,
        "mlp_ratio": 4,
        "max_sequence_length": CONTEXT,
        "vocab_size": VOCAB - 3,
        "embedding_size": VOCAB,
        "activation_type": "silu",
        "block_type": "llama",
        "block_group_size": 1,
        "layer_norm_type": "rms",
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 500.0,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": True,
        "bias_for_layer_norm": False,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
        "embedding_dropout": 0.0,
        "weight_tying": False,
        "mask_token_id": MASK,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
    "lladamoe": {
        **{key: value for key, value in _COMMON.items() if key != "intermediate_size"},
        "architectures": ["LLaDAMoEModelLM"],
        "model_type": "lladamoe",
        "dense_intermediate_size": INNER,
        "expert_intermediate_size": EXPERT,
        "shared_expert_intermediate_size": 28,
        "moe_layer_freq": [0, 1, 1],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "norm_topk_prob": None,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "softmax",
        "routed_scaling_factor": 1,
        "qk_layernorm": True,
        "partial_rotary_factor": 1,
        "attention_bias": False,
        "clip_qkv": None,
    },
    "llada2_moe": {
        **_COMMON,
        "architectures": ["LLaDA2MoeModelLM"],
        "model_type": "llada2_moe",
        "head_dim": SIZE,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
        "norm_head": False,
        "moe_intermediate_size": EXPERT,
        "first_k_dense_replace": 1,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "block_size": BLOCK,
    },
    "Dream": {
        **_COMMON,
        "architectures": ["DreamModel"],
        "model_type": "Dream",
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 28,
        "mask_token_id": MASK,
    },
    "sdar": {
        **_COMMON,
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "head_dim": 2 * SIZE,
        "attention_bias": False,
        "fuse_cross_entropy": False,
        "use_sliding_window": False,
        "block_size": BLOCK,
        "mask_token_id": MASK,
    },
    "Fast_dLLM_Qwen": {
        **_COMMON,
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bd_size": BLOCK,
    },
}
"""`config.json` of each, with the names that its published checkpoints use."""
MASKS = {"lladamoe": "<|mask|>", "llada2_moe": "<|mask|>", "Fast_dLLM_Qwen": "|<MASK>|"}
"""The added token that stands for a mask, where no config names its id."""

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _mlp(at: str, inner: int) -> Shapes:
    yield f"{at}gate_proj.weight", (inner, HIDDEN)
    yield f"{at}up_proj.weight", (inner, HIDDEN)
    yield f"{at}down_proj.weight", (HIDDEN, inner)


def _llada() -> Shapes:
    wide = KV_HEADS * SIZE
    yield "model.transformer.wte.weight", (VOCAB, HIDDEN)
    yield "model.transformer.ln_f.weight", (HIDDEN,)
    yield "model.transformer.ff_out.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.transformer.blocks.{layer}."
        for name in ("attn_norm", "ff_norm"):
            yield f"{at}{name}.weight", (HIDDEN,)
        for name, size in (("q", HIDDEN), ("k", wide), ("v", wide)):
            yield f"{at}{name}_proj.weight", (size, HIDDEN)
            yield f"{at}{name}_proj.bias", (size,)
        yield f"{at}attn_out.weight", (HIDDEN, HIDDEN)
        yield f"{at}ff_proj.weight", (INNER, HIDDEN)
        yield f"{at}up_proj.weight", (INNER, HIDDEN)
        yield f"{at}ff_out.weight", (HIDDEN, INNER)


def _qwen(size: int, *, biases: bool, norms: bool, tied: bool = False) -> Shapes:
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    if not tied:
        yield "lm_head.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (HIDDEN,)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            yield f"{at}self_attn.{name}_proj.weight", (heads * size, HIDDEN)
            if biases:
                yield f"{at}self_attn.{name}_proj.bias", (heads * size,)
        yield f"{at}self_attn.o_proj.weight", (HIDDEN, HEADS * size)
        if norms:
            yield f"{at}self_attn.q_norm.weight", (size,)
            yield f"{at}self_attn.k_norm.weight", (size,)
        yield from _mlp(f"{at}mlp.", INNER)


def _lladamoe() -> Shapes:
    sparse = [f"model.layers.{layer}." for layer in (1, 2)]
    for name, shape in _qwen(SIZE, biases=False, norms=True):
        if not any(name.startswith(f"{at}mlp.") for at in sparse):
            yield name, shape
    for at in sparse:
        yield f"{at}mlp.gate.weight", (EXPERTS, HIDDEN)
        yield f"{at}mlp.expert_bias", (EXPERTS,)
        yield from _mlp(f"{at}shared_expert.", 28)
        for expert in range(EXPERTS):
            yield from _mlp(f"{at}mlp.experts.{expert}.", EXPERT)


def _llada2() -> Shapes:
    yield "model.word_embeddings.weight", (VOCAB, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (HIDDEN,)
        yield f"{at}attention.query_key_value.weight", ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN)
        yield f"{at}attention.dense.weight", (HIDDEN, HEADS * SIZE)
        yield f"{at}attention.query_layernorm.weight", (SIZE,)
        yield f"{at}attention.key_layernorm.weight", (SIZE,)
        if layer == 0:
            yield from _mlp(f"{at}mlp.", INNER)
            continue
        yield f"{at}mlp.gate.weight", (EXPERTS, HIDDEN)
        yield f"{at}mlp.gate.expert_bias", (EXPERTS,)
        yield from _mlp(f"{at}mlp.shared_experts.", EXPERT)
        for expert in range(EXPERTS):
            yield from _mlp(f"{at}mlp.experts.{expert}.", EXPERT)


_SHAPES: dict[str, Callable[[], Shapes]] = {
    "llada": _llada,
    "lladamoe": _lladamoe,
    "llada2_moe": _llada2,
    "Dream": lambda: _qwen(SIZE, biases=True, norms=False),
    "sdar": lambda: _qwen(2 * SIZE, biases=False, norms=True),
    "Fast_dLLM_Qwen": lambda: _qwen(SIZE, biases=True, norms=False, tied=True),
}


def tensors(family: str) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights, large enough that attention, routing and logits are not flat."""
    result = {}
    for name, shape in _SHAPES[family]():
        values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        if name.endswith("expert_bias"):
            values *= 0.1
        elif "norm" in name or "ln_f" in name:
            values = 1 + 0.2 * values
        else:
            values *= 0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        if shape == (VOCAB, HIDDEN):
            values[MASK] *= 0.05  # as in trained models, nothing is filled in with a mask
        result[name] = values.astype(np.float32)
    return result


def save(family: str, folder: Path) -> Path:
    """A checkpoint folder with weights, config and a tokenizer of words."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(family), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(MASK)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(MASKS.get(family, "<|gap|>"), special=True)])
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2"}))
    return folder


# --- what is asked of them ------------------------------------------------------------------------

LENGTH = 40
"""Tokens of the text that is read, in whole blocks."""


def text(family: str) -> list[int]:
    """A text without masks."""
    source = np.random.RandomState(zlib.crc32(family.encode()))
    return [int(token) for token in source.randint(0, MASK, LENGTH)]


def canvas(family: str) -> list[int]:
    """The same text with three quarters of its second half masked."""
    tokens = text(family)
    return [MASK if i >= LENGTH // 2 and i % 4 != 1 else token for i, token in enumerate(tokens)]


def rows(count: int) -> list[int]:
    """The rows of which logits are kept."""
    return sorted({0, 1, count // 2, count - 2, count - 1})


def prompts(family: str) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens are to be written behind each: up to the end of a block.

    Models that see blocks count them from the beginning of the text, others from the end of the prompt.
    """
    tokens, blocks = text(family), bool({"block_size", "bd_size"} & set(CONFIGS[family]))
    return [(tokens[:5], 12 - blocks), (tokens[7:15], 12), (tokens[20:33], 12 - blocks)]
