"""Llama."""

from __future__ import annotations

from outstride.models.families.family import Family

FAMILIES = {
    "llama": Family(
        classes=("LlamaForCausalLM",),
        attention_bias=True,
        mlp_bias=True,
    ),
}
