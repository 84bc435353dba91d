"""Training data of the list models: questions with answers, partly masked.

    python -m outstride.train.list_tasks --out FOLDER --texts 20000

writes questions and answers as a corpus, for recipes that train with these models.
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
from outstride.train.corpus_files import Corpus, CorpusText

IDS = {word: i for i, word in enumerate(VOCABULARY)}
LONGEST = 40
"""Positions of a text in the corpus; the longest question with its answer has 30."""
SLACK = 8
"""Largest number of end-of-text tokens after the first one on a full canvas."""
CAUSAL = 0.25
"""Share of texts from which a block model learns autoregressive decoding."""
BLANK = 0.2
"""Share of texts with a fully masked answer."""


@dataclass(frozen=True, slots=True)
class TaskTexts:
    """Questions with their answers, padded with end-of-text tokens."""

    tokens: torch.Tensor
    starts: torch.Tensor
    """Where answers begin."""
    stops: torch.Tensor
    """Where they end, the first end-of-text token included."""

    def to(self, device: str) -> TaskTexts:
        return TaskTexts(self.tokens.to(device), self.starts.to(device), self.stops.to(device))

    def take(self, rows: torch.Tensor) -> TaskTexts:
        return TaskTexts(self.tokens[rows], self.starts[rows], self.stops[rows])

    @classmethod
    def of(cls, pairs: Sequence[tuple[str, str]], length: int) -> TaskTexts:
        """From questions and answers as text."""
        return cls._from(_encode(pairs, length))

    @classmethod
    def training(cls, count: int, length: int, seed: int, workers: int) -> TaskTexts:
        """Questions of all tasks in equal shares."""
        share = -(-count // max(workers, 1))
        jobs = [(share, length, f"train {seed} {worker}") for worker in range(max(workers, 1))]
        if workers <= 1:
            return cls._from(_made(*jobs[0]))
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            parts = pool.starmap(_made, jobs)
        return cls._from(np.concatenate(parts))

    @classmethod
    def _from(cls, rows: npt.NDArray[np.uint8]) -> TaskTexts:
        table = torch.from_numpy(rows)
        return cls(table[:, 2:].contiguous(), table[:, 0].long(), table[:, 1].long())


def _encode(pairs: Sequence[tuple[str, str]], length: int) -> npt.NDArray[np.uint8]:
    """One row each: start and stop of the answer, then the tokens."""
    rows = np.full((len(pairs), 2 + length), IDS[END], np.uint8)
    for row, (question, answer) in zip(rows, pairs, strict=True):
        counted, reply = question.split(), answer.split()
        row[0], row[1] = len(counted), len(counted) + len(reply) + 1
        row[2 : 2 + row[1] - 1] = [IDS[word] for word in (*counted, *reply)]
    return rows


def _made(count: int, length: int, seed: str) -> npt.NDArray[np.uint8]:
    random, makers = Random(seed), [task.make for task in TASKS.values()]
    found = (makers[i % len(makers)](random) for i in range(count))
    return _encode([(case.prompt, case.answer) for case in found], length)


@dataclass(frozen=True, slots=True)
class MaskedExamples:
    """Texts with masks, their attention mask, and the target tokens."""

    tokens: torch.Tensor
    mask: torch.Tensor
    targets: torch.Tensor
    counted: torch.Tensor
    """Positions that count for the loss."""


def masked_examples(
    texts: TaskTexts, block: int | None, numbers: torch.Generator, *, blank: bool
) -> MaskedExamples:
    """Masks some of each answer; with `blank`, all of it.

    A settled end-of-text token cuts the canvas, so half of the texts here end with it. With blocks,
    one block of a text is masked and those before it are settled; a block does not see later blocks.
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
    mask = visible[None] & (places < seen)[:, None]
    targets, tokens = texts.tokens.long(), texts.tokens.long()
    counted = masked
    tokens = torch.where(masked, IDS[MASK], tokens)
    if block is not None and not blank:
        plain = draw(count, 1) < CAUSAL
        follows = (places >= starts - 1) & (places < stops - 1)
        before = (places[None] <= places[:, None])[None]
        mask = torch.where(plain[..., None], before, mask)
        counted = torch.where(plain, follows, masked)
        tokens = torch.where(plain, texts.tokens.long(), tokens)
        targets = torch.where(plain, targets.roll(-1, dims=1), targets)
    mask = mask | torch.eye(length, dtype=torch.bool, device=device)  # nothing sees nothing
    return MaskedExamples(tokens, mask, targets, counted)


# --- as words --------------------------------------------------------------------------------------


def write(folder: Path, count: int, seed: int) -> None:
    """Writes questions of all tasks in equal shares with their answers as a corpus folder."""
    tokenizer = load_tokenizer("parallel-block")
    about = {
        "model": "parallel-block",
        "vocabulary": tokenizer.digest,
        "vocab_size": len(VOCABULARY),
        "end": IDS[END],
        "spec": {"lists": count, "seed": seed},
    }
    corpus = Corpus.create(folder, about)
    if corpus.paths():
        return
    rows = _made(count, LONGEST, f"words {seed}").tolist()
    texts = [CorpusText(row[2 : 2 + row[1]], row[0], sampled=False) for row in rows]
    corpus.append(texts, after=count)
    corpus.note(texts=count)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="outstride.train.list_tasks", description=__doc__)
    parser.add_argument("--out", required=True, type=Path, help="corpus folder")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    write(args.out, args.texts, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
