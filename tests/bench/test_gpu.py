"""The GPU benchmark, as far as it needs no GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outstride.bench import gpu


@pytest.mark.parametrize("package", ["transformers", "gguf"])
def test_there_is_no_figure_of_transformers_where_it_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    loaded: Any = SimpleNamespace(path=Path("model.gguf"))
    assert gpu.transformers(loaded) == {}


def test_a_row_without_a_measured_peer_shows_neither_a_figure_nor_a_verdict() -> None:
    row = gpu.generation_row("greedy, one request, plain", 100.0, None, {})
    assert (row.theirs, row.ratio, row.met) == (None, None, None)
    assert row.to_dict()["theirs"] is None
    assert row.to_dict()["other"] == "transformers (not installed)"
    measured = gpu.generation_row("greedy, one request, plain", 100.0, 2.0, {})
    assert (measured.ratio, measured.met, measured.other) == (50.0, True, "transformers")
