"""Tiny random models of architectures that run through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.checkpoints import save

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 8}
WINDOW = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", {}),
    "arcee": ("ArceeForCausalLM", {}),
    "biogpt": ("BioGptForCausalLM", {}),
    "bitnet": ("BitNetForCausalLM", {}),
    "cohere": ("CohereForCausalLM", {}),
    "cohere2": ("Cohere2ForCausalLM", WINDOW),
    "cwm": ("CwmForCausalLM", {**HEAD, **WINDOW}),
    "ernie4_5": ("Ernie4_5ForCausalLM", HEAD),
    "exaone4": ("Exaone4ForCausalLM", WINDOW),
    "gpt2": ("GPT2LMHeadModel", {}),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", {}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "helium": ("HeliumForCausalLM", HEAD),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", HEAD),
    "hyperclovax": ("HyperCLOVAXForCausalLM", {}),
    "jais2": ("Jais2ForCausalLM", {}),
    "modernbert-decoder": ("ModernBertDecoderForCausalLM", {}),
    "nanochat": ("NanoChatForCausalLM", {}),
    "nemotron": ("NemotronForCausalLM", {}),
    "olmo": ("OlmoForCausalLM", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "persimmon": ("PersimmonForCausalLM", {}),
    "phi": ("PhiForCausalLM", {}),
    "seed_oss": ("SeedOssForCausalLM", HEAD),
    "stablelm": ("StableLmForCausalLM", {}),
    "vaultgemma": (
        "VaultGemmaForCausalLM",
        {**HEAD, **WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "granite_swa": ("GraniteSWAForCausalLM", WINDOW),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 20}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0},
    ),
    "flex_olmo": ("FlexOlmoForCausalLM", EXPERTS),
    "granitemoe": ("GraniteMoeForCausalLM", EXPERTS),
    "jetmoe": ("JetMoeForCausalLM", {**EXPERTS, "num_key_value_heads": 2, "kv_channels": 8}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {**EXPERTS, **HEAD}),
    "phimoe": ("PhimoeForCausalLM", EXPERTS),
}
"""By model type: the class, and what differs from SMALL. The last ones have experts."""


def make(kind: str, changes: dict[str, Any] | None = None, name: str = "") -> Any:
    """A model in float32 whose random weights are large enough that logits are not flat."""
    family, own = ARCHITECTURES.get(kind, (name, {}))
    config = transformers.CONFIG_MAPPING[kind](**{**SMALL, **own, **(changes or {})})
    torch.manual_seed(0)
    model = getattr(transformers, family)(config).to(torch.float32).eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.2 * parameter.shape[-1] ** -0.5)
            elif "norm" in label or "ln_" in label:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model


def checkpoint(model: Any, folder: Path) -> Path:
    """The model as a checkpoint folder with a word-level tokenizer."""
    return save(model, folder)
