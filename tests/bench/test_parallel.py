"""The shipped models and `outstride bench parallel`: what they promise, on a few questions."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outstride import LLM, SamplingParams, registry
from outstride.bench import result, tradeoff
from outstride.bench.parallel import BASELINE, ParallelReport, PolicyLine, measure, reference_of
from outstride.cli import main
from outstride.errors import InvalidParams
from outstride.models.fetch import shipped
from outstride.models.shipped.lists import TASKS, Case, cases

MODELS = ("parallel-full", "parallel-block")


@pytest.fixture(scope="module", params=MODELS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(request.param, max_nodes=4096) as model:
        yield model


def size(case: Case) -> SamplingParams:
    return SamplingParams(max_tokens=len(case.answer.split()) + 1, seed=3)


def mixed(count: int) -> list[Case]:
    """Questions of all tasks in turns."""
    return [case for group in zip(*(cases(t, count) for t in TASKS), strict=True) for case in group]


def test_the_models_are_in_the_package_and_small() -> None:
    assert set(shipped()) == set(MODELS)
    files = [file for folder in shipped().values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 5_000_000


def test_one_token_per_pass_answers_every_task(llm: LLM) -> None:
    report = measure(llm, [], limit=4, batch=4)
    assert report.policies == [BASELINE]
    wrong = {line.task: line.right for line in report.of(BASELINE) if line.right < line.cases}
    assert sum(4 - right for right in wrong.values()) <= 1, wrong


@pytest.mark.parametrize("order", ["confidence", "random"])
def test_verified_answers_are_those_of_steps_in_fewer_passes(llm: LLM, order: str) -> None:
    asked = mixed(1)
    prompts, params = [case.prompt for case in asked], [size(case) for case in asked]
    slow, quick = (
        llm.generate(prompts, params, method=f"{name}:order={order}", salt=name)
        for name in ("steps", "verify")
    )
    assert [a.token_ids for a in slow] == [a.token_ids for a in quick]
    passes = [sum(a.stats.passes for a in answers) for answers in (slow, quick)]
    assert passes[0] > 1.4 * passes[1]


def test_the_batch_changes_nothing(llm: LLM) -> None:
    """Sixteen answers in one batch, by several policies, are those that each request gets alone.

    The block model continues some of them token by token; some are sampled.
    """
    asked = mixed(2)[:16]
    methods = [("threshold", "factor", "entropy-bound", "steps")[i % 4] for i in range(len(asked))]
    if llm.name == "parallel-block":
        methods[::2] = ["plain"] * len(methods[::2])
    params = [replace(size(case), temperature=0.8 * (i % 3 == 0)) for i, case in enumerate(asked)]
    together = llm.generate([case.prompt for case in asked], params, method=methods, salt="all")
    for case, own, method, answer in zip(asked, params, methods, together, strict=True):
        [alone] = llm.generate(case.prompt, own, method=method, salt="alone")
        assert alone.token_ids == answer.token_ids, (case, method)
        assert alone.stats.passes == answer.stats.passes


def test_the_block_model_continues_token_by_token() -> None:
    with LLM("parallel-block") as llm:
        report = measure(llm, ["plain"], limit=2, tasks=("copy", "sort", "shuffle"))
        assert sum(line.right for line in report.of("plain")) >= 5
        assert {line.tokens_per_pass for line in report.of("plain")} == {1.0}


def test_the_full_model_fills_holes() -> None:
    with LLM("parallel-full") as llm:
        [filled] = llm.fill("copy a b c d e f g h = a b <mask:2> e f <mask:1> h")
        assert filled.holes == ["c d", "g"]


# --- the command ------------------------------------------------------------------------------------


def test_the_command_ends_with_one_json_object_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "plot.svg"
    options = ["--policies", "verify:order=random threshold", "--tasks", "copy shuffle"]
    code = main(["bench", "parallel", *options, "--limit", "2", "--plot", str(plot)])
    assert code == 0
    out = capsys.readouterr().out
    values = result.validate(json.loads(out.splitlines()[-1]))
    assert values["kind"] == "parallel"
    policies = [row["policy"] for row in values["summary"]["policies"]]
    assert policies == ["steps", "steps:order=random", "verify:order=random", "threshold"]
    assert set(values["summary"]["baseline"]) == {"copy", "shuffle"}
    assert len(values["samples"]) == 8
    verified = values["summary"]["policies"][2]
    assert verified["reference"] == "steps:order=random"
    assert verified["equal"] == verified["cases"] == 4
    assert "tokens per pass" in out
    root = ElementTree.fromstring(plot.read_text())
    text = "".join(root.itertext())
    assert all(policy in text for policy in policies)
    assert "prefers-color-scheme: dark" in text


def test_what_a_model_cannot_do_is_left_out() -> None:
    with LLM("parallel-full") as llm:
        report = measure(llm, ["plain", "threshold"], limit=1, tasks=["copy"])
        assert report.policies == ["steps", "threshold"]
        assert list(report.skipped) == ["plain"]
        with pytest.raises(InvalidParams, match="tasks are copy"):
            measure(llm, tasks=["sing"])
        with pytest.raises(InvalidParams, match="at least 1"):
            measure(llm, limit=0)


# --- sums -------------------------------------------------------------------------------------------


def made() -> ParallelReport:
    """Three policies with figures that one can add up."""
    report = ParallelReport(["steps", "threshold", "steps:count=4"], ["copy", "shuffle"])
    figures = {
        "steps": ((10, 100, 100), (10, 50, 50)),
        "threshold": ((10, 100, 10), (9, 50, 20)),
        "steps:count=4": ((10, 100, 25), (1, 50, 13)),
    }
    for policy, rows in figures.items():
        for task, (right, emitted, passes) in zip(report.tasks, rows, strict=True):
            line = PolicyLine(policy, task, cases=10, right=right, emitted=emitted, passes=passes)
            report.lines[policy, task] = line
    return report


def test_totals() -> None:
    steps, threshold, count = made().totals()
    assert (steps.match, steps.tokens_per_pass, steps.fewer, steps.loss) == (100, 1, 1, 0)
    assert (threshold.match, threshold.fewer, threshold.loss) == (95, 5, 5)
    assert threshold.tokens_per_pass == (10 + 2.5) / 2
    assert count.exactness == threshold.exactness == "lossy"
    assert steps.exactness == "exact"


def test_the_best_lossy_policy_may_lose_a_point() -> None:
    report = made()
    assert report.summary()["best lossy"] is None  # both lose more
    for policy in report.policies[1:]:
        report.lines[policy, "shuffle"].right = 10
    assert report.summary()["best lossy"]["policy"] == "threshold"


def test_what_policies_are_compared_with() -> None:
    registry.discover()
    assert reference_of("verify:ahead=2") == "steps"
    assert reference_of("verify:ahead=2,order=random,count=2") == "steps:order=random,count=2"
    assert reference_of("threshold:block=4") == "steps"
    assert reference_of("steps:count=4") == "steps"
    assert reference_of("plain") == "steps"


def test_bubbles_do_not_cover_each_other() -> None:
    panel = tradeoff._Panel(0, 0, 400, 300, 10, 0)
    places = tradeoff._apart([(200.0, 0.0)] * 9 + [(201.0, 1.0)], panel)
    for i, (x, y) in enumerate(places):
        assert all(abs(x - a) + abs(y - b) > 15 for a, b in places[:i])
    assert tradeoff._apart([(10.0, 10.0), (90.0, 90.0)], panel) == [(10.0, 10.0), (90.0, 90.0)]
