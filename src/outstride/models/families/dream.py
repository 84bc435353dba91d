"""Dream, SDAR and Fast-dLLM: masked diffusion models with the layers of Qwen."""

from __future__ import annotations

from outstride.models.diffusion import Diffusion
from outstride.models.families.family import Family, head_norms_always

FAMILIES = {
    "Dream": Family(classes=("DreamModel",), qkv_bias=True, diffusion=Diffusion(shifted=True)),
    "sdar": Family(
        classes=("SDARForCausalLM",),
        head_dim=128,
        attention_bias=True,
        head_norms=head_norms_always,
        diffusion=Diffusion(block=4, causal=True),
    ),
    "Fast_dLLM_Qwen": Family(
        classes=("Fast_dLLM_QwenForCausalLM",),
        qkv_bias=True,
        diffusion=Diffusion(block=32, shifted=True, causal=True),
    ),
}
