"""Unmasking in torch takes the engine's course; what is trained on it; and models that change."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outstride import LLM, SamplingParams, registry
from outstride.core.contracts import Method
from outstride.errors import InvalidParams, UnknownMethod, UnsupportedModel
from outstride.models.draft_heads.unmask_filter import attach
from outstride.models.load import load_tokenizer, locate
from outstride.models.shipped.lists import TASKS, cases
from outstride.train import list_tasks, recipe
from outstride.train.certainty import CertaintyRecipe
from outstride.train.corpus_files import Corpus, TrainingRows
from outstride.train.fit import TrainingResult, TrainingSchedule, fit
from outstride.train.full_finetune import DifferentiableModel
from outstride.train.list_tasks import LONGEST, TaskTexts
from outstride.train.target import Target
from outstride.train.unmask_filter import UnmaskFilterRecipe, _features
from outstride.train.unmasking import (
    Canvases,
    Choose,
    MaskedDecoding,
    at_least,
    most_confident,
    write,
)
from tests.train import habits

MODELS = ("parallel-full", "parallel-block")
recipe.discover()


@lru_cache(maxsize=2)
def target(name: str) -> Target:
    return Target.load(name)


def asked(count: int, first: int = 0) -> list[tuple[str, str]]:
    """Questions of all tasks in turns."""
    found = [(case.prompt, case.answer) for task in TASKS for case in cases(task, first + count)]
    each = len(found) // len(TASKS)
    return [found[i * each + j] for j in range(first, each) for i in range(len(TASKS))]


def rows_of(pairs: list[tuple[str, str]]) -> TrainingRows:
    texts = TaskTexts.of(pairs, LONGEST)
    none = torch.zeros(len(pairs), dtype=torch.bool)
    keys = (torch.arange(len(pairs)) * 7919) % 10_007
    return TrainingRows(texts.tokens.long(), texts.starts, texts.stops, none, keys)


def engine_says(
    llm: LLM, pairs: list[tuple[str, str]], method: str | Method
) -> tuple[list[list[int]], list[int]]:
    """Answers and their passes."""
    params = [SamplingParams(max_tokens=len(answer.split()) + 1) for _, answer in pairs]
    asked, salt = [prompt for prompt, _ in pairs], str(method)
    results = llm.generate(asked, params, method=method, salt=salt)
    outputs = [result.outputs[0] for result in results]
    return [output.token_ids for output in outputs], [output.stats.passes for output in outputs]


def torch_says(
    name: str, pairs: list[tuple[str, str]], choose: Choose
) -> tuple[list[list[int]], list[int]]:
    own = target(name)
    reader = DifferentiableModel(own.config, own.weights, own.device)
    found = write(reader, MaskedDecoding.of(own), rows_of(pairs), choose)
    answers = [
        tokens[said].tolist() for tokens, said in zip(found.tokens, found.answers, strict=True)
    ]
    return answers, found.passes.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_torch_takes_the_course_of_the_engine(name: str) -> None:
    """Schedules, and a filter: the numbers that it learns from are those that it is shown."""
    pairs = asked(1)
    own = UnmaskFilterRecipe(target(name), units=8, sure=0.5)
    numbers = torch.Generator().manual_seed(2)
    for weight in own.weights.values():
        weight.copy_(torch.randn(weight.shape, generator=numbers))
    rules: dict[str, Choose] = {
        "steps": most_confident,
        "threshold:threshold=0.6": at_least(0.6),
        "filter:from=shaken": lambda look: own._scores(_features(look)).sigmoid() >= 0.5,
    }
    llm = LLM(name, weights="fp32", pages=64)
    try:
        attach(llm.model, "shaken", {"outstride": "unmask-filter", **own.config()}, own.weights)
        for spec, choose in rules.items():
            answers, passes = engine_says(llm, pairs, registry.build(spec))
            found, counted = torch_says(name, pairs, choose)
            for one, two in zip(answers, found, strict=True):
                assert one == two[: len(one)], spec
            assert sum(passes) < sum(map(len, answers)) or spec == "steps"
            assert passes == counted, spec
    finally:
        llm.close()


@pytest.mark.parametrize("name", MODELS)
def test_canvases_can_be_had_as_they_stood(name: str) -> None:
    own, rows = target(name), rows_of(asked(1))
    manner, reader = (
        MaskedDecoding.of(own),
        DifferentiableModel(own.config, own.weights, own.device),
    )
    moments: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    canvas = Canvases.fresh(manner, rows, manner.width(rows))
    while bool(canvas.live().all()):
        moments.append((canvas.tokens.clone(), canvas.work(), canvas.mask()))
        texts = torch.arange(len(rows))
        look = canvas.score(reader, texts)
        canvas.settle(look, most_confident(look), texts)
    whole = write(reader, manner, rows, most_confident)
    assert len(moments) >= 5
    for time, (tokens, work, sees) in enumerate(moments):
        again = Canvases.at(manner, whole, rows.stops, torch.full((len(rows),), time))
        assert torch.equal(again.tokens, tokens)
        assert torch.equal(again.work(), work)
        assert torch.equal(again.mask(), sees)


def run(
    made: Any, rows: TrainingRows, out: Path, options: dict[str, Any], **course: Any
) -> TrainingResult:
    chosen = TrainingSchedule(**{"batch": 24, "held": 0.1, **course})
    return fit(made, rows, out, chosen, options=options, data={"model": "lists"})


def test_a_filter_settles_more_per_pass_and_the_same_text(tmp_path: Path) -> None:
    name, values = "parallel-block", {"units": 16, "texts": 60}
    entry = recipe.entry("unmask-filter")
    made = recipe.build(entry, target(name), recipe.options(entry, "units=16,texts=60"))
    out = tmp_path / "filter"
    fitted = run(made, rows_of(asked(7, first=3)), out, values, steps=80, peak=1e-2)
    assert fitted.untrained["tokens_per_pass"] == 1.0
    assert fitted.trained["tokens_per_pass"] > 2.5
    assert fitted.trained["same_tokens"] > 0.95
    assert fitted.size < 10_000
    llm = LLM(name)
    try:
        pairs = asked(1)
        slow, many = engine_says(llm, pairs, "steps")
        fast, few = engine_says(llm, pairs, f"filter:from={out}")
        assert sum(few) * 2.5 < sum(many)
        assert sum(a == b for a, b in zip(slow, fast, strict=True)) >= 9
        strict = engine_says(llm, pairs, f"filter:from={out},threshold=0.999999")[1]
        assert sum(strict) > sum(few)
        with pytest.raises(UnsupportedModel, match="unmask-filter"):
            llm.generate("copy a b =", method=f"block-drafter:from={out}")
    finally:
        llm.close()


def test_a_filter_is_for_models_with_masks(tmp_path: Path) -> None:
    own = Target.load(str(habits.make(tmp_path / "model")))
    with pytest.raises(UnsupportedModel, match="fills in no masks"):
        UnmaskFilterRecipe(own)
    with pytest.raises(UnknownMethod, match="needs from"):
        registry.build("filter")
    with pytest.raises(UnknownMethod, match="threshold"):
        registry.build("filter:from=x,threshold=1.5")


@pytest.mark.parametrize("name", MODELS)
def test_certainty_needs_fewer_passes_and_leaves_a_model(name: str, tmp_path: Path) -> None:
    """Where several answers are right the original hesitates; its own answer can be learned."""
    entry, options = recipe.entry("certainty"), "texts=40,early=0.5"
    assert entry.changes_target
    pairs = [pair for pair in asked(22, first=2) if pair[0].startswith(("sentence", "replace"))]
    before = {key: value.clone() for key, value in target(name).weights.items()}
    made = recipe.build(entry, target(name), recipe.options(entry, options))
    out = tmp_path / "sure"
    with pytest.raises(InvalidParams, match="int8 is for draft heads"):
        run(made, rows_of(pairs), out, {}, steps=1, int8=True)
    fitted = run(made, rows_of(pairs), out, {}, steps=30, batch=16, peak=1e-3)
    assert fitted.trained["tokens_per_pass"] > 1.15 * fitted.untrained["tokens_per_pass"]
    assert all(torch.equal(before[key], value) for key, value in target(name).weights.items())
    old = json.loads((locate(name) / "config.json").read_text())
    new = json.loads((out / "config.json").read_text())
    assert old.items() <= new.items()
    assert load_tokenizer(str(out)).digest == target(name).digest
    again = Target.load(str(out))
    for key, value in made.weights.items():
        torch.testing.assert_close(again.weights[key], value.detach(), rtol=1e-3, atol=1e-6)


def test_list_tasks_as_a_corpus(tmp_path: Path) -> None:
    assert list_tasks.main(["--out", str(tmp_path), "--texts", "30", "--seed", "4"]) == 0
    rows = Corpus.open(tmp_path, target("parallel-full").digest).rows(40)
    assert len(rows) == 30
    tokenizer = load_tokenizer("parallel-block")
    said = tokenizer.decode(rows.tokens[0, : rows.starts[0]].tolist())
    assert said.split()[0] in TASKS
    assert said.endswith("=")
    assert set(rows.tokens[0, rows.stops[0] - 1 :].tolist()) == tokenizer.eos_ids


def test_options_that_make_no_sense() -> None:
    own = target("parallel-full")
    wrong: dict[str, Any]
    for wrong in ({"units": 0}, {"sure": 1.0}):
        with pytest.raises(ValueError, match="needs"):
            UnmaskFilterRecipe(own, **wrong)
    for wrong in ({"heat": 0.0}, {"early": 2.0}, {"texts": 0}, {"forcing": -1.0}):
        with pytest.raises(ValueError, match="needs"):
            CertaintyRecipe(own, **wrong)
