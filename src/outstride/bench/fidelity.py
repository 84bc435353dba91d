"""How close a weights format stays to fp32: both score the same texts with teacher forcing.

The fp32 reference runs first and writes its logits to a temporary file; the other format reads the
file back row by row. So only one model is in memory at a time, and only one chunk of logits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from outstride.bench.prompts import BenchPrompt, built_in, read_prompts, spread
from outstride.core.contracts import PassInput
from outstride.core.graph import FloatArray, chain
from outstride.core.proposal import TARGET, Proposal, Wants
from outstride.core.sequence import BlockTable
from outstride.engine.model_runner import ModelRunner
from outstride.errors import InvalidParams, InvalidPrompt, OutOfMemory

CHUNK = 128
"""Tokens per pass, and rows of logits in memory at once."""
MAX_KL = 0.006
MAX_LOSS_DIFFERENCE = 0.005

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class FidelityText:
    """A text to score."""

    id: str
    text: str


def texts_of(path: str | Path | None, limit: int | None = None) -> list[FidelityText]:
    """Texts of a file (GSM8K: question and answer; else its prompts), or the built-in prompts."""
    if limit is not None and limit < 1:
        raise InvalidParams("limit must be at least 1")
    prompts = built_in() if path is None else read_prompts(path)
    answers = {} if path is None else _answers(Path(path), prompts)
    return [
        FidelityText(p.id, f"{p.text}\n{answers[p.id]}" if p.id in answers else p.text)
        for p in spread(prompts, limit)
    ]


def _answers(path: Path, prompts: Sequence[BenchPrompt]) -> dict[str, str]:
    """Answers of a .jsonl file, by the id of their question."""
    if path.suffixes[-1:] != [".jsonl"]:
        return {}
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    pairs = zip(prompts, rows, strict=True)
    return {p.id: r["answer"] for p, r in pairs if isinstance(r.get("answer"), str)}


def logits_of(passes: ModelRunner, tokens: Sequence[int]) -> Iterator[FloatArray]:
    """Raw logits for the token after each token but the last, a chunk of rows at a time."""
    model, pool, table = passes.models[TARGET], passes.pools[TARGET], BlockTable()
    if passes.patterns[TARGET].block is not None:
        raise InvalidParams("fidelity is measured on causal models")
    if len(tokens) > model.context:
        raise InvalidPrompt(f"a text of {len(tokens)} tokens; the context holds {model.context}")
    read = tokens[:-1]
    try:
        for start in range(0, len(read), CHUNK):
            part = read[start : start + CHUNK]
            moves = pool.reserve(table, len(part))
            if moves is None:
                raise OutOfMemory(f"the KV cache has too few pages for {len(tokens)} tokens")
            passes.move(TARGET, moves)
            wants = Wants(nodes=tuple(range(len(part))), logits=True)
            proposal = Proposal(chain(part, start), given=len(part), wants=wants)
            [scores] = model.forward(
                [PassInput(proposal, table, pool.slots(table, len(part)))]
            ).wait()
            assert scores.logits is not None
            kept = pool.commit(table, proposal.graph.positions, range(len(part)))
            passes.move(TARGET, kept)
            yield scores.logits
    finally:
        pool.close(table)


def log_softmax(rows: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Log-probabilities, in double precision."""
    exact = rows.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    return exact


@dataclass(slots=True)
class FidelityCase:
    """Sums over the tokens of one text."""

    id: str
    tokens: int = 0
    divergence: float = 0.0
    same: int = 0
    loss: float = 0.0
    reference_loss: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        count = max(self.tokens, 1)
        return {
            "id": self.id,
            "tokens": self.tokens,
            "kl": self.divergence / count,
            "same": self.same / count,
            "loss": self.loss / count,
            "reference_loss": self.reference_loss / count,
        }


