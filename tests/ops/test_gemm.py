"""What threads found, merged: compiled and in numpy alike."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from outstride.core import host_library
from outstride.ops.cpu import Cpu, native
from outstride.ops.cpu.gemm import NONE, merged
from outstride.ops.cpu.int8 import Int8Matrix
from tests.models.drive import random_decoder, tiny


@pytest.mark.skipif(host_library.library() is None, reason="nothing was compiled")
@pytest.mark.parametrize("seed", range(20))
def test_compiled_as_in_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    threads, rows, k = (int(n) for n in rng.integers(1, 9, 3))
    best = np.full((threads, rows, k), NONE)
    values = rng.integers(0, 4, best.shape).astype(np.float32)  # with ties
    best["value"] = values
    best["token"] = rng.permutation(best.size).reshape(best.shape)  # whichever thread took it
    order = np.lexsort((best["token"], -best["value"]), axis=2)
    best = np.take_along_axis(best, order, axis=2)
    if threads > 1:
        best[rng.integers(1, threads)] = NONE  # one that took no part
    tables = [np.concatenate([best.ravel(), best.ravel()]) for _ in range(2)]
    one = merged(tables[0], threads, rows, k, host_library.library())
    other = merged(tables[1], threads, rows, k, None)
    assert np.array_equal(one[0], other[0])
    assert np.array_equal(one[1], other[1])
    for row, chosen in enumerate(one[0].tolist()):
        there = best[:, row].ravel()
        there = there[np.lexsort((there["token"], -there["value"]))]
        assert chosen == there["token"][:k].tolist()
    for table in tables:  # as much as was used is empty again, and no more
        assert (table[: best.size] == NONE).all()
        assert np.array_equal(table[best.size :], best.ravel())


@pytest.mark.skipif(host_library.library() is None, reason="nothing was compiled")
def test_tables_that_do_not_fit_are_refused() -> None:
    lib = host_library.library()
    assert lib is not None
    best = np.full(7, NONE, dtype=native.BEST)
    with pytest.raises(ValueError, match="different sizes"):
        merged(best, 2, 2, 2, lib)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_of_equal_results_the_lowest_channel_comes_first(threads: int) -> None:
    """Whichever thread took it, and in whatever order."""
    model = random_decoder(tiny(), pages=4, make_ops=partial(Cpu.of, count=threads), rounded=True)
    ops = model.ops
    assert isinstance(ops, Cpu)
    rng = np.random.default_rng(threads)
    rows = rng.normal(size=(80, 64)).astype(np.float32)
    matrix = Int8Matrix.of(np.concatenate([rows] * 8), None, 64)
    for count in (1, 3, 12) * 8:
        x = rng.normal(size=(count, 64)).astype(np.float32)
        found, values = ops.gemm.highest(x, matrix, 16)
        np.testing.assert_array_equal(found[:, :8], found[:, :1] + 80 * np.arange(8))
        np.testing.assert_array_equal(found[:, 8:], found[:, 8:9] + 80 * np.arange(8))
        assert (found[:, ::8] < 80).all()
        assert (values[:, 0] == values[:, 7]).all()
