"""Prompts for benchmarks and proofs: from files, or those shipped with the project.

Supported files (each may be compressed with gzip, `.gz`):

- `.txt`: one prompt per line; empty lines are skipped. A prompt of several lines needs `.jsonl`.
- `.jsonl`: one object per line, of any of these kinds:
  - Spec-Bench: `question_id`, `category`, `turns`. The first turn is the prompt, the category
    is the group; the eight kinds of MT-Bench form one group, `mt_bench`.
  - GSM8K: `question`. HumanEval: `task_id`, `prompt`. They form groups of those names.
  - other objects with `prompt`; `group` (or `category`) and `id` are used if present.

Groups matter because tokens per pass depend on the task: a mean over groups does not change with the
number of prompts of each kind in a file. The shipped prompts have eight groups: chat, translation,
summary, question, maths, retrieval, code and rewriting.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from outstride.errors import InvalidPrompt

T = TypeVar("T")

MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A prompt, its id in its file, and its group (kind of task)."""

    id: str
    group: str
    text: str


def read_prompts(path: str | Path) -> list[BenchPrompt]:
    """The prompts of a file, in order."""
    file = Path(path)
    suffixes = [s.lower() for s in file.suffixes]
    packed = suffixes[-1:] == [".gz"]
    kind = suffixes[-2:-1] if packed else suffixes[-1:]
    if kind not in ([".txt"], [".jsonl"]):
        raise InvalidPrompt(f"{path}: prompt files end in .txt or .jsonl (or either with .gz)")
    try:
        raw = gzip.decompress(file.read_bytes()) if packed else file.read_bytes()
        lines = raw.decode("utf-8").splitlines()
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise InvalidPrompt(f"{path}: cannot be read: {error}") from error
    stem = file.name.partition(".")[0]
    if kind == [".txt"]:
        prompts = list(_from_text(lines, stem))
    else:
        prompts = list(_from_json(lines, stem, str(path)))
    if not prompts:
        raise InvalidPrompt(f"{path}: there is no prompt in it")
    return prompts


def _from_text(lines: Sequence[str], stem: str) -> Iterator[BenchPrompt]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield BenchPrompt(f"{stem}:{number}", stem, line.strip())


def _from_json(lines: Sequence[str], stem: str, source: str) -> Iterator[BenchPrompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{source}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidPrompt(f"{place}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InvalidPrompt(f"{place}: expected an object")
        name, group, text = _fields(row, stem, number, place)
        if not isinstance(text, str) or not text.strip():
            raise InvalidPrompt(f"{place}: the prompt is empty or not text")
        yield BenchPrompt(name, group, text)


def _fields(row: Mapping[str, Any], stem: str, number: int, place: str) -> tuple[str, str, Any]:
    """Id, group and text of a row, by the fields that it has."""
    if "turns" in row:
        category = str(row.get("category", stem))
        turns = row["turns"]
        first = turns[0] if isinstance(turns, list) and turns else None
        name = str(row.get("question_id", f"{stem}:{number}"))
        return name, "mt_bench" if category in MT_BENCH else category, first
    if "question" in row:
        return f"{stem}:{number}", str(row.get("category", "gsm8k")), row["question"]
    if "prompt" in row and "task_id" in row:
        return str(row["task_id"]), "humaneval", row["prompt"]
    if "prompt" in row:
        group = str(row.get("group", row.get("category", stem)))
        return str(row.get("id", f"{stem}:{number}")), group, row["prompt"]
    raise InvalidPrompt(
        f"{place}: no prompt found; a line has turns, question or prompt, this one has "
        f"{', '.join(map(str, row)) or 'nothing'}"
    )


def spread(prompts: Sequence[T], limit: int | None) -> list[T]:
    """At most `limit` prompts, evenly spaced over the list, because files are sorted by kind."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


SHIPPED = Path(__file__).parent / "data" / "prompts.jsonl"
"""Written for this project: five or six prompts of each kind of task, the first dozen of all kinds."""
DOZEN = 12


def shipped() -> list[BenchPrompt]:
    """All shipped prompts."""
    return read_prompts(SHIPPED)


def built_in() -> list[BenchPrompt]:
    """The first dozen shipped prompts, for slow measurements."""
    return shipped()[:DOZEN]
