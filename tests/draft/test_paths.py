"""The likeliest paths: compiled and in Python alike, and what an exhaustive search finds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from outstride.core import host
from outstride.core.contracts import Graft
from outstride.core.graph import FloatArray, IntArray
from outstride.core.guess import Guess
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence, View
from outstride.draft.paths import Paths
from outstride.registry import build, discover

needs_host = pytest.mark.skipif(host.library() is None, reason="nothing was compiled")
VOCABULARY, OWN, RANK = 40, 30, 12


def view_of(temperature: float) -> View:
    discover()
    params = SamplingParams(temperature=temperature)
    sequence = Sequence(0, 0, [3, 7, OWN + 5], 3, params, 11, build("plain"), 100)
    return View(sequence, {}, 100)


def part(rng: np.random.Generator) -> Graft:
    """Tables in which tokens outside the part's own have a row in front and none behind."""
    rows = np.full(VOCABULARY, OWN)
    rows[:OWN] = rng.permutation(OWN)
    before, after = (rng.normal(size=(n, RANK)).astype(np.float32) for n in (OWN + 1, OWN))
    return Graft("block-drafter", 8, 0, rows, before, after)


def candidates(rng: np.random.Generator, levels: int, size: int) -> tuple[IntArray, FloatArray]:
    tokens = np.stack([rng.permutation(OWN)[:size] for _ in range(levels)])
    values = np.sort(rng.normal(size=(levels, size)), axis=1)[:, ::-1].astype(np.float32)
    return tokens, values


def same(one: Guess, other: Guess) -> None:
    assert (one.tokens, one.parents) == (other.tokens, other.parents)
    assert one.signs == other.signs
    assert np.allclose(one.chances, other.chances, atol=1e-5)


@needs_host
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(20))
def test_compiled_as_in_python(seed: int, temperature: float) -> None:
    rng, view = np.random.default_rng(seed), view_of(temperature)
    graft = part(rng)
    levels, size, width, room = (int(n) for n in rng.integers((1, 1, 1, 1), (8, 17, 6, 24)))
    tokens, values = candidates(rng, levels, size)
    guesses = []
    for lib in (host.library(), None):
        paths = Paths(view, graft, width)
        guesses.append(paths.through(tokens, values, room, "block-drafter", lib))
    same(*guesses)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_host), False])
def test_the_best_of_all_paths(compiled: bool) -> None:
    rng, view = np.random.default_rng(5), view_of(0.0)
    graft = part(rng)
    tokens, values = candidates(rng, 3, 4)
    paths = Paths(view, graft, width=64)  # wide enough to lose nothing
    lib = host.library() if compiled else None
    found = paths.through(tokens, values, 10_000, "block-drafter", lib)

    def chance(before: int, level: int, place: int) -> float:
        scores = values[level] + graft.after[graft.rows[tokens[level]]] @ graft.before[
            graft.rows[before]
        ].astype(np.float64)
        powers = np.exp(scores - scores.max())
        return float(powers[place] / powers.sum())

    expected = {}
    for deep in (1, 2, 3):
        for places in product(range(4), repeat=deep):
            said, reached = [view.tokens[-1]], 1.0
            for level, place in enumerate(places):
                reached *= chance(said[-1], level, place)
                said.append(int(tokens[level, place]))
            expected[tuple(said[1:])] = reached
    written: dict[tuple[int, ...], float] = {}
    ways: list[tuple[int, ...]] = []
    for token, parent, own in zip(found.tokens, found.parents, found.chances, strict=True):
        above = ways[parent] if parent >= 0 else ()
        ways.append((*above, token))
        written[ways[-1]] = own * written.get(above, 1.0)
    assert written.keys() == expected.keys()
    assert all(abs(written[way] - expected[way]) < 1e-5 for way in expected)


@needs_host
@pytest.mark.parametrize("token", [-1, OWN, VOCABULARY])
def test_a_token_without_a_row_is_refused(token: int) -> None:
    graft = part(np.random.default_rng(1))
    tokens, values = np.asarray([[1, token]]), np.zeros((1, 2), dtype=np.float32)
    with pytest.raises(IndexError, match="tables do not have"):
        Paths(view_of(0.0), graft, 2).through(tokens, values, 9, "eagle", host.library())
