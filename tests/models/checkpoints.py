"""Tiny random checkpoints of every supported architecture, made by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}

MIXTURE = {"num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "head_dim": 8}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("Llama", {"head_dim": 16}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1}),
    "llama no groups": ("Llama", {"num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
    "llama theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}}),
    "llama linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 16}),
    "llama yarn untruncated": (
        "Llama",
        {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 20.0}, "head_dim": 32},
    ),
    "llama yarn attention factor": (
        "Llama",
        {"rope_parameters": {**YARN, "attention_factor": 0.8, "beta_slow": 2.0}, "head_dim": 32},
    ),
    "llama yarn mscale": (
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, "head_dim": 32},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral window": ("Mistral", {"sliding_window": 20, "head_dim": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied biases": (
        "Qwen3",
        {"head_dim": 12, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3 layer types": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 moe": ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": True}),
    "qwen3 moe mixed": (
        "Qwen3Moe",
        {**MIXTURE, "mlp_only_layers": [2], "decoder_sparse_step": 1, "attention_bias": True},
    ),
    "qwen3 moe window": (
        "Qwen3Moe",
        {**MIXTURE, "use_sliding_window": True, "sliding_window": 12, "decoder_sparse_step": 2},
    ),
    "olmoe": ("Olmoe", MIXTURE),
    "olmoe clipped": ("Olmoe", {**MIXTURE, "clip_qkv": 0.8, "norm_topk_prob": True}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3 listed": (
        "SmolLM3",
        {
            "no_rope_layers": [1, 0, 1],
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 12,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
}


def make(variant: str, seed: int = 0, **more: Any) -> Any:
    """A transformers model in float32 with random weights, norms and biases included."""
    family, changes = VARIANTS[variant]
    values = {**SMALL, **changes, **more}
    config = getattr(transformers, f"{family}Config")(**values)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


def save(model: Any, folder: Path, **options: Any) -> Path:
    """The model as a checkpoint with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model.save_pretrained(folder, **options)
    vocab = {f"w{i}": i for i in range(97)}
    words = Tokenizer(models.WordLevel(vocab=vocab, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2"}))
    return folder


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits of transformers for a whole text."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found
