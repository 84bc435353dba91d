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

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 2.0, 2.5, 4.0],
    "long_factor": [1.5, 2.0, 4.0, 8.0, 8.5, 16.0],
    "original_max_position_embeddings": 32,
}
WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]

GEMMA = {"initializer_range": 0.1, "tie_word_embeddings": True}
GEMMA4 = {
    **GEMMA,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 20,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}
GROWING = {
    **YARN,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 28,
}
VISION: dict[str, dict[str, Any]] = {
    "Mistral3": {**_TOWER, "model_type": "pixtral", "head_dim": 8},
    "Gemma3": {**_TOWER, "model_type": "siglip_vision_model"},
    "Qwen3VL": {
        "model_type": "qwen3_vl_vision",
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 48,
        "deepstack_visual_indexes": [0],
    },
}
"""Tiny vision towers, whose tensors are skipped."""
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
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
    "qwen2 moe": ("Qwen2Moe", {**MIXTURE, "shared_expert_intermediate_size": 28}),
    "qwen2 moe mixed": (
        "Qwen2Moe",
        {
            **MIXTURE,
            "shared_expert_intermediate_size": 36,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 2,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral window": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 15, "head_dim": 12},
    ),
    "olmoe": ("Olmoe", MIXTURE),
    "olmoe clipped": ("Olmoe", {**MIXTURE, "clip_qkv": 0.8, "norm_topk_prob": True}),
    "phi3": ("Phi3", {"original_max_position_embeddings": 256}),
    "phi3 partial": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
            "head_dim": 16,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    "phi3 long": (
        "Phi3",
        {
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
            "hidden_size": 96,
            "original_max_position_embeddings": 32,
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite tied": (
        "Granite",
        {
            "embedding_multiplier": 6.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.4,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 18, "layer_types": WINDOWS}),
    "olmo3 yarn": (
        "Olmo3",
        {
            "sliding_window": 18,
            "layer_types": WINDOWS,
            "head_dim": 16,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "num_key_value_heads": 2}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": False}),
    "llama dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 10, **GEMMA},
    ),
    "gemma2 caps": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            **GEMMA,
        },
    ),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 20, "layer_types": WINDOWS, **GEMMA},
    ),
    "gemma4": (
        "Gemma4",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 97,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma4 own kv": ("Gemma4", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gpt oss": (
        "GptOss",
        {**MIXTURE, "num_local_experts": 9, "sliding_window": 12, "layer_types": WINDOWS},
    ),
    "ministral": ("Ministral", {"sliding_window": 20, "layer_types": WINDOWS, "head_dim": 8}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": GROWING}),
    "mistral3 nested": (
        "Mistral3",
        {"head_dim": 16, "text_config": "ministral3", "rope_parameters": GROWING},
    ),
    "gemma3 nested": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 20,
            "layer_types": WINDOWS,
            "text_config": "gemma3_text",
            **GEMMA,
        },
    ),
    "qwen3 vl": ("Qwen3VL", {"head_dim": 16, "text_config": "qwen3_vl_text"}),
    "deepseek v2": (
        "DeepseekV2",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "num_key_value_heads": 6},
    ),
    "deepseek v3": (
        "DeepseekV3",
        {
            **LATENT,
            "n_group": 4,
            "topk_group": 2,
            "num_key_value_heads": 6,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "glm 4.7 flash": (
        "Glm4MoeLite",
        {**LATENT, "n_group": 1, "topk_group": 1, "num_key_value_heads": 6},
    ),
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
    nested, kind = values.pop("text_config", None), "ForCausalLM"
    if nested:
        config = getattr(transformers, f"{family}Config")(
            text_config={**values, "model_type": nested},
            vision_config=VISION[family],
            tie_word_embeddings=bool(values.get("tie_word_embeddings")),
        )
        kind = "ForConditionalGeneration"
    else:
        own = getattr(transformers, f"{family}TextConfig", None)
        config = (own or getattr(transformers, f"{family}Config"))(**values)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}{kind}")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand_like(buffer))
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
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
