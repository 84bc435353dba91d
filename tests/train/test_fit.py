"""The training loop: the same weights again, after a kill too, and files that are whole."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outstride.errors import InvalidData, InvalidParams, OutstrideError, UnknownMethod
from outstride.train import checkpoint, loop, recipe
from outstride.train import fit as fitting
from outstride.train.fit import TrainingSchedule
from tests.train.bigram import SIZE, Bigram, Stub, rows, run

LAST = "checkpoint/last.safetensors"


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def break_off(monkeypatch: pytest.MonkeyPatch, out: Path, after: int, **course: Any) -> None:
    """Ctrl-C during a step: the step is finished, kept, and that is all."""
    real, steps = loop.advance, 0

    def advance(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps == after:
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(fitting, "advance", advance)
    with pytest.raises(KeyboardInterrupt):
        run(out, **course)
    monkeypatch.setattr(fitting, "advance", real)


def test_a_training_learns_and_writes_all_files(tmp_path: Path) -> None:
    fitted = run(tmp_path / "a", every=10)
    assert fitted.trained["tokens_per_pass"] > 1.7 > 1.3 > fitted.untrained["tokens_per_pass"]
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"config.json", "model.safetensors", "recipe.json", "loss.svg"}
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config == {
        "outstride": "bigram",
        "version": 1,
        "target": {"name": "stub", "vocab_size": SIZE},
        "size": SIZE,
    }
    about = json.loads((tmp_path / "a" / "recipe.json").read_text())
    assert [entry["step"] for entry in about["measured"]] == [0, 10, 20, 30, 40]
    assert about["run"]["options"] == {"spread": 0.1}
    assert about["run"]["seed"] == 0
    assert about["data"] == {"model": "stub"}
    assert about["losses"][-1][0] == 40
    assert about["losses"][-1][1] < about["losses"][0][1]
    stored = weights(tmp_path / "a")
    assert stored["after.weight"].dtype == torch.float16
    assert stored["counts"].dtype == torch.int32
    assert (tmp_path / "a" / "loss.svg").read_text().startswith("<svg")


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path / name, seed=seed)
    assert_same(tmp_path / "a", tmp_path / "b")
    assert not torch.equal(
        weights(tmp_path / "a")["after.weight"], weights(tmp_path / "c")["after.weight"]
    )


@pytest.mark.parametrize("after", [1, 13, 39])
def test_a_resumed_run_gives_the_same_weights(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "whole")
    break_off(monkeypatch, tmp_path / "part", after)
    assert not (tmp_path / "part" / "model.safetensors").exists()
    with monkeypatch.context() as patch:
        first: list[int] = []
        real = loop.bucketed_batches
        patch.setattr(fitting, "bucketed_batches", lambda *a: first.append(a[2]) or real(*a))  # type: ignore[func-returns-value]
        run(tmp_path / "part")
    assert first == [after]
    assert_same(tmp_path / "whole", tmp_path / "part")
    told = [json.loads((tmp_path / n / "recipe.json").read_text()) for n in ("whole", "part")]
    assert told[0]["losses"] == told[1]["losses"]
    assert told[0]["measured"] == told[1]["measured"]
    assert not (tmp_path / "part" / "checkpoint").exists()


def test_a_process_that_is_killed_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """However unlucky the moment: it writes checkpoints all the time."""
    steps, out = 300, tmp_path / "killed"
    command = [sys.executable, "-m", "tests.train.bigram", str(out), str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while not (out / LAST).exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(0.05)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert (out / LAST).exists()
    run(out, steps=steps)
    run(tmp_path / "whole", steps=steps)
    assert_same(out, tmp_path / "whole")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), InvalidData),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["full disk", "kill"],
)
def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    fault: BaseException,
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "part"
    break_off(monkeypatch, out, 20)
    good = (out / LAST).read_bytes()

    def half(tensors: dict[str, torch.Tensor], place: Path, about: dict[str, str]) -> None:
        save_file(tensors, place, about)
        place.write_bytes(place.read_bytes()[:100])
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", half)
        patch.setattr(fitting, "KEEP", 0.0)
        with pytest.raises(error) as caught:
            run(out)
        if error is InvalidData:
            assert "No space left on device" in str(caught.value)
            assert "free some space" in str(caught.value)
    assert (out / LAST).read_bytes() == good
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["last.safetensors"]
    run(out)
    run(tmp_path / "whole")
    assert_same(out, tmp_path / "whole")


def test_a_damaged_checkpoint_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_off(monkeypatch, tmp_path, 5)
    (tmp_path / LAST).write_bytes((tmp_path / LAST).read_bytes()[:-50])
    with pytest.raises(InvalidData, match=r"damaged.*delete"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 3}, "seed was 0 there and is 3 now"),
        ({"steps": 41}, "steps was 40 there and is 41 now"),
        ({"spread": 0.2}, "spread was 0.1 there and is 0.2 now"),
        ({"target": Stub(name="other")}, "name was 'stub' there and is 'other' now"),
    ],
)
@pytest.mark.parametrize("over", [False, True], ids=["begun", "over"])
def test_another_recipe_in_the_folder_is_refused(
    change: dict[str, Any],
    named: str,
    over: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if over:
        run(tmp_path)
    else:
        break_off(monkeypatch, tmp_path, 5)
    with pytest.raises(InvalidData, match=named):
        run(tmp_path, **change)


def test_a_training_that_is_over_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path)
    monkeypatch.setattr(fitting, "advance", None)
    again = run(tmp_path)
    assert again.was_finished
    assert (again.trained, again.untrained, again.steps) == (first.trained, first.untrained, 40)
    (tmp_path / "recipe.json").unlink()
    with pytest.raises(InvalidData, match="choose another folder"):
        run(tmp_path)


def test_a_loss_that_is_no_number_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Bigram.loss
    monkeypatch.setattr(Bigram, "loss", lambda *args: real(*args) * float("nan"))
    with pytest.raises(OutstrideError, match="lower --peak"):
        run(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_minutes_choose_the_steps_and_teach_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.seconds_per_step
    monkeypatch.setattr(loop, "_REHEARSED", (1, 3))
    monkeypatch.setattr(fitting, "seconds_per_step", lambda *a: 1.0 if real(*a) else 0.0)
    fitted = run(tmp_path / "a", steps=None, minutes=0.5)
    assert fitted.steps in (28, 29, 30)  # measuring takes some of the time
    run(tmp_path / "b", steps=fitted.steps)
    assert_same(tmp_path / "a", tmp_path / "b")


def test_eight_bits_for_large_matrices() -> None:
    numbers = torch.Generator().manual_seed(0)
    large = torch.randn(256, 256, generator=numbers)
    large[3] = 0.0
    stored = checkpoint.packed({"a": large, "b": large[0], "c": large[:9]}, int8=True)
    assert {name: value.dtype for name, value in stored.items()} == {
        "a": torch.int8,
        "a.scale": torch.float32,
        "b": torch.float16,
        "c": torch.float16,
    }
    back = stored["a"].float() * stored["a.scale"][:, None]
    assert (back - large).abs().max() <= stored["a.scale"].max() / 2 + 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"steps": 1, "minutes": 1.0},
        {"steps": 0},
        {"minutes": -1.0},
        {"steps": 1, "batch": 0},
        {"steps": 1, "peak": 2.0},
        {"steps": 1, "held": 0.0},
    ],
)
def test_courses_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams):
        TrainingSchedule(**wrong)


def test_too_few_texts(tmp_path: Path) -> None:
    course = TrainingSchedule(steps=1)
    with pytest.raises(InvalidData, match="too few"):
        fitting.fit(Bigram(Stub()), rows(1), tmp_path, course, options={}, data={})


def test_batches_hold_every_row_once_a_turn_and_can_be_entered_anywhere() -> None:
    source = loop.batches(10, 4, seed=5)
    found = [next(source) for _ in range(25)]
    seen = torch.cat(found)
    for turn in range(10):
        assert sorted(seen[10 * turn : 10 * turn + 10].tolist()) == list(range(10))
    for first in (0, 1, 3, 7, 24):
        assert torch.equal(next(loop.batches(10, 4, seed=5, first=first)), found[first])
    assert not torch.equal(next(loop.batches(10, 4, seed=6)), found[0])
    assert len(next(loop.batches(3, 8, seed=0))) == 8


def test_buckets_hold_rows_by_length_and_all_are_used_as_often() -> None:
    numbers = torch.Generator().manual_seed(1)
    stops = torch.randint(2, 1025, (400,), generator=numbers)
    found = loop.length_buckets(stops, 1024, 8)
    assert [(bucket.length, bucket.batch) for bucket in found] == [(256, 32), (512, 16), (1024, 8)]
    assert sorted(torch.cat([bucket.rows for bucket in found]).tolist()) == list(range(400))
    source = loop.bucketed_batches(found, seed=3)
    taken = [next(source) for _ in range(200)]
    assert all(int(stops[rows].max()) <= length for rows, length in taken)
    read = torch.bincount(torch.cat([rows for rows, _ in taken]), minlength=400)
    assert int(read.max() - read.min()) <= 1 + 1  # a turn of each bucket, wherever it stands
    for first in (0, 1, 77):
        again = next(loop.bucketed_batches(found, seed=3, first=first))
        assert torch.equal(again[0], taken[first][0])
        assert again[1] == taken[first][1]


@pytest.mark.parametrize(
    ("stops", "length", "lengths"),
    [
        ([300] * 20, 512, [512]),  # no short ones
        ([60] * 15, 512, [512]),  # too few for a batch of a quarter's, or of a half's
        ([60] * 32, 512, [128]),
        ([60] * 31 + [500], 512, [256, 512]),
        ([60] * 64, 256, [128]),  # a quarter would be too narrow
        ([9] * 99, 40, [40]),
    ],
)
def test_buckets_with_too_few_rows_are_dropped(
    stops: list[int], length: int, lengths: list[int]
) -> None:
    found = loop.length_buckets(torch.tensor(stops), length, 8)
    assert [bucket.length for bucket in found] == lengths


def test_recipes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe.discover()
    monkeypatch.setattr(recipe, "_recipes", dict(recipe._recipes))
    recipe.recipe("bigram")(Bigram)
    entry = recipe.entry("bigram")
    assert entry.summary == "Which token follows which."
    assert recipe.options(entry, "drop=0.5") == {"spread": 0.1, "drop": 0.5}
    target: Any = Stub()
    made = [recipe.build(entry, target, {"spread": 0.1}, seed).weights for seed in (1, 1, 2)]
    assert torch.equal(made[0]["after.weight"], made[1]["after.weight"])
    assert not torch.equal(made[0]["after.weight"], made[2]["after.weight"])
    with pytest.raises(UnknownMethod, match="did you mean bigram"):
        recipe.entry("bigrams")
    with pytest.raises(UnknownMethod, match="it has spread, drop"):
        recipe.options(entry, "layers=2")
    with pytest.raises(UnknownMethod, match="spread is not below 0"):
        recipe.build(entry, target, {"spread": -1.0})
