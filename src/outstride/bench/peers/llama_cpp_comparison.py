"""Comparison with llama.cpp: the same file, the same threads, in turns, in one run on one machine.

Both engines get the same tokens. Where one scores several nodes of a pass, the other scores all of
them too; a second row shows what llama.cpp saves by scoring only the last.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outstride.bench import clock
from outstride.bench.clock import Series
from outstride.bench.comparison_rows import Bound, PeerReport, Row, cores
from outstride.bench.harness import ProgressCounter
from outstride.bench.peers.llama_cpp import SETTLE, LlamaCpp, LlamaPasses
from outstride.bench.prompts import built_in
from outstride.bench.step import PassBench, StepCase
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams, OutstrideError

if TYPE_CHECKING:
    from outstride.llm import LLM

CACHED, LONG, PROMPT, OUTPUT, CONCURRENCY = 128, 4096, 1024, 128, 16
PASSES = 3
"""Passes are short and vary: they run this many times as often as cases that take seconds."""


def gguf_of(name: str) -> Path:
    """The GGUF file that both engines load."""
    from outstride.models.load import locate

    path = locate(name)
    if path.suffix != ".gguf":
        raise InvalidParams(f"llama.cpp reads GGUF files, and {name} is not one")
    return path


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the cases; tests use smaller ones."""

    cached: int = CACHED
    long: int = LONG
    prompt: int = PROMPT
    output: int = OUTPUT
    concurrency: int = CONCURRENCY
    nodes: tuple[int, ...] = (1, 8, 16)
    many: int = 64


_PASS_BOUNDS = {1: 0.85, 8: 0.35, 16: 0.31}


def _pass_name(case: StepCase) -> str:
    if case.sequences > 1:
        return f"{case.sequences} sequences of {case.nodes} node"
    plural = "" if case.nodes == 1 else "s"
    cached = f", {case.cached:,} cached" if case.sweep == "cached" else ""
    return f"pass over {case.nodes} node{plural}{cached}"


@contextmanager
def _ours(bench: PassBench, case: StepCase) -> Iterator[Callable[[], object]]:
    """One pass of ours to time, after one that is not timed."""
    time.sleep(SETTLE)
    with bench.once(case) as call:
        call()
    with bench.once(case) as call:
        yield call


