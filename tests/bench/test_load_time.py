"""Measuring how a model loads."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from outstride.bench import load_time
from outstride.bench.new_process import anonymous
from outstride.errors import OutstrideError
from tests.models.checkpoints import make, save


def test_anonymous_memory_grows_with_what_is_written() -> None:
    before = anonymous()
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, 8 << 20, flags=kind) as held:  # an array might get memory that was freed
        held.write(b"1" * (8 << 20))
        assert anonymous() - before > 6 << 20


def test_a_first_start_and_a_later_one(tmp_path: Path) -> None:
    folder = save(make("llama"), tmp_path / "model")
    report = load_time.measure(str(folder), "cpu", "auto", later=1)
    assert report.first.weights == report.later[0].weights != "auto"
    found = report.summary()
    assert found["memory_ratio"] >= 1
    assert 0 < found["later_seconds"] < 60
    assert [sample["start"] for sample in report.samples()] == ["first", "later"]


def test_a_model_that_does_not_load(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OutstrideError, match="could not be loaded"):
        load_time.measure(str(tmp_path / "none.gguf"), "cpu", "auto")
    assert "no file or folder" in capfd.readouterr().err
