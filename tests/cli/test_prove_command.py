"""`outstride prove`: what it prints, and with which code it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outstride.accept.match import Match
from outstride.bench import result
from outstride.bench.prompts import built_in
from outstride.core.contracts import Exactness, Method
from outstride.core.graph import TokenId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.draft.plain import Plain
from outstride.llm import LLM
from tests.cli.shell import Shell


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
    ran = shell("prove", "--method", "ngram", "--max-tokens", "12", context=1024, pages=1024)
    assert ran.code == 0
    count = len(built_in())
    assert ran.last == f"ngram: equal on all {count} prompts"
    assert ran.out.startswith("ngram against plain on smollm2, greedy")
    assert "mean over groups" in ran.out
    assert f"✓ in batches of 8       {count} of {count} equal" in ran.out
    assert "✓ alone                 3 of 3 equal" in ran.out
    assert f"✓ among other methods   {count} of {count} equal" in ran.out
    assert "preemptions on" in ran.out


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
    assert shell("prove", "--method", "ngram", "--limit", "0").code == 2


def test_the_run_among_other_methods_can_be_left_out(shell: Shell, tmp_path: Path) -> None:
    options = ("--prompts", prompts(tmp_path), "--max-tokens", "8", "--no-mixed")
    ran = shell("prove", "--method", "ngram", *options)
    assert ran.code == 0
    assert "among other methods" not in ran.out
    ran = shell("prove", "--method", "ngram", *options, "--json")
    assert json.loads(ran.out)["summary"]["mixed"] is None


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


def test_prove_shows_where_texts_diverge(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Exactness.EXACT)
    file = prompts(tmp_path)
    ran = shell("prove", "--method", "ngram", "--prompts", file, "--max-tokens", "8")
    assert ran.code == 1
    assert "prompt 1 (mt_bench) differs:" in ran.out
    assert "output token 3, in a batch, after" in ran.out
    assert "also alone and among other methods: ngram, output token 3" in ran.out
    assert "plain: token " in ran.out
    assert "ngram: token " in ran.out
    assert "✗ in batches of 8       0 of 3 equal" in ran.out
    assert "difference of their raw logits: " in ran.out
    assert ran.last.endswith(
        "different on 3 of 3 prompts; it is declared exact, so this is a fault"
    )
    ran = shell("prove", "--method", "ngram", "--prompts", file, "--max-tokens", "8", "--json")
    assert ran.code == 1
    found = json.loads(ran.out)["samples"][0]["divergences"][0]
    assert found["position"] == 3
    assert found["logit_difference"] == pytest.approx(
        found["plain"]["logit"] - found["other"]["logit"]
    )


def test_prove_does_not_fail_what_may_differ(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Exactness.LOSSY)
    options = ("--prompts", prompts(tmp_path), "--max-tokens", "8")
    ran = shell("prove", "--method", "ngram", *options)
    assert ran.code == 0
    assert ran.last.endswith("it is declared lossy and may differ")
    assert shell("prove", "--method", "ngram", *options, "--strict").code == 1
    assert shell("prove", "--method", "suffix", *options, "--strict").code == 0


def test_prove_tests_a_distribution(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Exactness.DISTRIBUTION)
    options = ("--prompts", prompts(tmp_path), "--ignore-eos", "--max-tokens", "8", "--n", "8")
    ran = shell("prove", "--method", "ngram", *options, "--temperature", "0.9")
    assert ran.code == 1, "every fourth token of eight is another one"
    assert "✗ ranks" in ran.out
    assert "is found with probability 90%" in " ".join(ran.out.split())
    assert ran.last == "ngram: does not follow the target's distribution"
    ran = shell("prove", "--method", "ngram", *options, "--temperature", "0.9", "--json")
    summary = json.loads(ran.out)["summary"]
    assert (summary["equal"], summary["broken"]) == (None, True)
    values = summary["distribution"]
    assert not values["holds"]
    assert values["tokens"] == 3 * 8 * 8
    ran = shell("prove", "--method", "ngram", *options)
    assert (ran.code, "different on 3 of 3 prompts" in ran.last) == (1, True)


def test_prove_says_when_a_test_had_too_little(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, Exactness.DISTRIBUTION)
    options = ("--prompts", prompts(tmp_path), "--max-tokens", "2", "--temperature", "0.9")
    ran = shell("prove", "--method", "ngram", *options)
    assert ran.code == 0
    assert "not tested: too few" in ran.out
    assert ran.last == "ngram: too few tokens for a test"


def test_prove_lists_prompts_that_neither_answers(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text(f"short\n{'x' * 600}\n")
    ran = shell("prove", "--method", "ngram", "--prompts", str(file), "--max-tokens", "8")
    assert ran.code == 0
    assert "1 of 2 prompts could not be answered by either" in ran.out
    assert ran.last == "ngram: equal on all 1 prompt"


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
    assert ran.code == 2
    assert said in ran.err
    assert len(ran.err.splitlines()) == 1