class _Prompts:
    """Prompts by turn: both engines get the same ones, and no turn finds its prompts in a cache."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._texts = [llm.encode(p.text, chat=True) for p in built_in()]
        self._vocabulary = llm.model.vocab_size
        self._seed = seed

    def random(self, turn: int, count: int) -> list[int]:
        source = np.random.default_rng((self._seed, turn, count))
        return [int(t) for t in source.integers(self._vocabulary, size=count)]

    def texts(self, turn: int, count: int) -> list[list[int]]:
        """Built-in prompts, each after one token that no other prompt begins with."""
        first = self.random(turn, count)
        return [[first[i], *self._texts[i % len(self._texts)]] for i in range(count)]

    @property
    def longest(self) -> int:
        return 1 + max(map(len, self._texts))


def _case(
    prompts: Callable[[int], list[list[int]]], call: Callable[[int, list[list[int]]], object]
) -> clock.Case:
    """A case whose prompts depend on how often it has run."""
    turns = itertools.count()

    @contextmanager
    def case() -> Iterator[Callable[[], object]]:
        turn = next(turns)
        given = prompts(turn)
        time.sleep(SETTLE)
        yield lambda: call(turn, given)

    return case


def compare(
    llm: LLM,
    path: Path,
    *,
    repeat: int = 5,
    seed: int = 0,
    sizes: Sizes | None = None,
    report: PeerReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PeerReport:
    """Passes and generation of both engines, in turns. The engine of `llm` must be idle."""
    if repeat < 1:
        raise InvalidParams("repeat must be at least 1")
    sizes = sizes or Sizes()
    context = llm.model.context
    report = PeerReport() if report is None else report
    prompts = _Prompts(llm, seed)
    long = max(sizes.long, sizes.prompt, prompts.longest + sizes.output, sizes.cached)
    cases = [
        *(StepCase("nodes", nodes, sizes.cached) for nodes in sizes.nodes),
        StepCase("sequences", 1, sizes.cached, sizes.concurrency),
        StepCase("cached", 1, sizes.long),
    ]
    if longest := [_pass_name(c) for c in cases if c.cached + c.nodes > context]:
        report.skipped = dict.fromkeys(longest, f"the model's context holds {context}")
    peer = LlamaCpp(
        path,
        threads=cores(),
        long=min(long + max(sizes.nodes) + 1, context),
        short=max(prompts.longest + sizes.output, sizes.cached) + 2,
        sequences=sizes.concurrency,
    )
    counter = ProgressCounter(progress)
    with closing(peer):
        report.peer = peer.describe()
        cases = [c for c in cases if _pass_name(c) not in report.skipped]
        last_only = sum(c.nodes > 1 for c in cases)
        counter.expected = (1 + PASSES * repeat) * (2 * len(cases) + last_only)
        counter.expected += (1 + repeat) * 7
        _compare_passes(llm, peer, cases, repeat, seed, counter, report)
        _compare_generation(llm, peer, prompts, repeat, sizes, counter, report)
    return report


def _compare_passes(
    llm: LLM,
    peer: LlamaCpp,
    cases: Sequence[StepCase],
    repeat: int,
    seed: int,
    counter: ProgressCounter,
    report: PeerReport,
) -> None:
    bench = PassBench(llm.engine.idle_runner(), seed, counter)
    theirs = LlamaPasses(peer, llm.model.vocab_size, seed)
    series: dict[tuple[str, StepCase], Series] = {}
    try:
        bench.prepare(cases)
        obstacles = {case: reason for case in cases if (reason := bench.obstacle(case))}
        report.skipped |= {_pass_name(case): reason for case, reason in obstacles.items()}
        cases = [case for case in cases if case not in obstacles]
        concurrency = max((case.sequences for case in cases if case.sequences > 1), default=1)
        cached = min((case.cached for case in cases), default=0)
        theirs.prepare(max((case.cached for case in cases), default=0), concurrency, cached)
        runs: dict[tuple[str, StepCase], clock.Case] = {}
        for case in cases:
            runs["ours", case] = _bind(_ours, bench, case)
            runs["theirs", case] = _bind(theirs.once, case)
            if case.nodes > 1:
                runs["last", case] = _bind(theirs.once, case, False)
        for long in (False, True):
            some = {key: run for key, run in runs.items() if (key[1].sweep == "cached") is long}
            clock.in_turns(some, repeat=PASSES * repeat, tick=counter.advance, into=series)
    finally:
        bench.close()
        report.rows += _pass_rows(cases, series)


def _pass_rows(
    cases: Sequence[StepCase], series: Mapping[tuple[str, StepCase], Series]
) -> Iterator[Row]:
    """A row for each case that both engines were timed on."""
    for case in cases:
        name, mine = _pass_name(case), series.get(("ours", case), Series())
        limit = 1.0 if case.sweep == "cached" else _PASS_BOUNDS.get(case.nodes * case.sequences)
        bound = None if limit is None else Bound(limit)
        for other, label, must in (
            ("theirs", name, bound),
            ("last", f"{name}, theirs scoring the last", None),
        ):
            theirs = series.get((other, case), Series())
            if mine.seconds and theirs.seconds:
                yield _row(label, mine, theirs, must)


def _bind(function: Callable[..., Any], *arguments: Any) -> clock.Case:
    return lambda: function(*arguments)


def _row(name: str, ours: Series, theirs: Series, bound: Bound | None) -> Row:
    return Row(
        name,
        "ms",
        ours.median * 1e3,
        theirs.median * 1e3,
        bound,
        other="llama.cpp",
        raw={"ours": ours.seconds, "theirs": theirs.seconds},
    )


def _generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    """Answers prompts; raises an error if an answer fails or has another length than requested."""
    for result in llm.generate(prompts, params):
        if result.error is not None:
            raise result.error
        if len(result.outputs[0].token_ids) != params.max_tokens:
            raise OutstrideError("an answer has another length than requested")


def _compare_generation(
    llm: LLM,
    peer: LlamaCpp,
    prompts: _Prompts,
    repeat: int,
    sizes: Sizes,
    counter: ProgressCounter,
    report: PeerReport,
) -> None:
    output, concurrency = sizes.output, sizes.concurrency
    greedy = SamplingParams(max_tokens=output, ignore_eos=True)

    def ours(params: SamplingParams) -> Callable[[int, list[list[int]]], object]:
        return lambda _turn, given: _generate(llm, given, params)

    def sampled(turn: int, given: list[list[int]]) -> None:
        params = SamplingParams(
            max_tokens=output, ignore_eos=True, temperature=0.8, top_p=0.95, seed=turn
        )
        _generate(llm, given, params)

    def long_prompt(turn: int) -> list[list[int]]:
        return [prompts.random(turn, sizes.prompt)]

    def alone(turn: int) -> list[list[int]]:
        return prompts.texts(turn, 1)

    def again(turn: int) -> list[list[int]]:
        return prompts.texts(turn + 500_000, 1)  # greedy prompts are in the prefix cache

    def several(turn: int) -> list[list[int]]:
        return prompts.texts(turn + 1_000_000, concurrency)

    def prefill(_turn: int, given: list[list[int]]) -> None:
        peer.single.clear()
        peer.single.prefill(given)

    runs: dict[str, clock.Case] = {
        "prefill ours": _case(long_prompt, ours(SamplingParams(max_tokens=1, ignore_eos=True))),
        "prefill theirs": _case(long_prompt, prefill),
        "alone ours": _case(alone, ours(greedy)),
        "alone theirs": _case(alone, lambda _, given: peer.single.generate(given, output)),
        "sampled ours": _case(again, sampled),
        "batch ours": _case(several, ours(greedy)),
        "batch theirs": _case(several, lambda _, given: peer.batched.generate(given, output)),
    }
    context = llm.model.context
    if sizes.prompt + 1 > context:
        report.skipped[f"prompt of {sizes.prompt:,} tokens"] = f"the context holds {context}"
        runs = {name: run for name, run in runs.items() if not name.startswith("prefill")}
    series: dict[str, Series] = {}
    try:
        clock.in_turns(runs, repeat=repeat, tick=counter.advance, into=series)
    finally:
        report.rows += _rates(series, sizes)


def _rates(series: Mapping[str, Series], sizes: Sizes) -> Iterator[Row]:
    """Tokens per second of the cases that both engines were timed on."""
    for name, tokens, ours, theirs, minimum, other in (
        (
            f"prompt of {sizes.prompt:,} tokens",
            sizes.prompt,
            "prefill ours",
            "prefill theirs",
            1.0,
            "",
        ),
        (
            f"greedy, one request, {sizes.output} tokens",
            sizes.output,
            "alone ours",
            "alone theirs",
            1.2,
            "",
        ),
        (
            f"{sizes.concurrency} requests at once",
            sizes.concurrency * sizes.output,
            "batch ours",
            "batch theirs",
            2.7,
            "",
        ),
        (
            "temperature 0.8, top-p 0.95, seeded",
            sizes.output,
            "sampled ours",
            "alone ours",
            0.92,
            "our greedy",
        ),
    ):
        mine, others = series.get(ours, Series()), series.get(theirs, Series())
        if mine.seconds and others.seconds:
            yield Row(
                name,
                "tok/s",
                tokens / mine.median,
                tokens / others.median,
                Bound(minimum, at_most=False),
                other=other or "llama.cpp",
                raw={"ours": mine.seconds, "theirs": others.seconds},
            )
