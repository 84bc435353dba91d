"""Quality next to speed: the number of correct answers by method, on GSM8K and HumanEval files.

A lossy method is compared with its baseline, which answers the same questions in the same run. Maths
answers are scored by their last number; code is scored by the tests of its task, run in a sandbox
(`sandbox.py`).
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride import registry
from outstride.bench import clock, sandbox
from outstride.bench.harness import ProgressCounter
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams, InvalidPrompt
from outstride.results import Stats

if TYPE_CHECKING:
    from outstride.llm import LLM

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")
_SUM = "{question}\n\nThink step by step. End with a line that says #### and the number."
_CODE = (
    "Complete this Python function. Answer with the whole function in one code block.\n\n{prompt}"
)
_BLOCK = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SURE = 1.96
"""Standard deviations on each side of a 95% interval."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the function that scores its answer."""

    id: str
    task: str
    prompt: str
    judge: Callable[[str], bool]


def number_of(text: str) -> float | None:
    """The final number of an answer: after the last ####, else the last number."""
    last = text.rpartition("####")[2] if "####" in text else text
    found = _NUMBER.findall(last) or _NUMBER.findall(text)
    if not found:
        return None
    chosen = found[0] if "####" in text and _NUMBER.search(last) else found[-1]
    return float(chosen.replace(",", "").replace("$", ""))


def code_of(text: str, prompt: str, entry: str) -> str:
    """The program in an answer: its code block, or all of it; appended to the prompt if it continues
    it.
    """
    blocks = _BLOCK.findall(text)
    code = next(
        (block for block in blocks if f"def {entry}" in block), blocks[0] if blocks else text
    )
    return f"{prompt}\n{code}" if f"def {entry}" in code else prompt + code


def _rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    """Numbered rows of a .jsonl file, compressed or not."""
    file = Path(path)
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    try:
        lines = enumerate(raw.decode("utf-8").splitlines(), start=1)
        return [(number, json.loads(line)) for number, line in lines if line.strip()]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidPrompt(f"{path}: not a .jsonl file: {error}") from error


def _need(row: Any, names: Sequence[str], place: str) -> None:
    for name in names:
        if not isinstance(row, dict) or not isinstance(row.get(name), str):
            raise InvalidPrompt(f"{place}: a text {name!r} is needed")


def gsm8k(path: str | Path) -> list[Question]:
    """Questions whose answers end in `#### number`."""
    found = []
    for number, row in _rows(path):
        place = f"{path}, line {number}"
        _need(row, ("question", "answer"), place)
        right = number_of(row["answer"])
        if right is None:
            raise InvalidPrompt(f"{place}: the answer has no number")
        prompt = _SUM.format(question=row["question"])
        found.append(Question(f"gsm8k:{number}", "gsm8k", prompt, _same(right)))
    return found


def _same(right: float) -> Callable[[str], bool]:
    return lambda text: (tokens := number_of(text)) is not None and math.isclose(tokens, right)


def humaneval(path: str | Path) -> list[Question]:
    """Functions to complete, scored by their tests."""
    sandbox.ready()
    found = []
    for number, row in _rows(path):
        _need(row, ("task_id", "prompt", "entry_point", "test"), f"{path}, line {number}")
        prompt = _CODE.format(prompt=row["prompt"])
        found.append(Question(row["task_id"], "humaneval", prompt, _tested(row)))
    return found


def _tested(row: dict[str, Any]) -> Callable[[str], bool]:
    def judge(text: str) -> bool:
        program = code_of(text, row["prompt"], row["entry_point"])
        return sandbox.run(f"{program}\n{row['test']}\ncheck({row['entry_point']})\n").passed

    return judge


