"""Sizes of masked blocks in training: parsing, and how many blocks of each size fill a step."""

from __future__ import annotations

from collections.abc import Sequence


def shares(sizes: Sequence[int], nodes: int) -> list[tuple[int, int]]:
    """Pairs of blocks of each size that fill `nodes`, with about as many nodes of each size."""
    found, left = [], nodes
    for many, size in zip(range(len(sizes), 0, -1), sorted(sizes, reverse=True), strict=True):
        pairs = max(1, left // (2 * size * many)) if many > 1 else left // (2 * size)
        found.append((size, pairs))
        left -= 2 * size * pairs
    return found


def parse_sizes(text: str, nodes: int) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 2 or list(found) != sorted(set(found)):
        raise ValueError(f"sizes are rising numbers from 2 on, such as 2,4,8: {text}")
    if nodes % (2 * found[0]) or any(size % found[0] for size in found):
        raise ValueError(f"sizes and half the nodes are multiples of the first size, {found[0]}")
    if nodes < 2 * sum(found):
        raise ValueError(f"blocks of these sizes, two of each, need {2 * sum(found)} nodes")
    return found
