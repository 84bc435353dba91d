"""Tiny random checkpoints of models with recurrent layers, made by transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.models.checkpoints import SMALL

DELTA = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
MAMBA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}

HYBRIDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3 next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA, **MIXTURE}),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA),
    "qwen3.5 moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**DELTA, **MIXTURE}),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", CONV),
    "lfm2 biases": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**CONV, "conv_bias": True, "block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    ),
    "granite hybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**MAMBA, "num_local_experts": 4},
    ),
    "granite hybrid dense": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {**MAMBA, "num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1},
    ),
}


def make_hybrid(variant: str, seed: int = 0, **more: Any) -> Any:
    """A transformers model in float32 with random weights, decays and norms included."""
    config, model_class, changes = HYBRIDS[variant]
    torch.manual_seed(seed)
    values = {**SMALL, **changes, **more}
    model = getattr(transformers, model_class)(getattr(transformers, config)(**values))
    model = model.to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif name.endswith("A_log"):  # slow enough that a state remembers for a while
                parameter.copy_(torch.rand_like(parameter) * 2 - 2.5)
            elif name.endswith(("bias", ".D")):
                parameter.copy_(0.5 * torch.randn_like(parameter))
    return model
