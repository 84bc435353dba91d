"""Methods beside each other: the counts add up, and pairs are compared with pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outstride import registry
from outstride.bench import curve, result
from outstride.bench.decode import decode, exact_methods, incompressible
from outstride.bench.decode_report import DecodeReport, DecodeRun
from outstride.bench.prompts import BenchPrompt
from outstride.bench.result import BenchResult
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams
from tests.bench.fake import make_llm

PROMPTS = [
    BenchPrompt("a", "one", "abcabcabc"),
    BenchPrompt("b", "one", "hello hello"),
    BenchPrompt("c", "two", "the fox and the dog and the fox"),
]


def test_every_method_answers_everything_alike() -> None:
    ticks: list[tuple[int, int]] = []
    with make_llm() as llm:
        report = decode(
            llm,
            ["ngram", "plain", "auto"],
            [*PROMPTS, *incompressible(llm, 1, length=6)],
            SamplingParams(max_tokens=40),
            batches=(2,),
            rounds=2,
            warm=True,
            progress=lambda done, total: ticks.append((done, total)),
        )
    assert report.methods == ["plain", "ngram", "auto"]
    assert len(report.runs) == 3 * 3 * 3  # methods, portions, rounds (one of them warm)
    assert ticks[-1] == (27, 27)
    lines = {(line.method, line.group, line.warm): line for line in report.lines()}
    assert {group for _, group, _ in lines} == {"one", "two", "random", "all"}
    for line in lines.values():
        assert line.equal == line.prompts
        assert sum(line.shares.values()) == pytest.approx(1.0)
        assert line.bound <= line.ratio + 1e-9
    plain, ngram = lines["plain", "all", False], lines["ngram", "all", False]
    assert plain.tokens_per_pass == 1.0
    assert plain.nodes_per_pass == 1.0
    assert plain.ratio == pytest.approx(1.0) == plain.bound
    assert ngram.tokens_per_pass > 1.0
    assert ngram.nodes_per_pass > ngram.tokens_per_pass


class Echo:
    """Another engine; its answers are the first token of the prompt, repeated."""

    name = "other"

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        self.asked.append(([list(prompt) for prompt in prompts], output))
        return [[prompt[0]] * output for prompt in prompts]


def test_another_engine_answers_the_same_prompts() -> None:
    ticks: list[tuple[int, int]] = []
    peer = Echo()
    with make_llm() as llm:
        report = decode(
            llm,
            ["ngram"],
            PROMPTS,
            SamplingParams(max_tokens=12),
            rounds=2,
            peer=peer,
            progress=lambda done, total: ticks.append((done, total)),
        )
        given = [llm.encode(prompt.text, chat=True) for prompt in PROMPTS]
    assert ticks[-1] == (18, 18)
    assert [prompts for prompts, _ in peer.asked] == [[tokens] for tokens in given] * 2
    runs = {(run.method, run.round, run.prompts): run for run in report.runs}
    assert len(runs) == 3 * 2 * 3
    for (method, number, prompts), run in runs.items():
        assert run.emitted == runs["plain", number, prompts].emitted, method
    lines = {(line.method, line.group): line for line in report.lines()}
    assert lines["other", "all"].against == pytest.approx(1.0)
    assert lines["other", "all"].tokens_per_pass == 1.0
    for group in ("one", "two"):  # seconds of the other over ours, over plain's over ours
        line, plain = lines["ngram", group], lines["plain", group]
        assert line.against is not None
        assert line.against > 0
        assert plain.against is not None
    found = {(row["method"], row["over"]): row for row in report.summary()["extremes"]}
    assert set(found) == {
        *(("ngram", "plain"), ("ngram", "other"), ("plain", "other"), ("other", "plain"))
    }
    row = found["ngram", "other"]
    by_group = {group: lines["ngram", group].against or 0.0 for group in ("one", "two")}
    assert row["min"] == min(by_group.values()) == by_group[row["group"]]
    assert row["mean"] == pytest.approx(sum(by_group.values()) / 2)


def test_a_round_starts_without_memories() -> None:
    """Each round sees the same as the one before: passes are the same, warm ones are fewer."""
    with make_llm() as llm:
        report = decode(
            llm, ["suffix"], PROMPTS, SamplingParams(max_tokens=60), rounds=3, warm=True
        )
    passes: dict[int, list[int]] = {}
    for run in report.runs:
        if run.method == "suffix":
            passes.setdefault(run.round, []).append(run.passes)
    assert passes[0] == passes[1] == passes[2]
    assert sum(passes[3]) < sum(passes[0])


def test_ratios_are_means_over_groups() -> None:
    def run(method: str, group: str, seconds: float) -> DecodeRun:
        return DecodeRun(
            method, group, 1, 0.0, 0, False, ("x",), seconds, 10, 5, 10, {}, 1, 0, 0.0, {}
        )

    report = DecodeReport(["plain", "m"])
    report.runs = [
        run("plain", "one", 4.0),
        run("m", "one", 2.0),
        run("plain", "two", 1.0),
        run("m", "two", 1.0),
    ]
    lines = {(line.method, line.group): line for line in report.lines()}
    assert lines["m", "one"].ratio == 2.0
    assert lines["m", "all"].ratio == 1.5


def test_a_slow_stretch_spoils_no_ratio() -> None:
    """Of five rounds, two may be slow for anybody."""
    report = DecodeReport(["plain", "m"])
    slow = {("plain", 1): 7.0, ("plain", 3): 2.0, ("m", 0): 5.0, ("m", 3): 9.0}
    for number in range(5):
        for prompt, seconds in (("x", 4.0), ("y", 2.0)):
            for method, share in (("plain", 1.0), ("m", 0.5)):
                took = seconds * share * slow.get((method, number), 1.0)
                counts: Any = (10, 5, 10, {}, 1, 0, 0.0, {})
                report.runs.append(
                    DecodeRun(method, "g", 1, 0.0, number, False, (prompt,), took, *counts)
                )
    line = next(line for line in report.lines() if line.method == "m")
    assert line.ratio == 2.0
    assert line.tokens_per_second == 20 / 3.0
    assert line.bound <= line.ratio
    assert line.tokens_per_pass == 2.0


def test_a_round_that_was_cut_off_makes_nothing_unequal() -> None:
    report = DecodeReport(["plain", "auto"])
    for number, prompts in enumerate(("abc", "a")):
        for prompt in prompts:
            for method in report.methods:
                equal = int(method == "plain" or prompt != "b")
                counts: Any = (10, 5, 10, {}, equal, 0, 0.0, {})
                report.runs.append(
                    DecodeRun(method, "g", 1, 0.0, number, False, (prompt,), 1.0, *counts)
                )
    assert [(line.equal, line.prompts) for line in report.lines()] == [(3, 3), (2, 3)]


def test_neighbours_are_held_against_each_other() -> None:
    """The machine gets faster all the time, and once somebody else is at work."""
    report = DecodeReport(["plain", "m"])
    for number, (first, other) in enumerate([(8.0, 4.0), (2.0, 4.0), (1.0, 0.5)]):
        for method, took in (("plain", first), ("m", other)):
            counts: Any = (10, 5, 10, {}, 1, 0, 0.0, {})
            report.runs.append(DecodeRun(method, "g", 1, 0.0, number, False, ("x",), took, *counts))
    line = next(line for line in report.lines() if line.method == "m")
    assert line.ratio == 2.0
    assert line.bound == 0.5


@pytest.mark.parametrize("options", [{"batches": (0,)}, {"rounds": 0}, {"temperatures": (-1.0,)}])
def test_numbers_must_make_sense(options: dict[str, Any]) -> None:
    with make_llm() as llm, pytest.raises(InvalidParams):
        decode(llm, ["ngram"], PROMPTS, SamplingParams(), **options)


def test_settings_are_measured_apart() -> None:
    with make_llm() as llm:
        report = decode(
            llm,
            ["ngram"],
            PROMPTS,
            SamplingParams(max_tokens=20),
            batches=(1, 2),
            temperatures=(0.0, 0.8),
        )
    settings = {(line.batch, line.temperature) for line in report.lines()}
    assert settings == {(1, 0.0), (1, 0.8), (2, 0.0), (2, 0.8)}
    for line in report.lines():
        assert line.equal == line.prompts, "sampled with the same noise, too"
    greedy, sampled = (
        next(x for x in report.lines() if (x.method, x.batch, x.temperature) == ("ngram", 1, t))
        for t in (0.0, 0.8)
    )
    assert greedy.tokens_per_pass != sampled.tokens_per_pass


def test_batches_that_no_group_can_fill_are_mixed() -> None:
    with make_llm() as llm:
        prompts = [*PROMPTS, *incompressible(llm, 1, length=6)]
        report = decode(llm, [], prompts, SamplingParams(max_tokens=4), batches=(3, 1))
    runs = [(run.batch, run.group, run.prompts) for run in report.runs]
    assert runs[:2] == [(3, "mixed", ("a", "b", "c")), (3, "random", ("random:0",))]
    assert [run[1] for run in runs[2:]] == ["one", "one", "two", "random"]


def test_the_same_bench_twice() -> None:
    """With the curve frozen, `auto` drafts the same again, however long passes took."""
    found = []
    for pause in (0.0, 0.001):
        with make_llm(pause=pause) as llm:
            curve.freeze(llm, curve.read("1=6,4=7,16=9"))
            report = decode(
                llm, exact_methods(), PROMPTS, SamplingParams(max_tokens=12), batches=(1, 3)
            )
            assert curve.of(llm) == {"1": 0.006, "4": 0.007, "16": 0.009}
        found.append([(r.method, r.group, r.batch, r.passes, r.emitted) for r in report.runs])
    assert found[0] == found[1]


def test_exact_methods_come_from_the_registry() -> None:
    found = exact_methods()
    assert {"plain", "auto", "ngram", "suffix", "recycle", "lookahead", "trigram"} <= set(found)
    for name in found:
        entry = registry.entry(name)
        assert entry.exactness is Exactness.EXACT
        assert not entry.needs
    assert not {"draft", "typical", "steps", "verify", "rejection"} & set(found)


@pytest.mark.parametrize("text", ["", "1", "1=", "a=b", "0=5", "1=-5", "none.txt"])
def test_bad_curves(text: str) -> None:
    with pytest.raises(InvalidParams, match="cost curve"):
        curve.read(text)


def test_a_curve_from_an_earlier_result(tmp_path: Path) -> None:
    made = BenchResult("decode", {"cost": {"1": 0.005, "8": 0.01}}).finish([], {})
    result.write(made, tmp_path / "old.json")
    assert curve.read(str(tmp_path / "old.json")) == {1: 0.005, 8: 0.01}
    result.write(BenchResult("step", {}).finish([], {}), tmp_path / "other.json")
    with pytest.raises(InvalidParams, match="cost curve"):
        curve.read(str(tmp_path / "other.json"))
