"""The prefix tree: full pages of settled tokens, found again by later requests."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(eq=False, slots=True)
class Leaf:
    """One page of the tree, below the page that precedes it."""

    page: int
    key: tuple[int, ...]
    parent: Leaf | None
    used: int
    children: dict[tuple[int, ...], Leaf] = field(default_factory=dict)


Key: TypeAlias = tuple[str, int | None]
"""A salt, and in blocks of which size tokens were read (None: causally)."""


class PrefixTree:
    """Maps runs of tokens, page by page, to pages that hold their entries.

    Each salt has a tree of its own, so tenants can neither hit nor time each other's prompts; and so
    has each way of reading, for the same tokens have other entries when read in blocks.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[Key, Leaf] = {}
        self._leaves: dict[int, Leaf] = {}
        self._oldest: list[tuple[int, int, Leaf]] = []
        self._clock = itertools.count(1)

    def __contains__(self, page: int) -> bool:
        return page in self._leaves

    def __len__(self) -> int:
        return len(self._leaves)

    def __iter__(self) -> Iterator[int]:
        return iter(self._leaves)

    def _root(self, key: Key) -> Leaf:
        return self._roots.setdefault(key, Leaf(page=-1, key=(), parent=None, used=0))

    def match(self, tokens: Sequence[int], most: int, key: Key) -> list[int]:
        """Pages that hold the longest known prefix, of `most` tokens at the most."""
        leaf, pages, size = self._root(key), [], self._page_size
        for start in range(0, most - size + 1, size):
            found = leaf.children.get(tuple(tokens[start : start + size]))
            if found is None:
                break
            self._touch(found)
            pages.append(found.page)
            leaf = found
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], key: Key) -> list[int]:
        """Files a prefix of full pages; returns the page that the tree has for each of them.

        Where another page already holds the same tokens, that one stays: equal prefixes have equal
        entries.
        """
        leaf, filed, size = self._root(key), [], self._page_size
        for i, page in enumerate(pages):
            run = tuple(tokens[i * size : (i + 1) * size])
            child = leaf.children.get(run)
            if child is None:
                child = Leaf(page=page, key=run, parent=leaf, used=0)
                leaf.children[run] = child
                self._leaves[page] = child
            self._touch(child)
            filed.append(child.page)
            leaf = child
        return filed

    def _touch(self, leaf: Leaf) -> None:
        leaf.used = next(self._clock)
        self._offer(leaf)

    def _offer(self, leaf: Leaf) -> None:
        heapq.heappush(self._oldest, (leaf.used, leaf.page, leaf))
        if len(self._oldest) > 64 + 8 * len(self._leaves):
            self._oldest = [(x.used, x.page, x) for x in self._leaves.values()]
            heapq.heapify(self._oldest)

    def released(self, page: int) -> None:
        """No sequence uses a page any more: it may be evicted."""
        if page in self._leaves:
            self._offer(self._leaves[page])

    def evict(self, idle: Callable[[int], bool]) -> int | None:
        """Takes the least recently used page that is idle and has nothing below it."""
        while self._oldest:
            used, page, leaf = heapq.heappop(self._oldest)
            if self._leaves.get(page) is not leaf or leaf.used != used:
                continue
            if leaf.children or not idle(page):
                continue
            del self._leaves[page]
            parent = leaf.parent
            if parent is not None:
                del parent.children[leaf.key]
                if parent.page >= 0:
                    self._offer(parent)
            return page
        return None
