"""A tiny model with random weights and a tokenizer of bytes: it says nothing, quickly."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")
PAIRS = (('{"', '{"'), ('":', '":'), ('",', '",'), ("th", "th"), ("e ", "eĠ"), ("in", "in"))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def make(folder: Path, seed: int = 0) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    size = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    named = {"eos_token": "<|im_end|>", "bos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    config = {**CONFIG, "vocab_size": size, "eos_token_id": end, "bos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(size, seed), folder / "model.safetensors")
    return folder


def make_masked(folder: Path) -> Path:
    """One that continues texts and fills in masks, both, and hardly ever ends by itself."""
    make(folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            size = config["head_dim"]
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(size)
    tensors["lm_head.weight"][config["eos_token_id"]] = 0.0
    save_file(tensors, folder / "model.safetensors")
    kind = {"architectures": ["SDARForCausalLM"], "model_type": "sdar", "block_size": 16}
    kind["mask_token_id"] = config["bos_token_id"]
    (folder / "config.json").write_text(json.dumps(config | kind))
    return folder


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)}
    merges = []
    for _, pair in PAIRS:
        vocabulary[pair] = len(vocabulary)
        merges.append((pair[0], pair[1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def _tensors(vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers) * 0.2

    hidden, inner, narrow = 64, 128, 32
    found = {
        "model.embed_tokens.weight": random(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(vocabulary, hidden),
    }
    for layer in range(2):
        name = f"model.layers.{layer}"
        found |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": random(hidden, hidden),
            f"{name}.self_attn.k_proj.weight": random(narrow, hidden),
            f"{name}.self_attn.v_proj.weight": random(narrow, hidden),
            f"{name}.self_attn.o_proj.weight": random(hidden, hidden),
            f"{name}.mlp.gate_proj.weight": random(inner, hidden),
            f"{name}.mlp.up_proj.weight": random(inner, hidden),
            f"{name}.mlp.down_proj.weight": random(hidden, inner),
        }
    return found
