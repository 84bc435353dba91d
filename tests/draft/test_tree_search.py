"""Tree search: compiled code agrees with Python, and both with an exhaustive search."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from outstride.core import host_library
from outstride.core.draft_heads import BigramTable
from outstride.core.draft_tree import DraftTree
from outstride.core.graph import FloatArray, IntArray
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence, View
from outstride.draft.tree_search import TreeSearch
from outstride.registry import build, discover

needs_host = pytest.mark.skipif(host_library.library() is None, reason="nothing was compiled")
VOCABULARY, OWN, RANK = 40, 30, 12
"""OWN: the tokens that the draft head can draft."""


def view_of(temperature: float) -> View:
    discover()
    params = SamplingParams(temperature=temperature)
    sequence = Sequence(0, 0, [3, 7, OWN + 5], 3, params, 11, build("plain"), 100)
    return View(sequence, {}, 100)


def random_bigram(rng: np.random.Generator) -> BigramTable:
    """Random tables; tokens outside the draft head's own have a row on the left side only."""
    rows = np.full(VOCABULARY, OWN)
    rows[:OWN] = rng.permutation(OWN)
    left, right = (rng.normal(size=(n, RANK)).astype(np.float32) for n in (OWN + 1, OWN))
    return BigramTable(rows, left, right)


def candidates(rng: np.random.Generator, levels: int, size: int) -> tuple[IntArray, FloatArray]:
    tokens = np.stack([rng.permutation(OWN)[:size] for _ in range(levels)])
    values = np.sort(rng.normal(size=(levels, size)), axis=1)[:, ::-1].astype(np.float32)
    return tokens, values


def assert_same(one: DraftTree, other: DraftTree) -> None:
    assert (one.tokens, one.parents) == (other.tokens, other.parents)
    assert one.keys == other.keys
    assert np.allclose(one.rates, other.rates, atol=1e-5)


@needs_host
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(20))
def test_compiled_search_equals_python(seed: int, temperature: float) -> None:
    rng, view = np.random.default_rng(seed), view_of(temperature)
    bigram = random_bigram(rng)
    levels, size, width, budget = (int(n) for n in rng.integers((1, 1, 1, 1), (8, 17, 6, 24)))
    tokens, values = candidates(rng, levels, size)
    drafts = []
    for lib in (host_library.library(), None):
        search = TreeSearch(view, bigram, width)
        drafts.append(search.all_levels(tokens, values, budget, "block-drafter", lib))
    assert_same(*drafts)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_host), False])
def test_search_finds_the_best_of_all_paths(compiled: bool) -> None:
    rng, view = np.random.default_rng(5), view_of(0.0)
    bigram = random_bigram(rng)
    tokens, values = candidates(rng, 3, 4)
    search = TreeSearch(view, bigram, width=64)  # wide enough to lose nothing
    lib = host_library.library() if compiled else None
    found = search.all_levels(tokens, values, 10_000, "block-drafter", lib)

    def rate(before: int, level: int, place: int) -> float:
        right, left = bigram.right[bigram.rows[tokens[level]]], bigram.left[bigram.rows[before]]
        scores = values[level] + right @ left.astype(np.float64)
        powers = np.exp(scores - scores.max())
        return float(powers[place] / powers.sum())

    expected = {}
    for depth in (1, 2, 3):
        for places in product(range(4), repeat=depth):
            path, path_rate = [view.tokens[-1]], 1.0
            for level, place in enumerate(places):
                path_rate *= rate(path[-1], level, place)
                path.append(int(tokens[level, place]))
            expected[tuple(path[1:])] = path_rate
    drafted: dict[tuple[int, ...], float] = {}
    paths: list[tuple[int, ...]] = []
    for token, parent, own in zip(found.tokens, found.parents, found.rates, strict=True):
        above = paths[parent] if parent >= 0 else ()
        paths.append((*above, token))
        drafted[paths[-1]] = own * drafted.get(above, 1.0)
    assert drafted.keys() == expected.keys()
    assert all(abs(drafted[path] - expected[path]) < 1e-5 for path in expected)


@needs_host
@pytest.mark.parametrize("token", [-1, OWN, VOCABULARY])
def test_a_token_without_a_row_is_refused(token: int) -> None:
    bigram = random_bigram(np.random.default_rng(1))
    tokens, values = np.asarray([[1, token]]), np.zeros((1, 2), dtype=np.float32)
    with pytest.raises(IndexError, match="tables do not have"):
        TreeSearch(view_of(0.0), bigram, 2).all_levels(
            tokens, values, 9, "eagle", host_library.library()
        )


def test_without_a_bigram_table_logits_stand_as_they_are() -> None:
    """As with a table of zeros, for candidates of all paths and for those of each path."""
    rng, view = np.random.default_rng(3), view_of(0.8)
    tokens, values = candidates(rng, 2, 6)
    each_tokens, each_values = candidates(rng, 3, 6)
    drafts = []
    for bigram in (None, BigramTable.zeros(VOCABULARY)):
        search = TreeSearch(view, bigram, width=3)
        for level in range(2):
            search.grow(tokens[level], values[level])
        search.grow(each_tokens, each_values)
        drafts.append(search.likeliest(8, "eagle"))
    assert (drafts[0].tokens, drafts[0].parents) == (drafts[1].tokens, drafts[1].parents)
    assert drafts[0].rates == drafts[1].rates
