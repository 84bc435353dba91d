"""Methods beside each other on the same prompts: tokens per pass, tokens per second, where time goes.

Tasks, batch sizes and temperatures vary; each pair of the latter two is a setting. All methods answer
the same few prompts in turns before the next few come, so that a machine that slows down slows all of
them alike; what is compared is paired. Each method begins each round with a memory
of its own that has seen none of the prompts, and nobody finds another's prompt in the prefix tree;
`warm` rows are a further round with what the first one left behind. One counter, the engine's ledger,
serves all methods.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt

from outstride import registry
from outstride.bench import clock
from outstride.bench.harness import Watch
from outstride.bench.prompts import BenchPrompt
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams, OutstrideError
from outstride.llm import LLM
from outstride.results import Stats

BASELINE = "plain"
VERBS = ("plan", "propose", "forward", "accept", "commit")
INCOMPRESSIBLE = "random"
"""The group of prompts that nothing can be guessed about, answered with much noise."""
MIXED = "mixed"
"""The group of portions that no single group can fill."""
DRAWS = 2000


@dataclass(slots=True)
class Run:
    """Some prompts of one group, answered by one method at once."""

    method: str
    group: str
    batch: int
    temperature: float
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
    """What a method did on a group, or on all of them, in one setting."""

    method: str
    group: str
    batch: int
    temperature: float
    warm: bool
    prompts: int
    equal: int
    tokens_per_pass: float
    nodes_per_pass: float
    tokens_per_second: float
    ratio: float
    """Speed against the first method, on the same prompts in the same rounds."""
    bound: float
    """Lower end of the 95% interval of that ratio, by resampling."""
    shares: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class DecodeReport:
    """All runs, and what they add up to."""

    methods: list[str] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def lines(self) -> list[Line]:
        """By setting and method: each group, then all of them; warm rounds apart."""
        found = []
        for setting in dict.fromkeys((r.batch, r.temperature, r.warm) for r in self.runs):
            runs = [r for r in self.runs if (r.batch, r.temperature, r.warm) == setting]
            groups = list(dict.fromkeys(run.group for run in runs))
            for method in self.methods:
                for group in groups:
                    found.append(self._line(method, [group], group, runs))
                if len(groups) > 1:
                    found.append(self._line(method, groups, "all", runs))
        return found

    def _line(self, method: str, groups: Sequence[str], name: str, runs: Sequence[Run]) -> Line:
        mine, base = (
            [r for r in runs if r.method == m and r.group in groups]
            for m in (method, self.methods[0])
        )
        times = _times(base, mine)
        seconds = sum(float(np.median(pairs[:, 1])) for pairs in times.values())
        emitted = sum({(run.group, run.prompts): run.emitted for run in mine}.values())
        verbs = {verb: sum(run.verbs.get(verb, 0.0) for run in mine) for verb in VERBS}

        least: dict[tuple[str, tuple[str, ...]], int] = {}
        for run in mine:  # the last round may have been cut off
            portion = run.group, run.prompts
            least[portion] = min(least.get(portion, run.equal), run.equal)

        def per_group(value: Callable[[list[Run]], float]) -> float:
            return mean(value([run for run in mine if run.group == group]) for group in groups)

        return Line(
            method=method,
            group=name,
            batch=mine[0].batch,
            temperature=mine[0].temperature,
            warm=mine[0].warm,
            prompts=sum(len(prompts) for _, prompts in least),
            equal=sum(least.values()),
            tokens_per_pass=per_group(
                lambda runs: sum(r.emitted for r in runs) / max(1, sum(r.passes for r in runs))
            ),
            nodes_per_pass=sum(run.nodes for run in mine) / max(1, sum(r.passes for r in mine)),
            tokens_per_second=emitted / seconds,
            ratio=_ratio(times, groups),
            bound=_bound(times, groups),
            shares={verb: value / max(sum(verbs.values()), 1e-9) for verb, value in verbs.items()},
        )

    def samples(self) -> list[dict[str, Any]]:
        return [run.to_dict() for run in self.runs]

    def summary(self) -> dict[str, Any]:
        return {"lines": [line.to_dict() for line in self.lines()]}


Times = dict[tuple[str, tuple[str, ...]], npt.NDArray[np.float64]]
"""Seconds of the first method and of another, by group and prompts: two columns, a row for a round."""


def _times(base: Sequence[Run], mine: Sequence[Run]) -> Times:
    rows: dict[tuple[str, tuple[str, ...]], list[tuple[float, float]]] = {}
    for first, other in zip(base, mine, strict=True):
        rows.setdefault((first.group, first.prompts), []).append((first.seconds, other.seconds))
    return {portion: np.array(pairs) for portion, pairs in rows.items()}


def _middle(pairs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Seconds of the first method in the middle of all rounds, and of the other as pairs have it.

    Somebody else at work on the machine slows whole answers down, some of them manyfold: sums then
    differ by a third from run to run where medians over five rounds stay within a few percent. Slow
    spells last, so those who run one behind the other are held against each other.
    """
    first = np.median(pairs[..., 0], axis=-1)
    return np.stack([first, first / np.median(pairs[..., 0] / pairs[..., 1], axis=-1)], axis=-1)


