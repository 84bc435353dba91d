"""Other packages use the methods of `Engine`; they do not reach into its parts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from outstride import LLM, SamplingParams
from outstride.engine.engine_thread import EngineThread
from outstride.errors import OutstrideError
from tests.bench.fake import make_llm

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"runner", "scheduler", "sequences", "ledger", "drafting", "commit"}
"""Attributes of an engine that only the engine package may use."""


def reaches(source: str) -> Iterator[int]:
    """The lines with `engine.<part>`, where the engine is a name or an attribute of that name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in PARTS:
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name.strip("_") == "engine":
                yield node.lineno


def test_no_other_package_reaches_into_an_engine() -> None:
    inside = ROOT / "src" / "outstride" / "engine"
    files = [path for folder in ("src", "tests", "docs") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if inside not in path.parents
        for line in reaches(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("engine.scheduler.cost = None", [1]),
        ("x = 1\nllm.engine.runner.models", [2]),
        ("self._engine.ledger.steps", [1]),
        ("from outstride.engine.scheduler import Limits", []),
        ("llm.engine.gauges().steps", []),
        ("plan.commit()", []),
    ],
)
def test_a_reach_is_found(source: str, found: list[int]) -> None:
    assert list(reaches(source)) == found


def test_gauges_are_a_frozen_copy() -> None:
    with make_llm() as llm:
        before = llm.engine.gauges()
        llm.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True))
        llm.engine.idle_runner()  # the last step is counted
        after = llm.engine.gauges()
        assert (before.steps, before.totals.emitted) == (0, 0)
        assert after.totals.emitted == 5
        assert after.steps == llm.engine.steps >= 5
        assert after.running == after.waiting == 0
        assert after.pages * llm.engine.pool().page_size == llm.engine.pool().capacity
        with pytest.raises(FrozenInstanceError):
            after.steps = 0  # type: ignore[misc]


def test_an_engine_has_one_thread(llm: LLM) -> None:
    with pytest.raises(OutstrideError, match="has a thread already"):
        EngineThread(llm.engine)


def test_a_runner_is_lent_only_while_the_engine_is_idle(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=300, ignore_eos=True))
    next(stream)
    with pytest.raises(OutstrideError, match="busy"):
        llm.engine.idle_runner(timeout=0.0)
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.idle_runner().models.keys() == {"target"}


def test_a_call_runs_between_two_passes(llm: LLM) -> None:
    """It returns what the task returns, raises what it raises, and may be nested."""
    thread = llm.engine_thread
    assert thread.call(lambda: 1) == 1  # not started: in this thread
    llm.generate("hello", SamplingParams(max_tokens=2))
    assert thread.call(lambda: thread.call(lambda: 2)) == 2

    def fail() -> None:
        raise KeyError("reason")

    with pytest.raises(KeyError, match="reason"):
        thread.call(fail)
    llm.close()
    with pytest.raises(OutstrideError, match="closed"):
        thread.call(lambda: 3)


@pytest.fixture
def llm() -> Iterator[LLM]:
    with make_llm(pause=0.002) as found:
        yield found
