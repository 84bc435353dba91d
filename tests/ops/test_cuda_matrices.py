"""How products are laid out for a card: what fixes a result's bits must not depend on rows."""

from __future__ import annotations

import pytest

from outstride.ops.cuda.layout import SIZES
from outstride.ops.cuda.matrices import LANES, STEP, grain, lanes, parts, tiles, up

WIDTHS = [16, 48, 576, 1024, 1088, 2048, 2880, 4096, 8192, 16384]
ROWS = [*SIZES, 256, 384, 4096]


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_squares_have_room(width: int) -> None:
    """Groups cover a row, and there is a power of two of them at the most."""
    assert lanes(width) * grain(width) >= width
    assert lanes(width) & (lanes(width) - 1) == 0
    assert lanes(width) <= LANES


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("inner", [64, 576, 4096, 14336])
@pytest.mark.parametrize("outer", WIDTHS)
def test_tiles_fit(outer: int, inner: int, rows: int) -> None:
    """Whole groups of columns, whole rows, and memory on the chip for all stages."""
    made = tiles(outer, inner, rows, least=max(16, grain(outer)))
    assert made.bn % grain(outer) == 0
    assert rows % made.bm == 0
    assert up(outer, 256) % made.bn == 0
    assert 2 * STEP * (made.bm + made.bn) * made.stages <= 220 << 10
    assert not made.bulk or made.bn % STEP == 0


@pytest.mark.parametrize("inner", [64, 576, 4096, 14336])
@pytest.mark.parametrize("outer", WIDTHS)
def test_parts_are_whole_steps(outer: int, inner: int) -> None:
    assert inner % (parts(outer, inner) * STEP) == 0