def _ratio(times: Times, groups: Sequence[str]) -> float:
    """Speed-up over the first method: the mean over groups of time against time.

    Of several rounds, each portion counts with the median of its pairs: see `_middle`.
    """
    ratios = []
    for group in groups:
        chosen = [_middle(pairs) for (name, _), pairs in times.items() if name == group]
        if chosen:
            first, other = np.sum(chosen, axis=0)
            ratios.append(float(first / other))
    return mean(ratios) if ratios else 1.0


def _bound(times: Times, groups: Sequence[str]) -> float:
    """Lower end of the 95% interval of the ratio (two-sided): portions and rounds are drawn anew."""
    numbers = np.random.default_rng(0)
    found = np.zeros(DRAWS)
    for group in groups:
        drawn = []
        for (name, _), pairs in times.items():
            if name == group:
                rounds = numbers.integers(len(pairs), size=(DRAWS, len(pairs)))
                drawn.append(_middle(pairs[rounds]))
        medians = np.stack(drawn, axis=1)
        chosen = numbers.integers(len(drawn), size=(DRAWS, len(drawn)))
        sums = np.take_along_axis(medians, chosen[:, :, None], axis=1).sum(axis=1)
        found += sums[:, 0] / sums[:, 1] / len(groups)
    return float(np.quantile(found, 0.025))


def incompressible(llm: LLM, count: int, length: int = 64) -> list[BenchPrompt]:
    """Prompts of random tokens; their answers are drawn with so much noise that nothing repeats."""
    numbers = random.Random(1)
    found = []
    for i in range(count):
        tokens = [numbers.randrange(llm.model.vocab_size) for _ in range(length)]
        found.append(BenchPrompt(f"random:{i}", INCOMPRESSIBLE, llm.tokenizer.decode(tokens)))
    return found


def exact_methods() -> list[str]:
    """Every method that promises plain decoding's text and needs nothing but the model."""
    registry.discover()
    return [
        entry.name
        for entry in registry.entries()
        if entry.exactness is Exactness.EXACT
        and entry.exact_to == BASELINE
        and not entry.needs
        and not any(option.required for option in entry.options)
    ]


@dataclass(frozen=True, slots=True)
class Setting:
    """How prompts are answered: so many at a time, greedily or not."""

    batch: int
    temperature: float
    round: int
    warm: bool = False

    def memory(self, method: str) -> str:
        """What keeps this method's memories and prefixes apart; a warm round finds the first one's."""
        number = 0 if self.warm else self.round
        return f"{method} {self.batch} {self.temperature} {number}"


