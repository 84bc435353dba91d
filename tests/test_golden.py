"""Golden texts: what the default model said is what it says, unless the changelog says otherwise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outstride import LLM
from outstride.ops.cpu import native
from tests.golden import make

ROOT = Path(__file__).resolve().parent.parent
AGAIN = 'python tests/golden/make.py FORMAT "the line of CHANGELOG.md that names the change"'


@pytest.fixture(scope="module", params=make.FILES)
def weights(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kept(weights: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(make.FILES[weights].read_text())
    return found


@pytest.fixture(scope="module")
def llm(kept: dict[str, Any], weights: str) -> Iterator[LLM]:
    if native.library_path() is None:
        pytest.skip("the native kernels were not built")
    with LLM(make.MODEL, weights=weights, device="cpu") as made:
        assert make.operations(made) == kept["operations"]
        yield made


@pytest.mark.model
@pytest.mark.parametrize("method", ["plain", "ngram", "mix"])
def test_no_text_changed(llm: LLM, kept: dict[str, Any], method: str) -> None:
    assert llm.model.digest == kept["weights"], (
        "the weights are others; if they should be: " + AGAIN
    )
    for said, golden in zip(make.answers(llm, method), kept["texts"], strict=True):
        assert said == golden, f"{method} changed a text; if it should: {AGAIN}"


def test_each_change_is_in_the_changelog(kept: dict[str, Any]) -> None:
    changes = [entry["change"] for entry in kept["history"]]
    assert changes
    assert len(set(changes)) == len(changes)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for change in changes:
        assert change in changelog, f"CHANGELOG.md lacks the line: {change}"


def test_the_texts_are_those_that_the_history_names(kept: dict[str, Any]) -> None:
    texts = kept["texts"]
    assert make.digest(texts) == kept["history"][-1]["digest"], "edited by hand? " + AGAIN
    assert [(text["prompt"], text["sampling"]) for text in texts] == make.asked()


def test_a_changed_text_needs_a_line_of_its_own(kept: dict[str, Any]) -> None:
    texts, history = kept["texts"], kept["history"]
    assert make.renewed(kept, texts, "") == history
    other = [{**texts[0], "text": texts[0]["text"] + "!"}, *texts[1:]]
    for line in ("", history[-1]["change"]):
        with pytest.raises(SystemExit, match="say why"):
            make.renewed(kept, other, line)
    assert make.renewed(kept, other, "a new line")[-1]["digest"] == make.digest(other)
