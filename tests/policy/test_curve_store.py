"""Cost curves on disk: measured once, used again only where they belong, never in the way."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.engine.engine import Engine
from outstride.models.toy import Toy
from outstride.policy import curve_store, policy, profiling
from outstride.policy.config import DEFAULT_CONFIG, AutoConfig
from outstride.policy.cost_model import CostModel
from outstride.policy.curve_store import CurveStore
from outstride.policy.policy import DraftPolicy

registry.discover()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each time that passes are measured."""
    calls, real = list[int](), profiling.measure

    def measure(*args: Any, **options: Any) -> CostModel | None:
        calls.append(1)
        return real(*args, **options)

    monkeypatch.setattr(policy, "measure", measure)
    return calls


def engine_in(folder: Path | None, toy: Toy | None = None, **options: Any) -> Engine:
    """An engine that has answered one request with `auto`."""
    engine = Engine({TARGET: toy or Toy(pages=80)}, policy=DraftPolicy(folder=folder, **options))
    engine.submit([5], SamplingParams(max_tokens=2), registry.build("auto"))
    while engine.busy:
        engine.step()
    return engine


def test_a_second_engine_does_not_measure(tmp_path: Path, measured: list[int]) -> None:
    first = DraftPolicy(folder=tmp_path / "curves")
    toy = Toy(pages=80)
    engine = Engine({TARGET: toy}, policy=first)
    engine.warm_up(registry.build("auto"))
    engine_in(tmp_path / "curves")
    assert len(measured) == 1
    second = DraftPolicy(folder=tmp_path / "curves")
    second.profile(toy, Engine({TARGET: toy}).runner.pools[TARGET], 256)
    assert len(measured) == 1
    assert first.cost_model is not None
    assert second.cost_model is not None
    assert second.cost_model.knots == first.cost_model.knots
    assert second.cost_model.prefill.per_node == first.cost_model.prefill.per_node
    assert not second.cost_model.frozen


def test_without_a_folder_nothing_is_kept(tmp_path: Path, measured: list[int]) -> None:
    engine_in(None)
    engine_in(None)
    assert len(measured) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "",
        lambda record: "{",
        lambda record: "[]",
        lambda record: json.dumps(record | {"knots": {"1": -1.0}}),
        lambda record: json.dumps(record | {"knots": {"1": float("nan")}}),
        lambda record: json.dumps(record | {"knots": {"1": "fast"}}),
        lambda record: json.dumps(record | {"knots": {}}),
        lambda record: json.dumps(record | {"prefill": {}}),
        lambda record: json.dumps(record | {"prefill": record["prefill"] | {"per_node": 0.0}}),
        lambda record: json.dumps(record | {"key": record["key"] | {"host": "another"}}),
        lambda record: json.dumps({k: v for k, v in record.items() if k != "key"}),
    ],
)
def test_a_damaged_file_is_measured_anew(tmp_path: Path, measured: list[int], damage: Any) -> None:
    engine_in(tmp_path)
    [path] = tmp_path.iterdir()
    path.write_text(damage(json.loads(path.read_text())))
    engine_in(tmp_path)
    assert len(measured) == 2
    engine_in(tmp_path)
    assert len(measured) == 2  # the file was written anew


def test_other_machines_models_and_settings_have_their_own(
    tmp_path: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_in(tmp_path)
    engine_in(tmp_path, Toy(accent=1, pages=80))
    engine_in(tmp_path, config=AutoConfig(profiling_rounds=3))
    assert len(measured) == 3
    for name, value in (("_cpu_model", "another"), ("_num_threads", 77)):
        with monkeypatch.context() as patch:
            patch.setattr(curve_store, name, lambda value=value: value)
            engine_in(tmp_path)
    assert len(measured) == 5
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    engine_in(tmp_path)
    assert len(measured) == 6


def test_a_server_needs_the_cost_of_long_prompts(tmp_path: Path, measured: list[int]) -> None:
    toy = Toy(pages=800, context=4096)
    pool = Engine({TARGET: toy}).runner.pools[TARGET]
    for long_prefill in (False, True, True, False):
        DraftPolicy(folder=tmp_path).profile(toy, pool, 256, long_prefill=long_prefill)
    assert len(measured) == 2


def test_a_frozen_curve_is_not_stored(tmp_path: Path) -> None:
    store = CurveStore(tmp_path)
    key = store.key("toy", 64, DEFAULT_CONFIG)
    store.save(key, CostModel({1: 1.0}, frozen=True), long_prefill=False)
    assert list(tmp_path.iterdir()) == []
    engine = Engine(
        {TARGET: Toy()}, policy=DraftPolicy(CostModel({1: 1.0}, frozen=True), folder=tmp_path)
    )
    engine.warm_up(registry.build("auto"))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path, measured: list[int]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert engine_in(blocked / "curves").policy.cost_model is not None

    def full(self: Path, *args: Any, **options: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert engine_in(tmp_path / "curves").policy.cost_model is not None
    assert list((tmp_path / "curves").iterdir()) == []  # no part of a file is left
    assert len(measured) == 2


def test_progress_is_reported_while_passes_are_measured(tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    for _ in range(2):
        engine_in(tmp_path, on_progress=lambda done, total: reported.append((done, total)))
    total = reported[0][1]
    assert reported == [(done, total) for done in range(total + 1)]