@dataclass(slots=True)
class FidelityReport:
    """All texts; every token has the same weight."""

    cases: list[FidelityCase] = field(default_factory=list)

    def _mean(self, name: str) -> float:
        tokens = self.tokens
        return sum(float(getattr(case, name)) for case in self.cases) / tokens if tokens else 0.0

    @property
    def tokens(self) -> int:
        return sum(case.tokens for case in self.cases)

    @property
    def kl(self) -> float:
        """Mean KL divergence of the format's distribution from the reference's, in nats."""
        return self._mean("divergence")

    @property
    def same(self) -> float:
        """How often both have the same top token."""
        return self._mean("same")

    @property
    def loss(self) -> float:
        return self._mean("loss")

    @property
    def reference_loss(self) -> float:
        return self._mean("reference_loss")

    @property
    def met(self) -> bool:
        """Whether the project's bounds hold. NaN meets no bound."""
        return self.kl <= MAX_KL and abs(self.loss - self.reference_loss) <= MAX_LOSS_DIFFERENCE

    def samples(self) -> list[dict[str, Any]]:
        return [case.to_dict() for case in self.cases]

    def summary(self) -> dict[str, Any]:
        values = {
            "kl": self.kl,
            "same": self.same,
            "loss": self.loss,
            "reference_loss": self.reference_loss,
            "loss_difference": self.loss - self.reference_loss,
        }
        found: dict[str, Any] = {
            name: round(value, 6) if math.isfinite(value) else None
            for name, value in values.items()
        }
        bounds = {"kl": MAX_KL, "loss": MAX_LOSS_DIFFERENCE}
        return {"tokens": self.tokens, **found, "bounds": bounds, "met": self.met}


class Fidelity:
    """The reference's logits on some texts, to compare other formats with."""

    def __init__(self, texts: Sequence[tuple[str, Sequence[int]]]) -> None:
        """`texts`: names and tokens. A text of one token has nothing to predict and is dropped."""
        self._texts = [(name, list(tokens)) for name, tokens in texts if len(tokens) > 1]
        if not self._texts:
            raise InvalidPrompt("there is no text of two tokens or more")
        self._file: IO[bytes] = TemporaryFile(prefix="outstride-")  # noqa: SIM115
        self._width = 0

    @property
    def steps(self) -> int:
        """Number of passes of one model."""
        return sum(-(-(len(tokens) - 1) // CHUNK) for _, tokens in self._texts)

    def record(self, passes: ModelRunner, progress: Progress | None = None) -> None:
        """Scores all texts with the reference. The engine that owns `passes` must be idle."""
        self._file.seek(0)
        done = 0
        for _, tokens in self._texts:
            for rows in logits_of(passes, tokens):
                self._width = rows.shape[1]
                self._file.write(np.ascontiguousarray(rows, dtype=np.float32).data)
                done += 1
                if progress is not None:
                    progress(done, 2 * self.steps)
        self._file.flush()

    def compare(self, passes: ModelRunner, progress: Progress | None = None) -> FidelityReport:
        """Scores all texts with another model and compares row by row."""
        if not self._width:
            raise InvalidParams("the reference has not been recorded")
        self._file.seek(0)
        report, done = FidelityReport(), self.steps
        for name, tokens in self._texts:
            case, at = FidelityCase(name), 0
            for rows in logits_of(passes, tokens):
                targets = np.asarray(tokens[at + 1 : at + 1 + len(rows)])
                self._enter(case, self._read(len(rows)), rows, targets)
                at += len(rows)
                done += 1
                if progress is not None:
                    progress(done, 2 * self.steps)
            report.cases.append(case)
        return report

    def _read(self, rows: int) -> FloatArray:
        raw = self._file.read(4 * rows * self._width)
        return np.frombuffer(raw, dtype=np.float32).reshape(rows, self._width)

    def _enter(
        self,
        case: FidelityCase,
        reference: FloatArray,
        other: FloatArray,
        targets: npt.NDArray[np.int64],
    ) -> None:
        if reference.shape != other.shape:
            raise InvalidParams("models with vocabularies of different sizes cannot be compared")
        p, q = log_softmax(reference), log_softmax(other)
        line = np.arange(len(targets))
        case.tokens += len(targets)
        case.divergence += float((np.exp(p) * (p - q)).sum())
        case.same += int((reference.argmax(axis=1) == other.argmax(axis=1)).sum())
        case.loss -= float(q[line, targets].sum())
        case.reference_loss -= float(p[line, targets].sum())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
