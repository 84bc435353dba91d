"""Tables of a Markdown file, generated from result files in the repository.

A block stands between `<!-- bench: NAME -->` and `<!-- end of bench -->` and is rewritten as a
whole, so a figure in the text cannot differ from the measured one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outstride.bench.report import page
from outstride.bench.result import BenchResult
from outstride.errors import OutstrideError

_BLOCK = re.compile(r"<!-- bench: ([\w-]+) -->\n.*?<!-- end of bench -->", re.DOTALL)
_PATHS = ("prompts", "gsm8k", "humaneval", "texts")
_SAMPLED = ("against",)
"""Kinds whose samples are the table itself."""
ALL, RANDOM = "all", "random"


def keep(folder: str | Path, target: str | Path) -> None:
    """Writes small copies of all results: without samples and without local paths."""
    place = Path(target)
    place.mkdir(parents=True, exist_ok=True)
    for name, result in page.read(folder).items():
        text = json.dumps(small(result).to_dict(), ensure_ascii=False, indent=1)
        (place / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def small(result: BenchResult) -> BenchResult:
    """A result with its summary only, rounded."""
    if result.kind not in _SAMPLED:
        result.samples = []
    else:
        result.samples = [{**sample, "raw": {}} for sample in result.samples]
    for name in _PATHS:
        if result.settings.get(name):
            result.settings[name] = Path(result.settings[name]).name
    result.summary = _rounded(result.summary)
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def _caption(result: BenchResult, what: str) -> str:
    machine = result.machine
    cpu = machine["accelerator"] or machine["cpu"]
    place = f"{cpu}, {machine['cores']} cores"
    busy = result.settings.get("load average")
    place += f", load average {busy[0]:g} before" if busy else ""
    return f"{what} ({place}, {result.started[:10]}{'' if result.complete else ', cut short'}):"


def _alone(result: BenchResult) -> list[dict[str, Any]]:
    """Lines of one greedy request at a time."""
    return [
        line
        for line in result.summary.get("lines", ())
        if (line["batch"], line["temperature"], line["warm"]) == (1, 0.0, False)
    ]


def _decode(found: dict[str, BenchResult]) -> Iterator[str]:
    """Tokens per pass and speed: one table for each set of prompts, from all runs on it."""
    sets: dict[tuple[Any, ...], list[BenchResult]] = {}
    for result in found.values():
        groups = dict.fromkeys(line["group"] for line in _alone(result))
        if result.kind == "decode" and len(groups) > 1:
            shown = tuple(group for group in groups if group not in (ALL, RANDOM))
            tokens = result.settings["params"]["max_tokens"]
            sets.setdefault((result.settings["prompts"], tokens, shown), []).append(result)
    for (prompts, tokens, shown), runs in sets.items():
        rows: dict[str, tuple[float, list[str]]] = {}
        count = 0
        runs.sort(key=lambda run: run.started, reverse=True)  # the newest run of a method counts
        for result in runs:
            lines = _alone(result)
            for method in dict.fromkeys(line["method"] for line in lines):
                mine = {line["group"]: line for line in lines if line["method"] == method}
                if method == lines[0]["method"] or method in rows:
                    continue
                count = sum(mine[group]["prompts"] for group in shown)
                rows[method] = _row(method, [mine[group] for group in shown], count)
        ordered = sorted(rows.values(), key=lambda row: -row[0])
        names = [group.replace("_", " ") for group in shown]
        what = (
            f"Tokens per pass over {count} prompts ({prompts}), {tokens} tokens each, greedy, one "
            "request at a time"
        )
        yield _caption(runs[0], what)
        head = ["", *names, "mean", "x plain's speed", "equal texts"]
        yield _table(head, [row for _, row in ordered])


def _row(method: str, lines: list[dict[str, Any]], count: int) -> tuple[float, list[str]]:
    """A method's row, and the value that it is sorted by."""
    mean = sum(line["tokens_per_pass"] for line in lines) / len(lines)
    ratio = sum(line["ratio"] for line in lines) / len(lines)
    equal = sum(line["equal"] for line in lines)
    passes = (f"{line['tokens_per_pass']:.2f}" for line in lines)
    return mean, [f"`{method}`", *passes, f"**{mean:.2f}**", f"{ratio:.2f}", f"{equal}/{count}"]


def _against(found: dict[str, BenchResult]) -> Iterator[str]:
    """Our figures and llama.cpp's."""
    for result in found.values():
        if result.kind != "against":
            continue
        rows = [
            [
                row["name"],
                f"{row['ours']:.1f} {row['unit']}",
                f"{row['theirs']:.1f} {row['unit']}",
                f"{row['ratio']:.2f}",
            ]
            for row in result.samples
            if row["theirs"] is not None and row["other"] == "llama.cpp"
        ]
        version = result.summary["peer"].get("version", "")
        yield _caption(result, f"Beside llama.cpp (llama-cpp-python {version}) on the same file")
        yield _table(["", "Outstride", "llama.cpp", "ratio"], rows)


def _engines(found: dict[str, BenchResult]) -> Iterator[str]:
    """Tokens per second of all engines."""
    for result in found.values():
        if result.kind != "peers":
            continue
        rates = result.summary["tokens_per_second"]
        batches = sorted({int(batch) for mine in rates.values() for batch in mine})
        rows = [
            [name, *(f"{mine[str(b)]:.0f}" if str(b) in mine else "" for b in batches)]
            for name, mine in rates.items()
        ]
        what = f"Tokens per second, answers of {result.settings['tokens']} tokens, prompts included"
        yield _caption(result, what)
        yield _table(["requests at a time", *map(str, batches)], rows)


BLOCKS: dict[str, Callable[[dict[str, BenchResult]], Iterator[str]]] = {
    "decode": _decode,
    "against": _against,
    "engines": _engines,
}


def with_tables(text: str, folder: str | Path) -> str:
    """A text with every block regenerated."""
    found = page.read(folder)

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise OutstrideError(f"there is no table {name!r}; tables are {', '.join(BLOCKS)}")
        made = "\n\n".join(BLOCKS[name](found))
        return f"<!-- bench: {name} -->\n{made}{'' if not made else chr(10)}<!-- end of bench -->"

    return _BLOCK.sub(block, text)


def rewrite(path: Path, folder: str | Path) -> None:
    """Rewrites the blocks of a file."""
    text = path.read_text(encoding="utf-8")
    if not _BLOCK.search(text):
        raise OutstrideError(
            f"{path}: no block between <!-- bench: NAME --> and <!-- end of bench -->"
        )
    path.write_text(with_tables(text, folder), encoding="utf-8")
