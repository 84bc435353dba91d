"""The toy's draft heads, found by their kind."""

from __future__ import annotations

from dataclasses import replace

from outstride.models.toy import Toy


def head_of(toy: Toy, kind: str, *, device_chain: bool = False) -> str:
    """The name of a draft head of this kind; device_chain: which finds chains on the device."""
    name = next(name for name, head in toy.draft_heads.items() if head.kind == kind)
    if device_chain:
        toy.draft_heads[name] = replace(toy.draft_heads[name], device_chain=True)
    return name
