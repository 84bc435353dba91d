"""Prompt files of every kind that is understood, and clear words about the others."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outstride.bench.prompts import BenchPrompt, built_in, read_prompts, shipped, spread
from outstride.errors import InvalidPrompt


def jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_text_has_one_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("first\n\n  second  \n")
    assert read_prompts(file) == [
        BenchPrompt("mine:1", "mine", "first"),
        BenchPrompt("mine:3", "mine", "second"),
    ]


def test_spec_bench(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"question_id": 82, "category": "stem", "turns": ["three"]},
        {"question_id": 83, "category": "translation", "turns": ["four"]},
    )
    assert read_prompts(file) == [
        BenchPrompt("81", "mt_bench", "one"),
        BenchPrompt("82", "mt_bench", "three"),
        BenchPrompt("83", "translation", "four"),
    ]


def test_gsm8k_and_humaneval_and_own(tmp_path: Path) -> None:
    assert read_prompts(jsonl(tmp_path / "a.jsonl", {"question": "2+2?", "answer": "4"})) == [
        BenchPrompt("a:1", "gsm8k", "2+2?")
    ]
    row = {"task_id": "HumanEval/0", "prompt": "def f():", "entry_point": "f"}
    assert read_prompts(jsonl(tmp_path / "b.jsonl", row)) == [
        BenchPrompt("HumanEval/0", "humaneval", "def f():")
    ]
    rows = {"prompt": "x"}, {"prompt": "y", "group": "g", "id": 7}, {"prompt": "z", "category": "c"}
    assert read_prompts(jsonl(tmp_path / "c.jsonl", *rows)) == [
        BenchPrompt("c:1", "c", "x"),
        BenchPrompt("7", "g", "y"),
        BenchPrompt("c:3", "c", "z"),
    ]


def test_packed(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "x"}\n\n'))
    assert [prompt.text for prompt in read_prompts(file)] == ["x"]
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(b"y\n"))
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.txt.gz")] == ["y"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"x", "end in .txt or .jsonl"),
        ("a.gz", b"x", "end in .txt or .jsonl"),
        ("a.txt", b"\n \n", "no prompt in it"),
        ("a.txt", b"\xff\xfe", "cannot be read"),
        ("a.txt.gz", b"plain", "cannot be read"),
        ("a.txt.gz", gzip.compress(b"x" * 1000, mtime=0)[:20], "cannot be read"),
        ("a.jsonl", b"{", "line 1: not JSON"),
        ("a.jsonl", b"[]", "expected an object"),
        ("a.jsonl", b'{"prompt": "x"}\n{"text": "y"}', "line 2: no prompt found.* has text"),
        ("a.jsonl", b'{"turns": []}', "empty or not text"),
        ("a.jsonl", b'{"prompt": 3}', "empty or not text"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidPrompt, match=said):
        read_prompts(tmp_path / name)


def test_shipped_prompts_are_of_every_kind() -> None:
    prompts = shipped()
    groups = Counter(prompt.group for prompt in prompts)
    assert set(groups) == {
        *("chat", "translation", "summary", "question"),
        *("maths", "retrieval", "code", "rewriting"),
    }
    assert min(groups.values()) >= 5
    assert len({prompt.id for prompt in prompts}) == len({p.text for p in prompts}) == len(prompts)
    assert max(len(prompt.text) for prompt in prompts) < 2000


def test_the_dozen_has_all_kinds() -> None:
    prompts = built_in()
    assert len(prompts) == 12
    assert {prompt.group for prompt in prompts} == {prompt.group for prompt in shipped()}
    assert prompts == shipped()[:12]


def test_spread_reaches_every_part() -> None:
    prompts = [BenchPrompt(str(i), "g", "x") for i in range(10)]
    assert [p.id for p in spread(prompts, 4)] == ["0", "2", "5", "7"]
    assert spread(prompts, None) == spread(prompts, 99) == prompts
