"""Methods beside each other: the counts add up, and pairs are compared with pairs."""

from __future__ import annotations

import pytest

from outstride.bench.decode import DecodeReport, Run, decode, incompressible
from outstride.bench.prompts import BenchPrompt
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
            batch=2,
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
        assert line.bound <= line.ratio
    plain, ngram = lines["plain", "all", False], lines["ngram", "all", False]
    assert plain.tokens_per_pass == 1.0
    assert plain.nodes_per_pass == 1.0
    assert plain.ratio == plain.bound == 1.0
    assert ngram.tokens_per_pass > 1.0
    assert ngram.nodes_per_pass > ngram.tokens_per_pass


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
    def run(method: str, group: str, seconds: float) -> Run:
        return Run(method, group, 0, False, ("x",), seconds, 10, 5, 10, {}, 1, 0, 0.0, {})

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


@pytest.mark.parametrize("options", [{"batch": 0}, {"rounds": 0}])
def test_numbers_must_make_sense(options: dict[str, int]) -> None:
    with make_llm() as llm, pytest.raises(InvalidParams):
        decode(llm, ["ngram"], PROMPTS, SamplingParams(), **options)  # type: ignore[arg-type]