def decode(
    llm: LLM,
    methods: Sequence[str],
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    *,
    batches: Sequence[int] = (1,),
    temperatures: Sequence[float] = (),
    rounds: int = 1,
    warm: bool = False,
    raw: bool = False,
    report: DecodeReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DecodeReport:
    """Answers all prompts with all methods, some prompts of one group at a time, in turns.

    Without temperatures, that of `params` holds. `report` is filled while the run goes on.
    """
    if rounds < 1 or min(batches, default=0) < 1 or min(temperatures, default=0.0) < 0.0:
        raise InvalidParams("batches and rounds must be at least 1, temperatures at least 0")
    report = DecodeReport() if report is None else report
    report.methods = [BASELINE, *(m for m in dict.fromkeys(methods) if m != BASELINE)]
    settings = [
        Setting(batch, temperature, number, warm=number == rounds)
        for batch in dict.fromkeys(batches)
        for temperature in dict.fromkeys(temperatures or (params.temperature,))
        for number in range(rounds + warm)
    ]
    work = [(s, portion) for s in settings for portion in _portions(prompts, s.batch)]
    watch = Watch(progress)
    watch.expected = len(work) * len(report.methods)
    _warm_up(llm, report.methods, prompts, params.max_tokens, raw)
    for setting, portion in work:
        seed = params.seed if params.seed is not None else 0  # the same noise for all methods
        chosen = replace(params, temperature=setting.temperature, seed=seed)
        _in_turns(llm, report, setting, portion, chosen, raw, watch)
    return report


def _warm_up(
    llm: LLM, methods: Sequence[str], prompts: Sequence[BenchPrompt], length: int, raw: bool
) -> None:
    """Loads, compiles, records and measures what passes cost, so that no answer waits for it."""
    by_length = sorted(prompts, key=lambda prompt: len(prompt.text))
    for method in methods:
        llm.chat("Count to ten.", SamplingParams(max_tokens=24), method=method, salt="warm-up")
        for prompt in {p.id: p for p in by_length[:1] + by_length[-1:]}.values():
            params = SamplingParams(max_tokens=min(length, 64))
            with suppress(OutstrideError):  # what is wrong with a prompt shows when its turn comes
                _asking(llm, prompt, raw)(prompt.text, params, method=method, salt="warm-up")


def _asking(llm: LLM, prompt: BenchPrompt, raw: bool) -> Any:
    """How a prompt is put to the model."""
    return llm.generate if raw or prompt.group == INCOMPRESSIBLE else llm.chat


def _portions(prompts: Sequence[BenchPrompt], batch: int) -> list[list[BenchPrompt]]:
    """The prompts of each group, so many at a time.

    Where no group has enough for that, groups are mixed, each portion with some of all.
    """
    found: list[list[BenchPrompt]] = []
    usual = [prompt for prompt in prompts if prompt.group != INCOMPRESSIBLE]
    sizes = Counter(prompt.group for prompt in usual)
    if usual and max(sizes.values()) < min(batch, len(usual)):
        count = -(-len(usual) // batch)
        dealt = [replace(prompt, group=MIXED) for prompt in usual]
        found = [dealt[i::count] for i in range(count)]
        prompts = [prompt for prompt in prompts if prompt.group == INCOMPRESSIBLE]
    for group in dict.fromkeys(prompt.group for prompt in prompts):
        mine = [prompt for prompt in prompts if prompt.group == group]
        found += [mine[i : i + batch] for i in range(0, len(mine), batch)]
    return found


def _in_turns(
    llm: LLM,
    report: DecodeReport,
    setting: Setting,
    portion: Sequence[BenchPrompt],
    params: SamplingParams,
    raw: bool,
    watch: Watch,
) -> None:
    """One portion by all methods. It is entered as a whole, so that methods stay comparable."""
    first = setting.round % len(report.methods)
    runs: dict[str, tuple[Run, list[list[int]]]] = {}
    for method in report.methods[first:] + report.methods[:first]:
        runs[method] = _answer(llm, method, setting, portion, params, raw)
        if len(runs) == len(report.methods):
            reference = runs[report.methods[0]][1]
            for name in report.methods:
                run, said = runs[name]
                run.equal = sum(a == b for a, b in zip(said, reference, strict=True))
                report.runs.append(run)
        watch.tick()


def _answer(
    llm: LLM,
    method: str,
    setting: Setting,
    portion: Sequence[BenchPrompt],
    params: SamplingParams,
    raw: bool,
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
    results = _asking(llm, portion[0], raw)(
        texts, chosen, method=method, salt=setting.memory(method)
    )
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
        batch=setting.batch,
        temperature=setting.temperature,
        round=setting.round,
        warm=setting.warm,
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
