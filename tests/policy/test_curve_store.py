"""Cost curves on disk: learned by answers, used again only where they belong, never in the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.engine.engine import Engine
from outstride.models.toy import Toy
from outstride.policy import curve_store, policy, profiling
from outstride.policy.config import DEFAULT_CONFIG
from outstride.policy.cost_model import CostModel, DraftSource
from outstride.policy.cost_prior import OTHER, SHAPES
from outstride.policy.curve_store import CurveStore
from outstride.policy.policy import DraftPolicy

registry.discover()


def some_toy(build: str = "toy", **options: Any) -> Toy:
    """A model of this build. It counts its passes."""
    toy = Toy(**({"pages": 80} | options))
    toy.build = build
    return toy


def answered(
    folder: Path | None, toy: Toy | None = None, *, tokens: int = 40, **options: Any
) -> Engine:
    """An engine that has answered one request with `auto`."""
    engine = Engine({TARGET: toy or some_toy()}, policy=DraftPolicy(folder=folder, **options))
    engine.submit([5], SamplingParams(max_tokens=tokens, ignore_eos=True), registry.build("auto"))
    while engine.busy:
        engine.step()
    return engine


def begun(folder: Path, toy: Toy | None = None) -> CostModel:
    """The cost model of a new process, before its first pass."""
    engine = Engine({TARGET: toy or some_toy()}, policy=DraftPolicy(folder=folder))
    engine.warm_up(registry.build("auto"))
    assert engine.cost is not None
    return engine.cost


def is_prior(cost: CostModel) -> bool:
    return tuple(cost.knots.values()) == SHAPES[OTHER].nodes


def record_of(folder: Path) -> dict[str, Any]:
    [path] = folder.iterdir()
    found = json.loads(path.read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("stored", [True, False])
def test_no_pass_is_made_but_those_of_the_answer(tmp_path: Path, stored: bool) -> None:
    if stored:
        answered(tmp_path)
    toy = some_toy()
    engine = Engine({TARGET: toy}, policy=DraftPolicy(folder=tmp_path))
    method = registry.build("auto")
    engine.warm_up(method)
    sequence = engine.submit([5], SamplingParams(max_tokens=20, ignore_eos=True), method)
    assert toy.passes == 0
    while engine.busy:
        engine.step()
    assert toy.passes == sequence.counts.passes


def test_a_server_makes_no_pass_before_its_first_request(tmp_path: Path) -> None:
    toy = some_toy(pages=800, context=4096)
    engine = Engine({TARGET: toy}, policy=DraftPolicy(folder=tmp_path))
    engine.warm_up()
    assert toy.passes == 0
    assert engine.cost is not None


def test_a_second_process_begins_with_what_the_first_has_learned(tmp_path: Path) -> None:
    engine = answered(tmp_path / "curves")
    second = begun(tmp_path / "curves")
    assert not second.frozen
    learned = record_of(tmp_path / "curves")["learned"]
    assert second.knots[1] == pytest.approx(learned["1"], rel=0.3)
    assert not is_prior(second)
    shares = second.draft_shares()
    assert shares.keys() == set(DraftSource)
    assert engine.cost is not None
    assert shares[DraftSource.LOOKUP] != DEFAULT_CONFIG.lookup_cost_prior


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    answered(None)
    assert list(tmp_path.iterdir()) == []


def test_curves_are_stored_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 16, 32, 64, 128 and 256 steps."""
    saved = []
    monkeypatch.setattr(CurveStore, "save", lambda *args, **options: saved.append(1))
    answered(tmp_path, some_toy(context=1024, pages=400), tokens=400)
    assert 3 <= len(saved) <= 5


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "",
        lambda record: "{",
        lambda record: "[]",
        lambda record: json.dumps(record | {"learned": {"1": -1.0}}),
        lambda record: json.dumps(record | {"learned": {"1": 0.0}}),
        lambda record: json.dumps(record | {"learned": {"0": 1.0}}),
        lambda record: json.dumps(record | {"learned": {"1": float("nan")}}),
        lambda record: json.dumps(record | {"learned": {"1": "fast"}}),
        lambda record: json.dumps(record | {"learned": []}),
        lambda record: json.dumps(record | {"drafts": {"telepathy": 1.0}}),
        lambda record: json.dumps(record | {"prefill": {}}),
        lambda record: json.dumps(
            record | {"prefill": {"per_node": 0.0, "per_pair": 0.0, "per_cached": 0.0, "flat": 0.0}}
        ),
        lambda record: json.dumps(record | {"key": record["key"] | {"cpu": "another"}}),
        lambda record: json.dumps({k: v for k, v in record.items() if k != "key"}),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(tmp_path: Path, damage: Any) -> None:
    answered(tmp_path)
    [path] = tmp_path.iterdir()
    path.write_text(damage(json.loads(path.read_text())))
    assert is_prior(begun(tmp_path))
    answered(tmp_path)
    assert not is_prior(begun(tmp_path))


