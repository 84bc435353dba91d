"""Methods beside each other on the same prompts: tokens per pass, tokens per second, where time goes.

All methods answer the same few prompts in turns before the next few come, so that a machine that slows
down slows all of them alike; what is compared is paired. Each method begins each round with a memory
of its own that has seen none of the prompts, and nobody finds another's prompt in the prefix tree;
`warm` rows are a further round with what the first one left behind. One counter, the engine's ledger,
serves all methods.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from outstride.bench import clock
from outstride.bench.prompts import BenchPrompt
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams
from outstride.llm import LLM
from outstride.results import Stats

BASELINE = "plain"
VERBS = ("plan", "propose", "forward", "accept", "commit")
INCOMPRESSIBLE = "random"
"""The group of prompts that nothing can be guessed about, answered with much noise."""
DRAWS = 2000


@dataclass(slots=True)
class Run:
    """Some prompts of one group, answered by one method at once."""

    method: str
    group: str
    round: int
    warm: bool
    prompts: tuple[str, ...]
    seconds: float
    emitted: int
    passes: int
    nodes: int
    verbs: dict[str, float]
    equal: int
    """How many answers are those of the first method in this round."""
    drafts: int
    expected: float
    sources: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Line:
    """What a method did on a group, or on all of them."""

    method: str
    group: str
    warm: bool
    prompts: int
    equal: int
    tokens_per_pass: float
    nodes_per_pass: float
    tokens_per_second: float
    ratio: float
    """Speed against the first method, on the same prompts in the same rounds."""
    bound: float
    """Lower end of the 95% interval of that ratio, by resampling pairs."""
    shares: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class DecodeReport:
    """All runs, and what they add up to."""

    methods: list[str]
    runs: list[Run] = field(default_factory=list)

    def lines(self) -> list[Line]:
        """By method: each group, then all of them; warm rounds apart."""
        found = []
        for warm in sorted({run.warm for run in self.runs}):
            groups = list(dict.fromkeys(run.group for run in self.runs if run.warm is warm))
            for method in self.methods:
                for group in groups:
                    found.append(self._line(method, [group], group, warm))
                if len(groups) > 1:
                    found.append(self._line(method, groups, "all", warm))
        return found

    def _line(self, method: str, groups: Sequence[str], name: str, warm: bool) -> Line:
        mine, base = (
            [r for r in self.runs if r.method == m and r.group in groups and r.warm is warm]
            for m in (method, self.methods[0])
        )
        seconds = sum(run.seconds for run in mine)
        verbs = {verb: sum(run.verbs.get(verb, 0.0) for run in mine) for verb in VERBS}
        pairs = list(zip(base, mine, strict=True))

        def per_group(value: Callable[[list[Run]], float]) -> float:
            return mean(value([run for run in mine if run.group == group]) for group in groups)

        return Line(
            method=method,
            group=name,
            warm=warm,
            prompts=sum(len(run.prompts) for run in mine if run.round == mine[0].round),
            equal=min(
                sum(run.equal for run in mine if run.round == number)
                for number in {run.round for run in mine}
            ),
            tokens_per_pass=per_group(
                lambda runs: sum(r.emitted for r in runs) / max(1, sum(r.passes for r in runs))
            ),
            nodes_per_pass=sum(run.nodes for run in mine) / max(1, sum(r.passes for r in mine)),
            tokens_per_second=sum(run.emitted for run in mine) / seconds,
            ratio=_ratio(pairs, groups),
            bound=_bound(pairs, groups),
            shares={verb: value / max(sum(verbs.values()), 1e-9) for verb, value in verbs.items()},
        )

    def samples(self) -> list[dict[str, Any]]:
        return [run.to_dict() for run in self.runs]

    def summary(self) -> dict[str, Any]:
        return {"lines": [line.to_dict() for line in self.lines()]}


def _ratio(pairs: Sequence[tuple[Run, Run]], groups: Sequence[str]) -> float:
    """Speed-up over the first method: the mean over groups of time against time."""
    ratios = []
    for group in groups:
        chosen = [(a, b) for a, b in pairs if a.group == group]
        if chosen:
            ratios.append(sum(a.seconds for a, _ in chosen) / sum(b.seconds for _, b in chosen))
    return mean(ratios) if ratios else 1.0


def _bound(pairs: Sequence[tuple[Run, Run]], groups: Sequence[str]) -> float:
    """Lower end of the 95% interval of the ratio (two-sided), by resampling pairs in each group."""
    numbers = random.Random(0)
    by_group = [[pair for pair in pairs if pair[0].group == group] for group in groups]
    found = sorted(
        _ratio([numbers.choice(group) for group in by_group for _ in group], groups)
        for _ in range(DRAWS if len(pairs) > 1 else 1)
    )
    return found[int(0.025 * len(found))]


def incompressible(llm: LLM, count: int, length: int = 64) -> list[BenchPrompt]:
    """Prompts of random tokens; their answers are drawn with so much noise that nothing repeats."""
    numbers = random.Random(1)
    found = []
    for i in range(count):
        tokens = [numbers.randrange(llm.model.vocab_size) for _ in range(length)]
        found.append(BenchPrompt(f"random:{i}", INCOMPRESSIBLE, llm.tokenizer.decode(tokens)))
    return found


def decode(
    llm: LLM,
    methods: Sequence[str],
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    *,
    batch: int = 1,
    rounds: int = 1,
    warm: bool = False,
    raw: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DecodeReport:
    """Answers all prompts with all methods, some prompts of one group at a time, in turns."""
    if batch < 1 or rounds < 1:
        raise InvalidParams("batch and rounds must be at least 1")
    methods = [BASELINE, *(m for m in dict.fromkeys(methods) if m != BASELINE)]
    report = DecodeReport(methods)
    portions = []
    for group in dict.fromkeys(prompt.group for prompt in prompts):
        mine = [prompt for prompt in prompts if prompt.group == group]
        portions += [mine[i : i + batch] for i in range(0, len(mine), batch)]
    numbers = [*range(rounds), *([rounds] if warm else [])]
    done, expected = 0, len(numbers) * len(portions) * len(methods)
    for method in methods:  # load, compile, measure what passes cost
        llm.chat("Count to ten.", SamplingParams(max_tokens=24), method=method, salt="warm-up")
    for number in numbers:
        for portion in portions:
            reference: list[list[int]] = []
            order = methods[number % len(methods) :] + methods[: number % len(methods)]
            runs: dict[str, tuple[Run, list[list[int]]]] = {}
            for method in order:
                memory = 0 if number == rounds else number
                runs[method] = _answer(
                    llm,
                    method,
                    portion,
                    params,
                    number,
                    f"{method} {memory}",
                    raw,
                    number == rounds,
                )
                done += 1
                if progress is not None:
                    progress(done, expected)
            reference = runs[methods[0]][1]
            for method in methods:
                run, said = runs[method]
                run.equal = sum(a == b for a, b in zip(said, reference, strict=True))
                report.runs.append(run)
    return report


def _answer(
    llm: LLM,
    method: str,
    portion: Sequence[BenchPrompt],
    params: SamplingParams,
    number: int,
    salt: str,
    raw: bool,
    warm: bool,
) -> tuple[Run, list[list[int]]]:
    """One portion by one method: counted and timed."""
    group = portion[0].group
    chosen: SamplingParams | list[SamplingParams] = params
    if group == INCOMPRESSIBLE:  # noise belongs to positions: with one seed, answers would resemble
        chosen = [
            SamplingParams(
                max_tokens=params.max_tokens,
                temperature=2.0,
                seed=zlib.crc32(prompt.id.encode()),
                ignore_eos=True,
            )
            for prompt in portion
        ]
    texts: list[Any] = [prompt.text for prompt in portion]
    before = dict(llm.engine.ledger.seconds)
    start = clock.now()
    ask = llm.generate if raw or group == INCOMPRESSIBLE else llm.chat
    results = ask(texts, chosen, method=method, salt=salt)
    seconds = clock.now() - start
    after = llm.engine.ledger.seconds
    outputs = [output for result in results for output in result.outputs]
    for result in results:
        if result.error is not None:
            raise result.error
    stats = Stats.total(outputs)
    run = Run(
        method=method,
        group=group,
        round=number,
        warm=warm,
        prompts=tuple(prompt.id for prompt in portion),
        seconds=seconds,
        emitted=stats.emitted,
        passes=stats.passes,
        nodes=stats.nodes + stats.reused - sum(len(r.prompt_token_ids) - 1 for r in results),
        verbs={verb: after.get(verb, 0.0) - before.get(verb, 0.0) for verb in VERBS},
        equal=0,
        drafts=stats.drafts,
        expected=stats.expected,
        sources=stats.sources,
    )
    return run, [output.token_ids for output in outputs]
