"""What the recipe of the list models reads: questions with their answers, some of it masked.

    python -m outstride.train.lessons --out FOLDER --texts 20000

writes questions and answers as words, for the recipes that train beside these models.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt
import torch

from outstride.models.load import load_tokenizer
from outstride.models.shipped.lists import END, MASK, TASKS, VOCABULARY
from outstride.train.words import Text, Words

IDS = {word: i for i, word in enumerate(VOCABULARY)}
LONGEST = 40
"""Positions of a text that is written as words; the longest question with its answer has 30."""
SLACK = 8
"""How many ends of text may follow the first one on a full canvas."""
CAUSAL = 0.25
"""The share of texts from which a model of blocks learns to continue."""
BLANK = 0.2
"""The share of texts with all of the answer masked."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Questions with their answers. Behind an answer there are only ends of text."""

    tokens: torch.Tensor
    starts: torch.Tensor
    """Where answers begin."""
    stops: torch.Tensor
    """Where they end, the first end of text included."""

    def to(self, device: str) -> Texts:
        return Texts(self.tokens.to(device), self.starts.to(device), self.stops.to(device))

    def take(self, rows: torch.Tensor) -> Texts:
        return Texts(self.tokens[rows], self.starts[rows], self.stops[rows])

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, str]], length: int) -> Texts:
        """From questions and answers in words."""
        return cls._from(_encode(pairs, length))

    @classmethod
    def training(cls, count: int, length: int, seed: int, workers: int) -> Texts:
        """Questions of all tasks in equal shares."""
        share = -(-count // max(workers, 1))
        jobs = [(share, length, f"train {seed} {worker}") for worker in range(max(workers, 1))]
        if workers <= 1:
            return cls._from(_made(*jobs[0]))
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            parts = pool.starmap(_made, jobs)
        return cls._from(np.concatenate(parts))

    @classmethod
    def _from(cls, rows: npt.NDArray[np.uint8]) -> Texts:
        table = torch.from_numpy(rows)
        return cls(table[:, 2:].contiguous(), table[:, 0].long(), table[:, 1].long())


def _encode(pairs: Sequence[tuple[str, str]], length: int) -> npt.NDArray[np.uint8]:
    """A row for each: start and stop of the answer, then the tokens."""
    rows = np.full((len(pairs), 2 + length), IDS[END], np.uint8)
    for row, (question, answer) in zip(rows, pairs, strict=True):
        asked, said = question.split(), answer.split()
        row[0], row[1] = len(asked), len(asked) + len(said) + 1
        row[2 : 2 + row[1] - 1] = [IDS[word] for word in (*asked, *said)]
    return rows


def _made(count: int, length: int, seed: str) -> npt.NDArray[np.uint8]:
    random, makers = Random(seed), [task.make for task in TASKS.values()]
    found = (makers[i % len(makers)](random) for i in range(count))
    return _encode([(case.prompt, case.answer) for case in found], length)


@dataclass(frozen=True, slots=True)
class Lesson:
    """Texts with masks, who sees whom in them, and what is to be said where."""

    tokens: torch.Tensor
    sees: torch.Tensor
    targets: torch.Tensor
    asked: torch.Tensor
    """The positions that count."""


def lesson(texts: Texts, block: int | None, numbers: torch.Generator, *, blank: bool) -> Lesson:
    """Masks some of each answer; with `blank`, all of it.

    A settled end of text cuts the canvas, and so half of the texts here end with it. Of a text that
    is seen in blocks, one block is masked and those before it are settled: what comes behind a block
    is not seen from it.
    """
    device, (count, length) = texts.tokens.device, texts.tokens.shape

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=numbers, device=device)

    places = torch.arange(length, device=device)
    starts, stops = texts.starts[:, None], texts.stops[:, None]
    size = length if block is None else block
    within = (stops - 1) // size - starts // size + 1
    first = (starts // size + (draw(count, 1) * within).long()) * size
    slack = torch.ceil(draw(count, 1) * SLACK).long()
    seen = stops + slack if block is None else (stops + size - 1) // size * size
    seen = torch.where(draw(count, 1) < 0.5, stops, seen)
    work = (places >= starts) & (places >= first) & (places < first + size) & (places < seen)
    share = torch.where(draw(count, 1) < (1.0 if blank else BLANK), 2.0, draw(count, 1))
    masked = work & (draw(count, length) < share)
    visible = places[None] // size <= places[:, None] // size
    sees = visible[None] & (places < seen)[:, None]
    targets, tokens = texts.tokens.long(), texts.tokens.long()
    asked = masked
    tokens = torch.where(masked, IDS[MASK], tokens)
    if block is not None and not blank:
        plain = draw(count, 1) < CAUSAL
        follows = (places >= starts - 1) & (places < stops - 1)
        before = (places[None] <= places[:, None])[None]
        sees = torch.where(plain[..., None], before, sees)
        asked = torch.where(plain, follows, masked)
        tokens = torch.where(plain, texts.tokens.long(), tokens)
        targets = torch.where(plain, targets.roll(-1, dims=1), targets)
    sees = sees | torch.eye(length, dtype=torch.bool, device=device)  # nobody sees nothing
    return Lesson(tokens, sees, targets, asked)


# --- as words --------------------------------------------------------------------------------------


def write(folder: Path, count: int, seed: int) -> None:
    """Questions of all tasks in equal shares, each with an answer, as a folder of words."""
    tokenizer = load_tokenizer("parallel-block")
    about = {
        "model": "parallel-block",
        "vocabulary": tokenizer.digest,
        "vocab_size": len(VOCABULARY),
        "end": IDS[END],
        "order": {"lists": count, "seed": seed},
    }
    words = Words.create(folder, about)
    if words.paths():
        return
    rows = _made(count, LONGEST, f"words {seed}").tolist()
    texts = [Text(row[2 : 2 + row[1]], row[0], sampled=False) for row in rows]
    words.append(texts, after=count)
    words.note(texts=count)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="outstride.train.lessons", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="folder of the words")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    write(args.out, args.texts, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
