"""Tensor names: families name the parts of the same decoder differently.

Everything else here uses the names of Llama and Qwen checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from outstride.models.families import FAMILIES, LAYER

if TYPE_CHECKING:
    from outstride.models.config import DecoderConfig

HEAD = "lm_head.weight"


def places(shapes: Iterable[str], architecture: str) -> dict[str, list[str]]:
    """Tensors of a checkpoint by their own names, and the Llama names that each holds, in order.

    A file may hold queries, keys and values as one matrix; then one name stands for several.
    """
    result: dict[str, list[str]] = {}
    for name in shapes:
        result.setdefault(published(name, architecture), []).append(name)
    return result


def text_name(name: str, architecture: str) -> str | None:
    """The name of a tensor in a file without the prefix of its text part; None: it is not needed."""
    family = FAMILIES[architecture]
    if name.startswith(family.skipped):
        return None
    for theirs, ours in family.prefixes.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def not_needed(name: str, architecture: str, layers: int) -> bool:
    """Whether a tensor that is no part of the model may be in a file all the same."""
    family = FAMILIES[architecture]
    if family.extra_layers and name.startswith(LAYER):
        return int(name.removeprefix(LAYER).split(".", 1)[0]) >= layers
    return bool(family.optional) and name.endswith(family.optional)


def unfused(
    name: str, tensor: torch.Tensor, config: DecoderConfig
) -> dict[str, torch.Tensor] | None:
    """The matrices of a fused tensor by their Llama names; None: it is not fused."""
    family = FAMILIES[config.architecture]
    for end, unfuse in (*family.unfused.items(), *family.unfused_by_size(config).items()):
        if name.startswith(LAYER) and name.endswith(end):
            number = name.removeprefix(LAYER).split(".", 1)[0]
            return {f"{LAYER}{number}.{part}": found for part, found in unfuse(tensor).items()}
    return None


def published(name: str, architecture: str) -> str:
    """The name that a family's checkpoints use for a tensor."""
    family = FAMILIES[architecture]
    prefixes = family.tensor_names
    layer, rest = "", name
    if name.startswith(LAYER):
        number, rest = name.removeprefix(LAYER).split(".", 1)
        layer = f"{prefixes.get(LAYER, LAYER)}{number}."
    if rest.startswith("mlp.experts."):
        for ours, theirs in family.expert_names.items():
            rest = rest.replace(ours, theirs)
    for ours, theirs in prefixes.items():
        if rest.startswith(ours):
            rest = theirs + rest.removeprefix(ours)
            break
    return layer + rest
