"""Scores: answers are judged as a person would, and lossy methods beside what they replace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from outstride.bench import jail, quality, result
from outstride.bench.quality import QualityReport, Question, Score, code_of, measure, number_of
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams, InvalidPrompt, OutstrideError
from tests.bench.fake import make_llm
from tests.cli.shell import Shell

confined = pytest.mark.skipif(not jail.supported(), reason="generated code is not run here")
ADD = {
    "task_id": "Own/0",
    "prompt": 'def add(a, b):\n    """Adds."""\n',
    "entry_point": "add",
    "test": "def check(f):\n    assert f(2, 3) == 5\n",
}
SUM = {"question": "2 and 2?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}


def jsonl(path: Path, *rows: Any) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 * 4 = 12\n#### 12", 12),
        ("#### 1,234 dollars", 1234),
        ("#### $18.50", 18.5),
        ("first 5, then 7.", 7),
        ("it falls by -3", -3),
        ("#### nothing, but 4 before", 4),
        ("9 apples\n#### none", 9),
        ("no idea", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: float | None) -> None:
    assert number_of(text) == number


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ("Sure!\n```python\ndef add(a, b):\n    return a + b\n```\nThat adds.", True),
        ("```\nimport os\n```\n```python\ndef add(a, b):\n    return b + a\n```", True),
        ("    return a + b\n", True),
        ("```python\n    return a + b\n```", True),
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("I cannot do that.", False),
        ("```python\ndef add(a, b):\n    import os\n    os._exit(0)\n```", False),
    ],
)
@confined
def test_code_is_judged_by_its_tests(tmp_path: Path, said: str, right: bool) -> None:
    [question] = quality.humaneval(jsonl(tmp_path / "h.jsonl.gz", ADD))
    assert (question.id, question.task) == ("Own/0", "humaneval")
    assert ADD["prompt"] in question.prompt
    assert question.judge(said) is right


def test_unfinished_code_blocks_count() -> None:
    assert code_of("```py\ndef f():\n    return 1", "P\n", "f") == "P\n\ndef f():\n    return 1"


def test_sums_are_judged_by_their_number(tmp_path: Path) -> None:
    [question] = quality.gsm8k(jsonl(tmp_path / "g.jsonl", SUM))
    assert question.judge("2 + 2 is 4.")
    assert question.judge("#### 4.0")
    assert not question.judge("#### 5")
    assert not question.judge("")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "x"}, "'answer' is needed"),
        ({"question": "x", "answer": "none"}, "has no number"),
        ([1], "'question' is needed"),
    ],
)
def test_bad_files(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(InvalidPrompt, match=f"line 1: .*{said}"):
        quality.gsm8k(jsonl(tmp_path / "g.jsonl", row))
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(InvalidPrompt, match=r"not a \.jsonl"):
        quality.gsm8k(tmp_path / "broken.jsonl")


def test_code_needs_a_place_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "supported", lambda: False)
    with pytest.raises(OutstrideError, match="only where it can be confined"):
        quality.humaneval(jsonl(tmp_path / "h.jsonl", ADD))


def questions() -> list[Question]:
    texts = ("abcabc", "hello hello", "the fox the fox")
    return [
        Question(f"q{i}", "own", text, lambda said: "a" in said) for i, text in enumerate(texts)
    ]


def test_methods_are_scored_with_their_baseline() -> None:
    ticks: list[tuple[int, int]] = []
    with make_llm() as llm:
        report = measure(
            llm,
            ["ngram", "suffix"],
            questions(),
            SamplingParams(max_tokens=40, seed=0),
            batch=2,
            progress=lambda *now: ticks.append(now),
        )
    assert report.methods == ["plain", "ngram", "suffix"]
    assert ticks[-1] == (6, 6)
    plain, ngram, _ = report.scores()
    assert (plain.asked, plain.equal, plain.tokens_per_pass) == (3, 3, 1.0)
    assert (ngram.right, ngram.equal) == (plain.right, 3)
    assert ngram.baseline == "plain"
    assert ngram.tokens_per_pass > 1.0
    assert {sample["id"] for sample in report.samples()} == {"q0", "q1", "q2"}
    with make_llm() as llm, pytest.raises(InvalidParams):
        measure(llm, ["ngram"], [], SamplingParams())


def test_intervals() -> None:
    low, high = Score("m", "lossy", "plain", "t", 100, 50, 0, 1.0, 1.0).interval
    assert low == pytest.approx(40.4, abs=0.1)
    assert high == pytest.approx(59.6, abs=0.1)
    assert Score("m", "lossy", "plain", "t", 10, 0, 0, 1.0, 1.0).interval[0] == 0.0
    assert QualityReport().summary() == {"scores": []}


@confined
def test_the_command(shell: Shell, tmp_path: Path) -> None:
    files = jsonl(tmp_path / "g.jsonl", SUM, SUM), jsonl(tmp_path / "h.jsonl", ADD)
    options = ("--gsm8k", str(files[0]), "--humaneval", str(files[1]), "--max-tokens", "12")
    ran = shell("bench", "quality", "--methods", "ngram", *options, "--limit", "1", "--batch", "1")
    assert ran.code == 0
    values = result.validate(json.loads(ran.last))
    assert values["kind"] == "quality"
    assert [(s["method"], s["task"]) for s in values["summary"]["scores"]] == [
        *(("plain", "gsm8k"), ("plain", "humaneval"), ("ngram", "gsm8k"), ("ngram", "humaneval"))
    ]
    assert "score, %" in ran.out


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--methods", "ngram"), "name a file"), (("--methods", "ngrm"), "did you mean ngram")],
)
def test_bad_requests(shell: Shell, options: tuple[str, ...], said: str) -> None:
    ran = shell("bench", "quality", *options, pages=0)
    assert ran.code == 1
    assert said in ran.err
