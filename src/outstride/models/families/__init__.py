"""`FAMILIES`: what each family of checkpoints does in its own way, one entry per `model_type`.

To add an architecture, write a file here with its own `FAMILIES`, and name the file below.
"""

from __future__ import annotations

from outstride.models.families import (
    deepseek,
    dream,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    granite_hybrid,
    lfm2,
    llada,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    qwen3_next,
    smollm3,
)
from outstride.models.families.family import LAYER, Family

__all__ = ["ARCHITECTURES", "FAMILIES", "LAYER", "Family"]

_FILES = (
    llama,
    mistral,
    qwen,
    smollm3,
    gemma,
    gemma4,
    gpt_oss,
    phi,
    granite,
    olmo,
    glm,
    qwen3_next,
    lfm2,
    granite_hybrid,
    deepseek,
    llada,
    dream,
)
FAMILIES: dict[str, Family] = {
    kind: family for file in _FILES for kind, family in file.FAMILIES.items()
}
ARCHITECTURES = {name: kind for kind, family in FAMILIES.items() for name in family.classes}
"""Classes that checkpoints name, and their families."""
