"""What threads found, merged: compiled and in numpy alike."""

from __future__ import annotations

import numpy as np
import pytest

from outstride.core import host
from outstride.ops.cpu import native
from outstride.ops.cpu.products import NONE, merged


@pytest.mark.skipif(host.library() is None, reason="nothing was compiled")
@pytest.mark.parametrize("seed", range(20))
def test_compiled_as_in_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    threads, rows, k = (int(n) for n in rng.integers(1, 9, 3))
    best = np.full((threads, rows, k), NONE)
    values = rng.integers(0, 4, best.shape).astype(np.float32)  # with ties
    best["value"] = -np.sort(-values, axis=2)
    best["token"] = np.arange(best.size).reshape(best.shape)
    if threads > 1:
        best[rng.integers(1, threads)] = NONE  # one that took no part
    tables = [np.concatenate([best.ravel(), best.ravel()]) for _ in range(2)]
    one = merged(tables[0], threads, rows, k, host.library())
    other = merged(tables[1], threads, rows, k, None)
    assert np.array_equal(one[0], other[0])
    assert np.array_equal(one[1], other[1])
    for table in tables:  # as much as was used is empty again, and no more
        assert (table[: best.size] == NONE).all()
        assert np.array_equal(table[best.size :], best.ravel())


@pytest.mark.skipif(host.library() is None, reason="nothing was compiled")
def test_tables_that_do_not_fit_are_refused() -> None:
    lib = host.library()
    assert lib is not None
    best = np.full(7, NONE, dtype=native.BEST)
    with pytest.raises(ValueError, match="do not fit"):
        merged(best, 2, 2, 2, lib)