@dataclass(slots=True)
class ScoredAnswer:
    """One answer of one method."""

    method: str
    task: str
    id: str
    right: bool
    equal: bool
    """Whether it equals the answer of the method's baseline, token for token."""
    emitted: int
    passes: int
    seconds: float
    text: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Score:
    """A method on a task."""

    method: str
    exactness: str
    baseline: str
    task: str
    asked: int
    right: int
    equal: int
    tokens_per_pass: float
    seconds: float

    @property
    def score(self) -> float:
        return 100 * self.right / self.asked

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the score by Wilson's formula, in percent."""
        n, p = self.asked, self.right / self.asked
        middle = (p + _SURE**2 / (2 * n)) / (1 + _SURE**2 / n)
        reach = _SURE / (1 + _SURE**2 / n) * math.sqrt(p * (1 - p) / n + _SURE**2 / (4 * n * n))
        return 100 * max(0.0, middle - reach), 100 * min(1.0, middle + reach)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"score": self.score, "interval": list(self.interval)}


@dataclass(slots=True)
class QualityReport:
    """All answers and their scores."""

    methods: list[str] = field(default_factory=list)
    answers: list[ScoredAnswer] = field(default_factory=list)

    def scores(self) -> list[Score]:
        """By method and task."""
        found = []
        for method in self.methods:
            for task in dict.fromkeys(answer.task for answer in self.answers):
                mine = [a for a in self.answers if (a.method, a.task) == (method, task)]
                if not mine:
                    continue
                found.append(
                    Score(
                        method=method,
                        exactness=str(registry.parse(method)[0].exactness.value),
                        baseline=registry.baseline(method),
                        task=task,
                        asked=len(mine),
                        right=sum(a.right for a in mine),
                        equal=sum(a.equal for a in mine),
                        tokens_per_pass=sum(a.emitted for a in mine)
                        / max(1, sum(a.passes for a in mine)),
                        seconds=sum(a.seconds for a in mine),
                    )
                )
        return found

    def samples(self) -> list[dict[str, Any]]:
        return [answer.to_dict() for answer in self.answers]

    def summary(self) -> dict[str, Any]:
        return {"scores": [score.to_dict() for score in self.scores()]}


def measure(
    llm: LLM,
    methods: Sequence[str],
    questions: Sequence[Question],
    params: SamplingParams,
    *,
    batch: int = 1,
    report: QualityReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> QualityReport:
    """Answers every question by every method and its baseline, in turns."""
    if batch < 1 or not methods or not questions:
        raise InvalidParams("needs methods, questions, and at least one question at a time")
    report = QualityReport() if report is None else report
    pairs = [(registry.baseline(method), method) for method in methods]
    report.methods = list(dict.fromkeys([*(b for b, _ in pairs), *(m for _, m in pairs)]))
    watch = ProgressCounter(progress)
    tasks = [
        [q for q in questions if q.task == t] for t in dict.fromkeys(q.task for q in questions)
    ]
    portions = [q[i : i + batch] for q in tasks for i in range(0, len(q), batch)]
    watch.expected = len(portions) * len(report.methods)
    for portion in portions:
        by_method: dict[str, list[list[int]]] = {}
        for method in report.methods:
            tokens, answers = _ask(llm, method, portion, params)
            by_method[method] = tokens
            reference = by_method.get(registry.baseline(method), tokens)
            for answer, mine, theirs in zip(answers, tokens, reference, strict=True):
                answer.equal = mine == theirs
            report.answers += answers
            watch.advance()
    return report


def _ask(
    llm: LLM, method: str, portion: Sequence[Question], params: SamplingParams
) -> tuple[list[list[int]], list[ScoredAnswer]]:
    """Answers one batch of questions: timed, then scored."""
    start = clock.now()
    results = llm.chat([q.prompt for q in portion], params, method=method, salt=method)
    seconds = (clock.now() - start) / len(portion)
    found = []
    for question, result in zip(portion, results, strict=True):
        if result.error is not None:
            raise result.error
        stats = Stats.total(result.outputs)
        found.append(
            ScoredAnswer(
                method=method,
                task=question.task,
                id=question.id,
                right=question.judge(result.text),
                equal=True,
                emitted=stats.emitted,
                passes=stats.passes,
                seconds=seconds,
                text=result.text,
            )
        )
    return [result.token_ids for result in results], found