def test_other_machines_models_and_builds_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(tmp_path)
    assert not is_prior(begun(tmp_path))
    assert is_prior(begun(tmp_path, some_toy(accent=1)))
    assert is_prior(begun(tmp_path, some_toy(build="another")))
    for name, value in (("_cpu_model", "another"), ("_num_cores", 77)):
        with monkeypatch.context() as patch:
            patch.setattr(curve_store, name, lambda value=value: value)
            assert is_prior(begun(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert is_prior(begun(tmp_path))


def test_the_cost_of_prefill_is_stored_once_it_is_known(tmp_path: Path) -> None:
    store, toy = CurveStore(tmp_path), some_toy()
    key, cost = store.key(toy), SHAPES[OTHER].cost_model(DEFAULT_CONFIG)
    cost.observe(1, 0.01)
    store.save(key, cost)
    assert record_of(tmp_path)["prefill"] is None
    found = store.load(key, DEFAULT_CONFIG)
    assert found is not None
    assert found.prefill.per_node == pytest.approx(0.01 * SHAPES[OTHER].prefill[0])
    cost.observe(17, 0.02, [(16, 100)], [(1, 100)])
    store.save(key, cost)
    found = store.load(key, DEFAULT_CONFIG)
    assert found is not None
    assert found.prefill.per_node == pytest.approx(cost.prefill.per_node)
    assert found.prefill.per_pair == pytest.approx(cost.prefill.per_pair)


def test_a_frozen_curve_is_not_stored(tmp_path: Path) -> None:
    store = CurveStore(tmp_path)
    store.save(store.key(Toy()), CostModel({1: 1.0}, frozen=True))
    assert list(tmp_path.iterdir()) == []
    frozen = CostModel({1: 1.0, 64: 2.0}, frozen=True)
    engine = Engine({TARGET: some_toy()}, policy=DraftPolicy(frozen, folder=tmp_path))
    engine.submit([5], SamplingParams(max_tokens=40, ignore_eos=True), registry.build("auto"))
    while engine.busy:
        engine.step()
    assert list(tmp_path.iterdir()) == []
    assert frozen.knots == {1: 1.0, 64: 2.0}


def test_a_curve_that_was_set_is_not_stored_for_the_machine(tmp_path: Path) -> None:
    engine = Engine({TARGET: some_toy()}, policy=DraftPolicy(folder=tmp_path))
    engine.cost = CostModel({1: 1.0, 64: 2.0})
    engine.submit([5], SamplingParams(max_tokens=40, ignore_eos=True), registry.build("auto"))
    while engine.busy:
        engine.step()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert answered(blocked / "curves").cost is not None

    def full(self: Path, *args: Any, **options: Any) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert answered(tmp_path / "curves").cost is not None
    assert list((tmp_path / "curves").iterdir()) == []  # no part of a file is left


# --- where no prior is known --------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One element for each time that passes are measured."""
    calls, real = list[int](), profiling.measure

    def measure(*args: Any, **options: Any) -> CostModel | None:
        calls.append(1)
        return real(*args, **options)

    monkeypatch.setattr(policy, "measure", measure)
    return calls


def test_on_a_gpu_passes_are_measured_once(tmp_path: Path, measured: list[int]) -> None:
    first = begun(tmp_path, some_toy(build="cuda bf16"))
    second = begun(tmp_path, some_toy(build="cuda bf16"))
    assert len(measured) == 1
    assert second.knots == pytest.approx(first.knots)
    assert second.reference == first.reference
    assert second.prefill.per_node == first.prefill.per_node
    answered(tmp_path, some_toy(build="cuda bf16"))
    assert begun(tmp_path, some_toy(build="cuda bf16")).reference == first.reference
    assert len(measured) == 1


def test_a_gpu_server_needs_the_cost_of_long_prompts(tmp_path: Path, measured: list[int]) -> None:
    toy = some_toy(build="cuda", pages=800, context=4096)
    pool = Engine({TARGET: toy}).pool()
    for long_prefill in (False, True, True, False):
        DraftPolicy(folder=tmp_path).begin(toy, pool, 256, long_prefill=long_prefill)
    assert len(measured) == 2
