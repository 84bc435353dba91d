"""The prefix tree: full pages of settled tokens, which later requests with the same prefix share."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outstride.core.prefix_key import PrefixKey


@dataclass(eq=False, slots=True)
class PrefixNode:
    """One page of the tree, below the page that precedes it."""

    page: int
    key: tuple[int, ...]
    parent: PrefixNode | None
    used: int
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)


class PrefixTree:
    """Maps runs of tokens, page by page, to the pages that hold their KV.

    Each `PrefixKey` has its own tree: the same tokens have other KV under other weights, another
    adapter or another attention pattern, and tenants can neither hit nor time each other's prompts.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[PrefixKey, PrefixNode] = {}
        self._nodes: dict[int, PrefixNode] = {}
        self._oldest: list[tuple[int, int, PrefixNode]] = []
        self._clock = itertools.count(1)

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def _root(self, key: PrefixKey) -> PrefixNode:
        return self._roots.setdefault(key, PrefixNode(page=-1, key=(), parent=None, used=0))

    def match(self, tokens: Sequence[int], max_tokens: int, key: PrefixKey) -> list[int]:
        """The pages of the longest cached prefix, of at most `max_tokens` tokens."""
        node, pages, size = self._root(key), [], self._page_size
        for start in range(0, max_tokens - size + 1, size):
            found = node.children.get(tuple(tokens[start : start + size]))
            if found is None:
                break
            self._touch(found)
            pages.append(found.page)
            node = found
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], key: PrefixKey) -> list[int]:
        """Adds a prefix of full pages; returns the page that the tree has for each of them.

        A page that already holds the same tokens stays in the tree: equal prefixes have equal KV.
        """
        node, stored, size = self._root(key), [], self._page_size
        for i, page in enumerate(pages):
            run = tuple(tokens[i * size : (i + 1) * size])
            child = node.children.get(run)
            if child is None:
                child = PrefixNode(page=page, key=run, parent=node, used=0)
                node.children[run] = child
                self._nodes[page] = child
            self._touch(child)
            stored.append(child.page)
            node = child
        return stored

    def _touch(self, node: PrefixNode) -> None:
        node.used = next(self._clock)
        self._offer(node)

    def _offer(self, node: PrefixNode) -> None:
        heapq.heappush(self._oldest, (node.used, node.page, node))
        if len(self._oldest) > 64 + 8 * len(self._nodes):
            self._oldest = [(x.used, x.page, x) for x in self._nodes.values()]
            heapq.heapify(self._oldest)

    def released(self, page: int) -> None:
        """Notes that no sequence uses a page any more: it may be evicted."""
        if page in self._nodes:
            self._offer(self._nodes[page])

    def evict(self, idle: Callable[[int], bool]) -> int | None:
        """Removes the least recently used idle page without pages below it; None if there is none."""
        while self._oldest:
            used, page, node = heapq.heappop(self._oldest)
            if self._nodes.get(page) is not node or node.used != used:
                continue
            if node.children or not idle(page):
                continue
            del self._nodes[page]
            parent = node.parent
            if parent is not None:
                del parent.children[node.key]
                if parent.page >= 0:
                    self._offer(parent)
            return page
        return None
