"""`outstride methods` and `outstride models`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outstride import registry
from outstride.models.fetch import ALIASES
from tests.cli.shell import Shell


def test_methods_for_people(shell: Shell) -> None:
    ran = shell("methods")
    assert ran.code == 0
    for entry in registry.entries():
        assert entry.name in ran.out
        assert entry.exactness.value in ran.out
    assert "length=8" in ran.out


def test_methods_for_programs(shell: Shell) -> None:
    rows = json.loads(shell("methods", "--json").out)
    assert [row["name"] for row in rows] == [entry.name for entry in registry.entries()]
    for row in rows:
        assert {"name", "family", "exactness", "needs", "paper"} <= row.keys()
        assert {"summary", "cost", "options"} <= row.keys()
        assert row["exactness"] in ("exact", "distribution", "lossy")
        assert isinstance(row["needs"], list)
    ngram = next(row for row in rows if row["name"] == "ngram")
    assert ngram["needs"] == []
    assert {"name": "length", "type": "int", "default": 8, "required": False} in ngram["options"]
    draft = next(row for row in rows if row["name"] == "draft")
    assert draft["needs"] == ["draft model"]
    assert draft["options"][0] == {
        "name": "model",
        "type": "str",
        "default": None,
        "required": True,
    }


@pytest.mark.parametrize("name", ["threshold", "draft", "plain", "suffix"])
def test_one_method_in_full(shell: Shell, name: str) -> None:
    ran, entry = shell("methods", name), registry.entry(name)
    assert ran.code == 0
    shown = " ".join(ran.out.split())
    for text in (entry.summary, entry.details, entry.cost, entry.paper, entry.exactness.value):
        assert " ".join(text.split())[:60] in shown
    for option in entry.options:
        value = "required" if option.required else f"default {option.default!r}"
        assert f"{option.name} ({option.type.__name__}, {value})" in shown
    assert f"--method {entry.example}" in shown
    assert registry.parse(entry.example)[0].name == name
    assert json.loads(shell("methods", name, "--json").out)["name"] == name


def test_every_example_spec_can_be_parsed() -> None:
    for entry in registry.entries():
        assert registry.parse(entry.example)[0] is entry


def test_an_unknown_method_suggests_a_similar_one(shell: Shell) -> None:
    ran = shell("methods", "thresold")
    assert ran.code != 0
    assert "did you mean threshold" in ran.err


def test_models(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path))
    values = json.loads(shell("models", "--json").out)
    assert [model["name"] for model in values["models"]] == sorted(ALIASES)
    assert not any(model["cached"] for model in values["models"])
    assert "LlamaForCausalLM" in values["architectures"]
    ran = shell("models")
    assert ran.code == 0
    assert "smollm2" in ran.out
    assert " no " in ran.out
    assert set(values["shipped"]) == {"parallel-block", "parallel-full"}
    assert all(name in ran.out for name in values["shipped"])

    source = ALIASES["smollm2"]
    path = tmp_path / "models" / source.filename
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(source.size)
    [model] = json.loads(shell("models", "--json").out)["models"]
    assert (model["cached"], model["path"]) == (True, str(path))
    assert " yes " in shell("models").out
