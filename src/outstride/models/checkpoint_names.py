"""Tensor names: families name the parts of the same decoder differently.

Everything else here uses the names of Llama and Qwen checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable

from outstride.models.families import FAMILIES, LAYER

HEAD = "lm_head.weight"


def places(shapes: Iterable[str], architecture: str) -> dict[str, list[str]]:
    """Tensors of a checkpoint by their own names, and the Llama names that each holds, in order.

    A file may hold queries, keys and values as one matrix; then one name stands for several.
    """
    result: dict[str, list[str]] = {}
    for name in shapes:
        result.setdefault(published(name, architecture), []).append(name)
    return result


def published(name: str, architecture: str) -> str:
    """The name that a family's checkpoints use for a tensor."""
    prefixes = FAMILIES[architecture].tensor_names
    layer, rest = "", name
    if name.startswith(LAYER):
        number, rest = name.removeprefix(LAYER).split(".", 1)
        layer = f"{prefixes.get(LAYER, LAYER)}{number}."
    for ours, theirs in prefixes.items():
        if rest.startswith(ours):
            rest = theirs + rest.removeprefix(ours)
            break
    return layer + rest
