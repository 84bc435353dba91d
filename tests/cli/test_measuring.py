"""`outstride bench step` and `outstride prove`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outstride.accept.match import Match
from outstride.bench import result
from outstride.core.contracts import Exactness, Method
from outstride.core.graph import TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.draft.plain import Plain
from outstride.llm import LLM
from tests.cli.shell import Shell

STEP = ("bench", "step", "--nodes", "1,2,4", "--cached", "8", "--lengths", "0,16", "--repeat", "2")


def test_step_ends_with_one_json_object(shell: Shell, tmp_path: Path) -> None:
    ran = shell(*STEP, "--sequences", "1,3", "--out", str(tmp_path / "step.json"))
    assert ran.code == 0
    values = result.validate(json.loads(ran.last))
    assert values["kind"] == "step"
    assert values["settings"]["model"] == "smollm2"
    assert list(values["summary"]["milliseconds"]["nodes"]) == ["1", "2", "4"]
    assert list(values["summary"]["milliseconds"]["cached"]) == ["0", "16"]
    assert list(values["summary"]["milliseconds"]["sequences"]) == ["1", "3"]
    assert "behind 8 cached entries" in ran.out
    assert result.read(tmp_path / "step.json").to_dict() == values


def test_step_for_programs(shell: Shell) -> None:
    ran = shell(*STEP, "--model", "other", "--json")
    assert len(ran.out.splitlines()) == 1
    assert json.loads(ran.out)["settings"]["model"] == "other"


def test_step_says_what_it_left_out(shell: Shell) -> None:
    ran = shell("bench", "step", "--nodes", "1", "--lengths", "99999", "--repeat", "1")
    assert "left out: cached 99999: the model's context holds 512" in ran.out
    assert json.loads(ran.last)["summary"]["skipped"][0]["cached"] == 99999


@pytest.mark.parametrize("option", ["--nodes=0", "--cached=-1", "--repeat=0"])
def test_step_refuses_nonsense(shell: Shell, option: str) -> None:
    ran = shell("bench", "step", option)
    assert ran.code == 1
    assert ran.err.startswith("error: ")


def prompts(folder: Path) -> str:
    file = folder / "prompts.jsonl"
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["abc abc abc"]},
        {"question_id": 2, "category": "math", "turns": ["one two one two"]},
        {"question_id": 3, "category": "qa", "turns": ["hello"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_prove_on_built_in_prompts(shell: Shell) -> None:
    ran = shell("prove", "--method", "ngram", "--max-tokens", "16", context=1024, pages=1024)
    assert ran.code == 0
    assert ran.last == "ngram: equal on all 12 prompts (3 of them also alone)"
    assert "mean over groups" in ran.out


def test_prove_for_programs(shell: Shell, tmp_path: Path) -> None:
    arguments = ["--prompts", prompts(tmp_path), "--temperature", "0.8", "--seed", "7", "--json"]
    more = ["--batch", "2", "--alone", "1", "--raw", "--out", str(tmp_path / "out.json")]
    ran = shell("prove", "--method", "ngram:length=4", "--max-tokens", "20", *arguments, *more)
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 1
    values = result.validate(json.loads(ran.out))
    assert values["summary"]["equal"] is True
    assert values["summary"]["groups"].keys() == {"mt_bench", "qa"}
    assert values["summary"]["groups"]["mt_bench"]["prompts"] == 2
    assert values["settings"]["method"] == "ngram:length=4"
    assert values["settings"]["params"]["temperature"] == 0.8
    assert (values["settings"]["batch"], values["settings"]["alone"]) == (2, 1)
    assert [sample["id"] for sample in values["samples"]] == ["1", "2", "3"]
    assert result.read(tmp_path / "out.json").summary == values["summary"]


def test_prove_limit(shell: Shell, tmp_path: Path) -> None:
    file = prompts(tmp_path)
    ran = shell("prove", "--method", "ngram", "--prompts", file, "--limit", "2")
    assert "equal on all 2 prompts" in ran.last
    assert shell("prove", "--method", "ngram", "--limit", "0").code == 1


class Wrong(Match):
    """Puts another token at the fourth place."""

    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        verdict = super().accept(view, proposal, scores)
        if int(view.end) - view.prompt_length != 3:
            return verdict
        settled = {at: TokenId((int(token) + 3) % 20 + 1) for at, token in verdict.settled.items()}
        return Verdict(settled, verdict.keep)


def plant(monkeypatch: pytest.MonkeyPatch, exactness: Exactness) -> None:
    """Makes `ngram` mean something faulty, for the models of this test alone."""
    usual = LLM.method

    def method(self: LLM, spec: str | Method) -> Method:
        if spec == "ngram":
            return Method("ngram", Plain(), Wrong(), exactness, "ngram")
        return usual(self, spec)

    monkeypatch.setattr(LLM, "method", method)


def test_prove_shows_where_texts_part(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Exactness.EXACT)
    file = prompts(tmp_path)
    ran = shell("prove", "--method", "ngram", "--prompts", file, "--max-tokens", "8")
    assert ran.code == 1
    assert "prompt 1 (mt_bench) differs:" in ran.out
    assert "output token 3, in a batch, behind" in ran.out
    assert "output token 3, alone, behind" in ran.out
    assert "plain:  token " in ran.out
    assert "gap between their raw logits: " in ran.out
    assert ran.last.endswith(
        "different on 3 of 3 prompts; it is declared exact, so this is a fault"
    )
    ran = shell("prove", "--method", "ngram", "--prompts", file, "--max-tokens", "8", "--json")
    assert ran.code == 1
    found = json.loads(ran.out)["samples"][0]["divergences"][0]
    assert found["position"] == 3
    assert found["gap"] == pytest.approx(found["plain"]["logit"] - found["other"]["logit"])


def test_prove_does_not_fail_what_may_differ(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Exactness.DISTRIBUTION)
    ran = shell("prove", "--method", "ngram", "--prompts", prompts(tmp_path), "--max-tokens", "8")
    assert ran.code == 0
    assert ran.last.endswith("it is declared distribution and may differ")


def test_prove_tells_of_prompts_that_nobody_answers(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text(f"short\n{'x' * 600}\n")
    ran = shell("prove", "--method", "ngram", "--prompts", str(file), "--max-tokens", "8")
    assert ran.code == 0
    assert "1 of 2 prompts could not be answered by either" in ran.out
    assert ran.last.startswith("ngram: equal on all 1 prompt (")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "ngrm"], "did you mean ngram"),
        (["--method", "ngram", "--prompts", "none.txt"], "No such file or directory: none.txt"),
        (["--method", "ngram", "--batch", "0"], "batch"),
    ],
)
def test_prove_bad_requests(shell: Shell, arguments: list[str], said: str) -> None:
    ran = shell("prove", *arguments)
    assert ran.code == 1
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1


def test_decode_compares_methods_and_ends_in_json(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("abcabc\nhello hello\n")
    options = ("--methods", "auto ngram", "--prompts", str(file), "--max-tokens", "6", "--warm")
    ran = shell("bench", "decode", *options)
    assert ran.code == 0
    values = json.loads(ran.last)
    assert values["kind"] == "decode"
    assert {line["method"] for line in values["summary"]["lines"]} == {"plain", "auto", "ngram"}
    assert all(line["equal"] == line["prompts"] for line in values["summary"]["lines"])


@pytest.mark.parametrize(
    "options",
    [("--limit", "0"), ("--batch", "0"), ("--rounds", "0"), ("--random", "-1"), ("--methods", "x")],
)
def test_decode_refuses_nonsense_before_it_loads_a_model(
    shell: Shell, options: tuple[str, str]
) -> None:
    ran = shell("bench", "decode", *options, pages=0)
    assert ran.code == 1
    assert ran.err.startswith("error: ")
