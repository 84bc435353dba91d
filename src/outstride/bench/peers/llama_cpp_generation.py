"""Prompts and whole answers of both engines, for the comparison with llama.cpp."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from outstride.bench import clock
from outstride.bench.clock import Series
from outstride.bench.comparison_rows import Bound, PeerReport, Row
from outstride.bench.harness import ProgressCounter
from outstride.bench.peers.bounds import PeerBounds, at_least
from outstride.bench.peers.llama_cpp import SETTLE, LlamaCpp
from outstride.bench.prompts import built_in
from outstride.core.params import SamplingParams
from outstride.errors import OutstrideError

if TYPE_CHECKING:
    from outstride.llm import LLM

WARM = 2048
"""Longest prompt that is prefilled once before it is timed."""
PREFILLED = 4096
"""About how many tokens of one length each engine prefills; long prompts run once."""

Answer = Callable[[int, list[list[int]]], object]
"""Answers the prompts of a turn."""


class TurnPrompts:
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


def case_of(prompts: Callable[[int], list[list[int]]], call: Answer) -> clock.Case:
    """A case whose prompts depend on how often it has run."""
    turns = itertools.count()

    @contextmanager
    def case() -> Iterator[Callable[[], object]]:
        turn = next(turns)
        given = prompts(turn)
        time.sleep(SETTLE)
        yield lambda: call(turn, given)

    return case


def _generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> None:
    """Answers prompts; raises an error if an answer fails or has another length than requested."""
    for result in llm.generate(prompts, params):
        if result.error is not None:
            raise result.error
        if len(result.outputs[0].token_ids) != params.max_tokens:
            raise OutstrideError("an answer has another length than requested")


def _params(output: int, turn: int | None = None) -> SamplingParams:
    """Greedy decoding; with a turn, sampling with that seed."""
    if turn is None:
        return SamplingParams(max_tokens=output, ignore_eos=True)
    return SamplingParams(
        max_tokens=output, ignore_eos=True, temperature=0.8, top_p=0.95, seed=turn
    )


# --- prompts ----------------------------------------------------------------------------------------


def prompt_runs(length: int, repeat: int) -> tuple[int, int]:
    """How often a prompt of a length is timed, and how often it runs before that."""
    return min(repeat, max(1, PREFILLED // length)), int(length <= WARM)


def compare_prompts(
    llm: LLM,
    peer: LlamaCpp,
    prompts: TurnPrompts,
    lengths: Sequence[int],
    repeat: int,
    bounds: PeerBounds,
    counter: ProgressCounter,
    report: PeerReport,
) -> None:
    """Prefills prompts of several lengths with both engines, in turns."""

    def ours(_turn: int, given: list[list[int]]) -> None:
        _generate(llm, given, _params(1))

    def theirs(_turn: int, given: list[list[int]]) -> None:
        peer.single.clear()
        peer.single.prefill(given)

    for length in lengths:

        def given(turn: int, length: int = length) -> list[list[int]]:
            return [prompts.random(turn, length)]

        series: dict[str, Series] = {}
        timed, warmups = prompt_runs(length, repeat)
        runs = {"ours": case_of(given, ours), "theirs": case_of(given, theirs)}
        try:
            clock.in_turns(runs, repeat=timed, warmups=warmups, tick=counter.advance, into=series)
        finally:
            report.rows += _rows(
                series,
                [
                    _Rate(
                        _prompt_name(length),
                        length,
                        "ours",
                        "theirs",
                        at_least(bounds.prompts.get(length)),
                    )
                ],
            )


def _prompt_name(length: int) -> str:
    return f"prompt of {length:,} tokens"


def fitting_prompts(lengths: Sequence[int], context: int, report: PeerReport) -> list[int]:
    """Lengths of prompts that fit a context with one more token; the report names the others."""
    report.skipped |= {
        _prompt_name(length): f"the context holds {context}"
        for length in lengths
        if length + 1 > context
    }
    return [length for length in lengths if length + 1 <= context]


# --- answers ----------------------------------------------------------------------------------------

REQUEST_CASES = 5
"""Cases of `compare_requests`."""


def compare_requests(
    llm: LLM,
    peer: LlamaCpp,
    prompts: TurnPrompts,
    output: int,
    concurrency: int,
    repeat: int,
    bounds: PeerBounds,
    counter: ProgressCounter,
    report: PeerReport,
) -> None:
    """Answers of `output` tokens, one request and several at once, by both engines in turns."""

    def greedy(_turn: int, given: list[list[int]]) -> None:
        _generate(llm, given, _params(output))

    def sampled(turn: int, given: list[list[int]]) -> None:
        _generate(llm, given, _params(output, turn))

    def texts(first: int, count: int, turn: int) -> list[list[int]]:
        return prompts.texts(first + turn, count)

    alone, again = partial(texts, 0, 1), partial(texts, 500_000, 1)  # greedy prompts are cached
    several = partial(texts, 1_000_000, concurrency)
    runs: dict[str, clock.Case] = {
        "alone ours": case_of(alone, greedy),
        "alone theirs": case_of(alone, lambda _, given: peer.single.generate(given, output)),
        "sampled ours": case_of(again, sampled),
        "batch ours": case_of(several, greedy),
        "batch theirs": case_of(several, lambda _, given: peer.batched.generate(given, output)),
    }
    rates = [
        _Rate(
            f"greedy, one request, {output} tokens",
            output,
            "alone ours",
            "alone theirs",
            at_least(bounds.greedy),
        ),
        _Rate(
            f"{concurrency} requests at once",
            concurrency * output,
            "batch ours",
            "batch theirs",
            at_least(bounds.requests),
        ),
        _Rate(
            "temperature 0.8, top-p 0.95, seeded",
            output,
            "sampled ours",
            "alone ours",
            at_least(bounds.sampled),
            other="our greedy",
        ),
    ]
    series: dict[str, Series] = {}
    try:
        clock.in_turns(runs, repeat=repeat, tick=counter.advance, into=series)
    finally:
        report.rows += _rows(series, rates)


@dataclass(frozen=True, slots=True)
class _Rate:
    """A row of tokens per second: two cases and how many tokens each of their runs has."""

    name: str
    tokens: int
    ours: str
    theirs: str
    bound: Bound | None
    other: str = "llama.cpp"


def _rows(series: Mapping[str, Series], rates: Sequence[_Rate]) -> Iterator[Row]:
    """Tokens per second of the cases that both engines were timed on."""
    for rate in rates:
        mine, others = series.get(rate.ours, Series()), series.get(rate.theirs, Series())
        if mine.seconds and others.seconds:
            yield Row(
                rate.name,
                "tok/s",
                rate.tokens / mine.median,
                rate.tokens / others.median,
                rate.bound,
                other=rate.other,
                raw={"ours": mine.seconds, "theirs": others.seconds},
            )
