"""`outstride write-data` and `outstride train`, one behind the other on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from outstride.train.corpus_files import Corpus
from tests.cli.shell import Ran, Shell
from tests.serve import tiny

PROMPTS = [f"Tell me about number {i}, please." for i in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.make(tmp_path_factory.mktemp("model") / "tiny"))


def write(shell: Shell, model: str, folder: Path, *more: str) -> Ran:
    prompts = folder.parent / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    options = ["--tokens", "120", "--max-answer", "10", "--weights", "fp32", "--concurrency", "8"]
    given = ["--prompts", str(prompts)]
    return shell("write-data", model, "--out", str(folder), *given, *options, *more)


def train(shell: Shell, model: str, folder: Path, *more: str) -> Ran:
    options = ["--steps", "3", "--batch", "4", "--length", "96", "--held", "0.2", "--device", "cpu"]
    small = ["--set", "layers=1,block=4,anchors=4,taps=1,2,rank=4"]
    places = ["--data", str(folder / "corpus"), "--out", str(folder / "part")]
    return shell("train", "block-drafter", "--model", model, *places, *options, *small, *more)


def test_from_a_corpus_to_a_draft_head(shell: Shell, model: str, tmp_path: Path) -> None:
    ran = write(shell, model, tmp_path / "corpus")
    assert ran.code == 0, ran.err
    assert "tokens/s" in ran.err
    about = Corpus.open(tmp_path / "corpus").about
    assert about["spec"]["prompts"] == 24
    texts, tokens = about["texts"], about["tokens"]
    assert texts < 24
    assert 120 <= tokens < 130
    assert f"{texts} texts, {tokens} tokens of answers" in ran.out
    again = write(shell, model, tmp_path / "corpus")
    assert f"holds {texts} texts; continuing" in again.err
    assert again.out == ran.out

    ran = train(shell, model, tmp_path)
    assert ran.code == 0, ran.err
    assert "expected tokens per pass: " in ran.out
    assert "expected speed-up on this machine: " in ran.out
    assert "step 3 of 3" in ran.err
    config = json.loads((tmp_path / "part" / "config.json").read_text())
    assert config["outstride"] == "block-drafter"
    assert config["target"]["layers"] == 2
    recipe = json.loads((tmp_path / "part" / "recipe.json").read_text())
    assert recipe["run"]["options"]["block"] == 4
    assert recipe["data"]["spec"]["max_answer"] == 10
    with safe_open(tmp_path / "part" / "model.safetensors", "pt") as file:
        assert file.get_tensor("fc.weight").shape == (64, 128)
    again = train(shell, model, tmp_path, "--no-forecast")
    assert "already holds this training" in again.out
    assert "speed-up" not in again.out
    other = train(shell, model, tmp_path, "--seed", "1")
    assert other.code == 1
    assert "seed was 0 there and is 1 now" in other.err


def test_long_prompts_and_several_folders(shell: Shell, model: str, tmp_path: Path) -> None:
    """Passages from an earlier corpus; training on both; and further training from what that made."""
    first, long = tmp_path / "corpus", tmp_path / "long"
    write(shell, model, first, "--max-answer", "40", "--tokens", "200")
    ran = write(shell, model, long, "--passages", str(tmp_path / "none"))
    assert ran.code == 1
    assert "is no corpus folder" in ran.err
    assert not long.exists()
    ran = write(shell, model, long, "--passages", str(first), "--max-passage", "64", "--seed", "5")
    assert ran.code == 0, ran.err
    about = Corpus.open(long).about["spec"]
    assert (about["passages"], about["max_passage"]) == (Corpus.open(first).digest(), 64)

    ran = train(shell, model, tmp_path, "--data", str(long), "--no-forecast")
    assert ran.code == 0, ran.err
    recipe = json.loads((tmp_path / "part" / "recipe.json").read_text())
    assert [part["spec"]["seed"] for part in recipe["data"]["folders"]] == [0, 5]
    further = f"layers=1,block=4,anchors=4,taps=1,2,rank=4,begin={tmp_path / 'part'}"
    again = ["--data", str(long), "--no-forecast", "--out", str(tmp_path / "more")]
    ran = train(shell, model, tmp_path, *again, "--set", further)
    assert ran.code == 0, ran.err
    ran = train(shell, model, tmp_path, *again, "--set", further.replace("block=4", "block=5"))
    assert ran.code != 0
    assert "has block 4 where this training has 5" in ran.err


def test_a_corpus_of_another_model_is_refused(shell: Shell, model: str, tmp_path: Path) -> None:
    write(shell, model, tmp_path / "corpus", "--tokens", "20")
    about = json.loads((tmp_path / "corpus" / "corpus.json").read_text())
    (tmp_path / "corpus" / "corpus.json").write_text(json.dumps({**about, "vocabulary": "-"}))
    ran = train(shell, model, tmp_path)
    assert ran.code == 1
    assert "another vocabulary" in ran.err


def test_no_corpus(shell: Shell, model: str, tmp_path: Path) -> None:
    ran = train(shell, model, tmp_path)
    assert ran.code == 1
    assert "outstride write-data MODEL --out" in ran.err


def test_other_options_are_refused_for_a_corpus_that_was_begun(
    shell: Shell, model: str, tmp_path: Path
) -> None:
    assert write(shell, model, tmp_path / "corpus", "--tokens", "20").code == 0
    ran = write(shell, model, tmp_path / "corpus", "--seed", "2")
    assert ran.code == 1
    assert "other options" in ran.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "name a recipe, --data"),
        (["train", "block-draft", "--data", "a", "--out", "b"], "did you mean block-drafter"),
        (["train", "block-drafter", "--data", "a", "--out", "b", "--set", "x=1"], "no option 'x'"),
        (["train", "block-drafter", "--data", "a", "--out", "b", "--steps", "0"], "above 0"),
        (["write-data", "--out", "w", "--tokens", "0"], "above 0"),
        (["write-data", "--out", "w", "--answers", "greedy=0.6,sampled=0.6"], "add up to 1"),
        (["write-data", "--out", "w", "--answers", "spoken=1"], "has no option 'spoken'"),
        (["write-data", "--out", "w", "--kinds", "2"], "between 0 and 1"),
        (["write-data", "--out", "w", "--workers", "0"], "at least 1"),
        (["write-data", "nothing-of-that-name", "--out", "w"], "there is no model"),
    ],
)
def test_wrong_command_lines(
    arguments: list[str],
    said: str,
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = shell(*arguments)
    assert ran.code == 1
    assert said in ran.err
    assert not list(tmp_path.iterdir())


def test_the_list_of_recipes(shell: Shell) -> None:
    ran = shell("train", "--list")
    assert ran.code == 0
    assert "block-drafter" in ran.out
    assert "anchors" in ran.out
    assert "the model stays unchanged" in ran.out


@pytest.mark.parametrize("command", ["write-data", "train"])
def test_help(command: str, shell: Shell) -> None:
    ran = shell(command, "--help")
    assert ran.code == 0
    assert "The same command resumes an interrupted" in " ".join(ran.out.split())
