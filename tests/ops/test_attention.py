"""Attention in native code: what the graph says, and the same bits in any company and any build."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from outstride.core.graph import FloatArray
from outstride.core.host_library import address
from outstride.ops.cpu import native

pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="the native kernels were not built"
)

PAGE = 16
SLOTS = 4096
CHUNK = 512
"""Positions whose weights are worked out together."""


def isas() -> list[int]:
    return list(native.isas())


def in_bytes(x: FloatArray) -> npt.NDArray[np.float64]:
    """The nearest of 255 numbers, evenly up to the largest of a head."""
    unit = np.abs(x).max(axis=-1, keepdims=True).astype(np.float64) / 127
    found: npt.NDArray[np.float64] = np.round(x / np.maximum(unit, 1e-30)) * unit
    return found


def turned(x: FloatArray) -> FloatArray:
    """As queries and keys are before they are rounded: sums and differences of dimensions."""
    wide = -(-x.shape[-1] // 16) * 16
    run = wide & -wide
    table = np.ones((1, 1))
    while len(table) < run:
        table = np.block([[table, table], [table, -table]])
    x = np.concatenate([x, np.zeros((*x.shape[:-1], wide - x.shape[-1]))], axis=-1)
    found = x.reshape(*x.shape[:-1], wide // run, run) @ table / np.sqrt(run)
    turned: FloatArray = found.reshape(x.shape).astype(np.float32)
    return turned


@dataclass
class Query:
    """A node: the slots of its keys by position (-1: nothing there), and how many lie in pages."""

    slots: list[int]
    start: int = 0
    pages: tuple[int, ...] = ()
    direct: int = 0


def chained(pages: Sequence[int], count: int, start: int = 0) -> Query:
    """A node behind an ordered cache."""
    slots = [pages[i // PAGE] * PAGE + i % PAGE for i in range(count)]
    return Query(slots, start, tuple(pages), count)


def listed(query: Query, direct: int = 0) -> Query:
    """The same node, with slots one by one from `direct` on."""
    return Query(query.slots, query.start, query.pages, direct)


@dataclass
class Cache:
    """One layer's entries, made up, and an engine for each build."""

    heads: int
    kv_heads: int
    size: int
    sharp: float = 1.0
    keys: FloatArray = field(init=False)
    values: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.size)
        shape = SLOTS, self.kv_heads, self.size
        self.keys = (self.sharp * rng.standard_normal(shape)).astype(np.float32)
        self.values = rng.standard_normal(shape).astype(np.float32)
        self._matrix = native.MatrixStruct(
            tiles=-(-(self.heads + 2 * self.kv_heads) * self.size // 16)
        )
        size = SLOTS // 16 * self.kv_heads * native.library().outstride_record(self.size)
        memory = (np.zeros(size + 64, dtype=np.uint8) for _ in range(2))
        self._memory = [m[-address(m) % 64 :][:size] for m in memory]
        self._kept = False

    def _layer(self, queries: Sequence[Query], rows: FloatArray, out: FloatArray) -> Any:
        pages, tails, places = list[int](), list[int](), dict[tuple[int, ...], int]()
        nodes = np.zeros(len(queries), dtype=native.NODE)
        for i, q in enumerate(queries):
            if q.pages not in places:
                places[q.pages] = len(pages)
                pages += q.pages
            count = len(q.slots)
            nodes[i] = i, q.start, count, q.direct, places[q.pages], len(tails)
            tails += q.slots[q.direct :]
        kept = [nodes, np.asarray([*pages, 0], np.int32), np.asarray([*tails, 0], np.int32)]
        batch = native.PassStruct(
            qkv=address(rows),
            mixed=address(out),
            pages=address(kept[1]),
            tails=address(kept[2]),
            rows=len(queries),
            heads_width=self.heads * self.size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.size,
            page_size=PAGE,
            scale=self.size**-0.5,
        )
        layer = native.LayerStruct(
            batch=ctypes.pointer(batch),
            nodes=ctypes.pointer(ctypes.c_void_p(address(nodes))),
            qkv=ctypes.pointer(self._matrix),
            keys=address(self._memory[0]),
            values=address(self._memory[1]),
        )
        return layer, kept, batch

    def rows(self, count: int) -> FloatArray:
        """A query for each node, the same in every call."""
        shape = count, self._matrix.tiles * 16
        return np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    def attend(
        self, queries: Sequence[Query], rows: FloatArray, isa: int = -1, threads: int = 2
    ) -> FloatArray:
        """What each node takes from what it sees."""
        lib, group = native.library(), self.heads // self.kv_heads
        out = np.full((len(queries), self.heads * self.size), np.nan, dtype=np.float32)
        rows = np.ascontiguousarray(rows)
        layer, *alive = self._layer(queries, rows, out)
        if not self._kept:
            slots = np.arange(SLOTS)
            lib.outstride_keep(
                layer, address(slots), SLOTS, address(self.keys), address(self.values)
            )
            self._kept = True
        scratch = lib.outstride_scratch(group, self.size, len(queries))
        engine = lib.outstride_open(threads, isas()[isa], len(queries), 64, scratch)
        lib.outstride_attend(engine, layer)
        lib.outstride_close(engine)
        assert alive
        return out

    def truth(self, query: Query, row: FloatArray) -> npt.NDArray[np.float64]:
        """The same in double precision, from what the kernels round entries to."""
        group, found = self.heads // self.kv_heads, []
        seen = [s for s in query.slots[query.start :] if s >= 0]
        for head in range(self.heads):
            q = in_bytes(turned(row[head * self.size :][: self.size]))
            scores = in_bytes(turned(self.keys[seen, head // group])) @ q * self.size**-0.5
            weights = np.exp(scores - scores.max(initial=0))
            mixed = weights @ in_bytes(self.values[seen, head // group])
            found.append(mixed / max(weights.sum(), 1e-30))
        return np.concatenate(found)


SHAPES = {
    "three in a group": Cache(6, 2, 64),
    "alone": Cache(2, 2, 32),
    "long heads": Cache(4, 1, 128),
    "not whole tiles": Cache(5, 1, 80),
    "small and odd": Cache(4, 2, 12),
    "more than a set": Cache(50, 1, 32),
    "sharp": Cache(6, 2, 64, sharp=12.0),
}
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 100, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 20, 2 * CHUNK + 77)


def pages(seed: int = 0) -> list[int]:
    """All of the cache in some order."""
    return [int(p) for p in np.random.default_rng(seed).permutation(SLOTS // PAGE)]


def some_queries(seed: int) -> list[Query]:
    """Prompts, drafts, branches, windows and gaps of several sequences."""
    rng, free, found = np.random.default_rng(seed), pages(seed), list[Query]()
    for _ in range(4):
        kept = int(rng.choice(LENGTHS))
        mine = [free.pop() for _ in range(kept // PAGE + 4)]
        first = chained(mine, kept)
        window = int(rng.integers(1, kept + 1)) if rng.random() < 0.4 else kept + 99
        kind = int(rng.integers(0, 4))
        for i in range(int(rng.integers(1, 40))):
            start = max(0, kept + 1 + i - window)
            if kind == 0:  # a chain
                found.append(chained(mine, kept + 1 + i, start))
                continue
            slots = [p * PAGE + j for p in mine[kept // PAGE :] for j in range(PAGE)]
            slots = slots[kept % PAGE :]
            if kind == 1:  # branches
                path = sorted(rng.choice(len(slots), int(rng.integers(1, 20)), replace=False))
                tail = [slots[n] for n in path]
            elif kind == 2:  # a block
                tail = slots[:9]
            else:  # gaps
                tail = [s if rng.random() < 0.6 else -1 for s in slots[:30]] + slots[30:31]
            here = min(start, kept)
            found.append(Query([*first.slots, *tail], here, first.pages, kept))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_graph_says(shape: str) -> None:
    cache, queries = SHAPES[shape], some_queries(3)
    queries += [chained(pages(9), n) for n in LENGTHS] + [Query([-1] * 20, 0, (1, 2), 0)]
    rows = cache.rows(len(queries))
    for query, row, ours in zip(queries, rows, cache.attend(queries, rows), strict=True):
        theirs = cache.truth(query, row)
        assert np.abs(ours - theirs).max() < 0.02
        assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.004


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_alone_and_in_batches(shape: str, seed: int) -> None:
    """Every build, any number of threads, any neighbours, any order."""
    cache, queries = SHAPES[shape], some_queries(seed)
    rows = cache.rows(len(queries))
    whole = cache.attend(queries, rows)
    for isa in range(len(isas())):
        found = cache.attend(queries, rows, isa, threads=1 + isa % 3)
        np.testing.assert_array_equal(found, whole)
    rng = np.random.default_rng(seed)
    for i in rng.choice(len(queries), 12):
        np.testing.assert_array_equal(cache.attend([queries[i]], rows[i : i + 1])[0], whole[i])
    order = rng.permutation(len(queries))
    found = cache.attend([queries[i] for i in order], rows[order])
    np.testing.assert_array_equal(found, whole[order])
    cut = sorted(int(n) for n in rng.choice(len(queries), 5))
    for first, last in zip([0, *cut], [*cut, len(queries)], strict=True):
        if first < last:
            found = cache.attend(queries[first:last], rows[first:last])
            np.testing.assert_array_equal(found, whole[first:last])


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_alone_and_in_batches(shape: str) -> None:
    """Chunks begin where they always do, wherever a neighbour's window begins."""
    cache = SHAPES[shape]
    queries = [chained(pages(), 2 * CHUNK + 60 + i, 37 * i) for i in range(20)]
    rows = cache.rows(len(queries))
    whole = cache.attend(queries, rows)
    for i, query in enumerate(queries):
        np.testing.assert_array_equal(cache.attend([query], rows[i : i + 1])[0], whole[i])


@pytest.mark.parametrize("shape", SHAPES)
def test_pages_and_lists_are_the_same(shape: str) -> None:
    """The same entries found one by one, wherever the list begins, and in other slots."""
    cache = SHAPES[shape]
    queries = [chained(pages(), n, start) for n in LENGTHS for start in {0, n // 2, n - 1}]
    rows = cache.rows(len(queries))
    whole = cache.attend(queries, rows)
    for direct in (0, 5, 16, 40, CHUNK - 8, CHUNK + 3):
        others = [listed(q, min(direct, len(q.slots))) for q in queries]
        np.testing.assert_array_equal(cache.attend(others, rows), whole)


def test_stale_slots_are_harmless() -> None:
    """What lies behind the end of a sequence, in the same sixteen slots, may be anything."""
    cache = Cache(6, 2, 64)
    queries = [chained(pages(), n) for n in (5, 23, CHUNK + 9)]
    rows = cache.rows(3)
    before = cache.attend(queries, rows)
    for spoilt in (np.inf, np.nan, -3e38, 1e-45):
        other = Cache(6, 2, 64)
        for query in queries:
            after = {s // PAGE * PAGE + i for s in query.slots[-1:] for i in range(PAGE)}
            hidden = sorted(after - {s for q in queries for s in q.slots})
            other.keys[hidden] = other.values[hidden] = spoilt
        np.testing.assert_array_equal(other.attend(queries, rows), before)


def test_entries_of_any_size_give_every_build_the_same() -> None:
    """Tiles take denormals for 0: none may come up, whatever the entries are."""
    cache, queries = Cache(6, 2, 64), some_queries(5)
    rng = np.random.default_rng(0)
    for entries in (cache.keys, cache.values):
        entries *= np.exp2(rng.integers(-160, 12, entries.shape)).astype(np.float32)
    rows = cache.rows(len(queries)) * np.exp2(rng.integers(-90, 6, (len(queries), 1)))
    rows = rows.astype(np.float32)
    whole = cache.attend(queries, rows, isa=0)
    for isa in range(1, len(isas())):
        np.testing.assert_array_equal(cache.attend(queries, rows, isa), whole)
