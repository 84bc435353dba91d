"""The loss of a diffusion adapter on given answers, by size of block, beside the model's own.

    .venv/bin/python docs/experiments/adapter_loss.py FOLDER --gsm8k test.jsonl --humaneval FILE

Questions and their given answers in the model's chat format, prompts of code and their solutions. For
each size, any number of the places behind the first one of a block, drawn evenly, is open, and their
mean loss is taken: over all numbers, that is what a token costs in nats if a block is filled in in a
random order. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from outstride.models.draft_heads.folder import read_config, read_tensors
from outstride.train.corpus_files import TrainingRows
from outstride.train.diffusion_adapter import DiffusionAdapterRecipe
from outstride.train.target import Target

LENGTH = 512


def entries(file: Path, limit: int) -> list[dict[str, Any]]:
    """`count` lines of a file, packed or not, spread evenly."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines if line.strip()]
    return found[:: max(1, len(found) // limit)][:limit]


def texts(args: argparse.Namespace, target: Target) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """By task: what is asked, template and all, and what is answered."""
    assert target.tokenizer is not None
    chat = target.tokenizer.chat
    if args.gsm8k:
        found = entries(args.gsm8k, args.limit)
        yield (
            "gsm8k",
            [(chat([{"role": "user", "content": e["question"]}]), e["answer"]) for e in found],
        )
    if args.humaneval:
        found = entries(args.humaneval, args.limit)
        yield "humaneval", [(e["prompt"], e["canonical_solution"]) for e in found]


def rows_of(target: Target, pairs: list[tuple[str, str]]) -> TrainingRows:
    assert target.tokenizer is not None
    encode = target.tokenizer.encode
    parts = [(encode(a, add_special=False), encode(b, add_special=False)) for a, b in pairs]
    parts = [(a, b) for a, b in parts if len(a) >= 1 and len(b) >= 2 and len(a) + 2 <= LENGTH]
    tokens = torch.zeros(len(parts), LENGTH, dtype=torch.long)
    for row, (asked, answer) in enumerate(parts):
        whole = torch.tensor([*asked, *answer])[:LENGTH]
        tokens[row, : len(whole)] = whole
    starts = torch.tensor([len(asked) for asked, _ in parts])
    stops = torch.tensor([min(LENGTH, len(a) + len(b)) for a, b in parts])
    return TrainingRows(
        tokens, starts, stops, torch.zeros(len(parts)).bool(), torch.arange(len(parts))
    )


@torch.no_grad()
def losses(recipe: DiffusionAdapterRecipe, rows: TrainingRows) -> dict[str, float]:
    sums: dict[str, torch.Tensor] = {}
    with recipe.target.autocast():
        for i in range(0, len(rows), 4):
            some = rows.take(slice(i, i + 4)).to(recipe.target.device)
            for name, found in recipe.sums(some, recipe.context_hidden(some, final=True), i):
                at = f"loss_{name}"
                sums[at] = sums.get(at, torch.zeros(2, dtype=torch.float64)) + found.double().cpu()
    return {name: round(float(both[0] / both[1]), 4) for name, both in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    target = Target.load(args.model, args.device)
    recipe = DiffusionAdapterRecipe(
        target, rank=int(read_config(args.folder)["rank"]), sizes="4,8,16,32", compiled=False
    )
    recipe.weights = {n: v.to(args.device) for n, v in read_tensors(args.folder).items()}
    found = {}
    for task, pairs in texts(args, target):
        rows = rows_of(target, pairs)
        found[task] = {"texts": len(rows), **losses(recipe, rows)}
        print(task, *(f"{name} {value}" for name, value in found[task].items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
