"""`--adapter NAME=FOLDER`: commands run with the first LoRA adapter that they are given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from outstride import LLM, SamplingParams
from outstride.cli import main
from outstride.models.load import load
from tests.cli.shell import Shell
from tests.models.lora_files import linear_shapes, write_lora
from tests.serve import tiny

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
OPTIONS = ("--raw", "--weights", "fp32", "--max-tokens", "10", "--ignore-eos")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model and two adapters for it."""
    top = tmp_path_factory.mktemp("adapters")
    base = tiny.make(top / "base")
    shapes = linear_shapes(load(str(base), weights="fp32", pages=8).model.config)
    for seed, name in enumerate(("french", "legal")):
        write_lora(top / name, shapes, seed=seed)
    return {name: top / name for name in ("base", "french", "legal")}


def test_run_uses_the_first_adapter(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [("--adapter", f"{name}={folders[name]}") for name in ("legal", "french")]
    options = [*OPTIONS, "--model", str(folders["base"]), *given[0], *given[1], "--json"]
    assert main(["run", "the box", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    adapters = {"legal": folders["legal"]}
    with LLM(folders["base"], adapters=adapters, weights="fp32", pages=64) as llm:
        [with_it] = llm.generate("the box", replace(PARAMS, adapter="legal"))
        [without] = llm.generate("the box", PARAMS)
        assert found["outputs"][0]["text"] == with_it.text != without.text
        assert found["fingerprint"] == llm.fingerprint_of("legal") != llm.fingerprint


def test_prove_holds_methods_to_plain_with_the_adapter(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("the box in the box\n")
    options = ["--model", str(folders["base"]), "--weights", "fp32", "--max-tokens", "8"]
    options += ["--adapter", f"french={folders['french']}", "--prompts", str(prompts)]
    assert main(["prove", "--method", "suffix", *options]) == 0
    assert "equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "given", "words"),
    [
        ("run", ["one", "another"], "one diffusion adapter"),
        ("run", ["=folder"], "write NAME=FOLDER"),
        ("run", ["x=a", "x=b"], "each name once"),
        ("serve", ["tiny=folder"], "the name of the model"),
    ],
)
def test_options_that_cannot_be(command: str, given: list[str], words: str, shell: Shell) -> None:
    options = [part for text in given for part in ("--adapter", text)]
    first = ["run", "hello"] if command == "run" else ["serve", "--name", "tiny"]
    ran = shell(*first, *options)
    assert ran.code != 0
    assert words in ran.err


def test_a_folder_that_is_no_adapter(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*OPTIONS, "--model", str(folders["base"]), "--adapter", f"x={tmp_path}"]
    assert main(["run", "the box", *options]) != 0
    assert "no adapter_config.json" in capsys.readouterr().err
    assert main(["run", "the box", *OPTIONS, "--model", str(folders["french"])]) != 0
    assert f"--adapter NAME={folders['french']}" in capsys.readouterr().err
