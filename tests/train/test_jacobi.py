"""Fine-tuning on fixed-point iterations: what is seen, what it gives, and that it is exact."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outstride import LLM, SamplingParams
from outstride.errors import UnknownMethod
from outstride.train import recipe
from outstride.train.corpus_files import TrainingRows
from outstride.train.fit import TrainingSchedule, fit
from outstride.train.jacobi import JacobiRecipe
from outstride.train.target import Target
from tests.train import habits

recipe.discover()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return habits.make(tmp_path_factory.mktemp("habits") / "model")


@lru_cache(maxsize=1)
def loaded(folder: Path) -> tuple[Target, TrainingRows]:
    own = Target.load(str(folder))
    return own, habits.texts(own, 96)


def test_iterations_are_those_of_jacobi(model: Path) -> None:
    """Each guess becomes what the model says behind the text and the guesses before it."""
    own, rows = loaded(model)
    made, few = JacobiRecipe(own, block=4, blocks=3), rows.take(slice(0, 2))
    given = made._random_blocks(few, torch.Generator().manual_seed(0))
    last = own.config.layers
    for _ in range(4):
        before = given.tokens.clone()
        made._iterate(given)
        for row in range(2):
            for block in range(3):
                at = given.length + 4 * block
                anchor = int(given.places[row, at]) - 1
                guesses = before[row, at : at + 4]
                text = torch.cat([few.tokens[row, : anchor + 1], guesses])[None]
                said = own.logits(own.hidden_states(text, (last,))[last])[0].argmax(-1)
                assert given.tokens[row, at : at + 4].tolist() == said[anchor : anchor + 4].tolist()
    # Four iterations over four guesses: the fixed point, which is the greedy text itself.
    for row in range(2):
        places = given.places[row, given.length :]
        inside = places < int(few.stops[row])
        wanted = few.tokens[row][places.clamp(max=39)]
        assert torch.equal(given.tokens[row, given.length :][inside], wanted[inside])


def test_more_tokens_per_pass_and_exact_to_the_new_model(model: Path, tmp_path: Path) -> None:
    own, rows = loaded(model)
    entry, values = recipe.entry("jacobi"), {"block": 6, "blocks": 6, "keep": 1.0}
    assert entry.changes_target
    out, original = tmp_path / "tuned", {k: v.clone() for k, v in own.weights.items()}
    made = recipe.build(entry, own, values)
    course = TrainingSchedule(steps=70, batch=12, peak=4e-3, held=0.1)
    fitted = fit(made, rows, out, course, options=values, data={})
    assert fitted.untrained["agrees_with_the_original"] == 1.0
    assert fitted.trained["agrees_with_the_original"] > 0.75
    assert fitted.trained["tokens_per_pass"] > 1.4 * fitted.untrained["tokens_per_pass"]
    assert all(torch.equal(original[key], value) for key, value in own.weights.items())
    prompts = rows.tokens[:6, :8].tolist()
    spec = "lookahead:window=5,level=2,branches=1"
    speeds = []
    for folder in (model, out):
        plain, _ = decoded(folder, prompts, "plain")
        fast, speed = decoded(folder, prompts, spec)
        assert fast == plain
        speeds.append(speed)
    assert speeds[1] > 1.12 * speeds[0]


def decoded(folder: Path, prompts: list[list[int]], spec: str) -> tuple[list[list[int]], float]:
    llm = LLM(folder, weights="fp32", pages=64)
    try:
        params = SamplingParams(max_tokens=32, ignore_eos=True)
        outputs = [r.outputs[0] for r in llm.generate(prompts, params, method=spec)]
    finally:
        llm.close()
    emitted, passes = (sum(getattr(o.stats, n) for o in outputs) for n in ("emitted", "passes"))
    return [output.token_ids for output in outputs], emitted / passes


def test_what_it_is_not_for(model: Path) -> None:
    own, _ = loaded(model)
    entry = recipe.entry("jacobi")
    wrong: list[dict[str, Any]] = [{"block": 1}, {"blocks": 0}, {"keep": -1.0}]
    for options in wrong:
        with pytest.raises(UnknownMethod, match="needs block"):
            recipe.build(entry, own, options)
    with pytest.raises(UnknownMethod, match="there is certainty"):
        recipe.build(entry, Target.load("parallel-full"), {})
