"""How products are laid out for a GPU: what fixes a result's bits must not depend on rows."""

from __future__ import annotations

import pytest

from outstride.ops.cuda.matrices import (
    MAX_NORM_GROUPS,
    STEP,
    norm_group,
    norm_groups,
    num_splits,
    round_up,
    tiles_for,
)
from outstride.ops.cuda.metadata import ROW_SIZES

WIDTHS = [16, 48, 576, 1024, 1088, 2048, 2880, 4096, 8192, 16384]
ROWS = [*ROW_SIZES, 256, 384, 4096]


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_groups_cover_a_row(width: int) -> None:
    """Groups cover a row, and their number is rounded up to a power of two."""
    assert norm_groups(width) * norm_group(width) >= width
    assert norm_groups(width) & (norm_groups(width) - 1) == 0
    assert norm_groups(width) <= MAX_NORM_GROUPS


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", [64, 576, 4096, 14336])
@pytest.mark.parametrize("outer", WIDTHS)
def test_tiles_fit(outer: int, inner: int, rows: int) -> None:
    """Whole groups of columns, whole rows, and shared memory for all stages."""
    made = tiles_for(outer, inner, rows, min_columns=max(16, norm_group(outer)))
    assert made.bn % norm_group(outer) == 0
    assert rows % made.bm == 0
    assert round_up(outer, 256) % made.bn == 0
    assert 2 * STEP * (made.bm + made.bn) * made.stages <= 220 << 10
    assert not made.bulk or made.bn % STEP == 0


@pytest.mark.parametrize("inner", [64, 576, 4096, 14336])
@pytest.mark.parametrize("outer", WIDTHS)
def test_parts_are_whole_steps(outer: int, inner: int) -> None:
    assert inner % (num_splits(outer, inner) * STEP) == 0
