"""The table of families in docs/models.md: what is read, where it runs, what it is verified against."""

from __future__ import annotations

from pathlib import Path

from outstride.models.config import DecoderConfig
from outstride.models.families import FAMILIES, Family
from outstride.models.gguf_architectures import GGUF_ARCHITECTURES
from outstride.ops.cpu import RUNS
from outstride.ops.weights import unusual_layers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
BEGIN = "<!-- families: written by tests/test_docs.py from models/families/ -->"
END = "<!-- end of families -->"
TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 16,
    "expert_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_layer_freq": [1, 1],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "full_attn_idxs": [0],
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.5,
    "d_model": 48,
    "n_heads": 6,
    "n_layers": 2,
    "mlp_hidden_size": 80,
    "max_sequence_length": 256,
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
}
"""Sizes of a model of any family; each reads its own keys."""
_GGUF = {each.family for each in GGUF_ARCHITECTURES.values()}


def _devices(config: DecoderConfig) -> str:
    found = ["CPU: fp32"]
    recurrent = config.switches.recurrent is not None  # the reference with packed products
    if recurrent or unusual_layers(config, runs=RUNS) is None:
        found[0] += ", int8, int4"
    if unusual_layers(config) is None:
        found.append("GPU: bf16")
    return "; ".join(found)


def _row(kind: str, family: Family) -> str:
    config = DecoderConfig.from_hf({**TINY, "model_type": kind})
    files = "safetensors, GGUF" if kind in _GGUF else "safetensors"
    oracle = "its published code" if family.diffusion is not None else "transformers"
    classes = ", ".join(f"`{name}`" for name in family.classes)
    return f"| `{kind}` | {classes} | {files} | {_devices(config)} | {oracle} |"


def families_table() -> str:
    head = "| `model_type` | `architectures` | files | devices and weights | verified against |"
    rows = [_row(kind, FAMILIES[kind]) for kind in sorted(FAMILIES, key=str.lower)]
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def models_page() -> str:
    """docs/models.md with the table as it is now; everything else is written by hand."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{families_table()}\n\n{END}{rest.partition(END)[2]}"
