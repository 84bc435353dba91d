"""Comparison with llama.cpp: the same file, the same threads, in turns, in one run on one machine.

Both engines get the same tokens. Where one scores several nodes of a pass, the other scores all of
them too; a second row shows what llama.cpp saves by scoring only the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outstride.bench import clock
from outstride.bench.clock import Series
from outstride.bench.comparison_rows import Bound, PeerReport, Row, cores
from outstride.bench.harness import ProgressCounter
from outstride.bench.peers import llama_cpp_generation as generation
from outstride.bench.peers.bounds import PeerBounds, at_most, bounds_of
from outstride.bench.peers.llama_cpp import SETTLE, LlamaCpp, LlamaPasses
from outstride.bench.step import PassBench, StepCase
from outstride.errors import InvalidParams

if TYPE_CHECKING:
    from outstride.llm import LLM

PARTS = ("passes", "sequences", "long", "prompts", "requests", "start", "host")
"""Parts of the comparison; `start` and `host` are ours alone."""
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

    cached: int = 128
    long: int = 4096
    prompts: tuple[int, ...] = (1024, 4096, 8185)
    output: int = 128
    concurrency: int = 16
    nodes: tuple[int, ...] = (1, 4, 8, 16)

    def cases(self, parts: Sequence[str]) -> list[StepCase]:
        """The passes of some parts."""
        found = {
            "passes": [StepCase("nodes", nodes, self.cached) for nodes in self.nodes],
            "sequences": [StepCase("sequences", 1, self.cached, self.concurrency)],
            "long": [StepCase("cached", 1, self.long)],
        }
        return [case for part in parts for case in found.get(part, ())]


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


def compare(
    llm: LLM,
    path: Path,
    *,
    parts: Sequence[str] = PARTS,
    repeat: int = 5,
    seed: int = 0,
    sizes: Sizes | None = None,
    environments: Path | None = None,
    report: PeerReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PeerReport:
    """Passes and generation of both engines, in turns. The engine of `llm` must be idle."""
    sizes = sizes or Sizes()
    if repeat < 1 or min(*sizes.nodes, *sizes.prompts, 1) < 1 or sizes.cached < 0:
        raise InvalidParams("repeat, nodes and prompts must be at least 1, cached at least 0")
    report = PeerReport() if report is None else report
    context, bounds = llm.model.context, bounds_of(llm)
    turns = generation.TurnPrompts(llm, seed)
    answers = turns.longest + sizes.output if "requests" in parts else 1
    lengths = generation.fitting_prompts(
        sizes.prompts if "prompts" in parts else (), context, report
    )
    cases = sizes.cases(parts)
    report.skipped |= {
        _pass_name(c): f"the model's context holds {context}"
        for c in cases
        if c.cached + c.nodes > context
    }
    cases = [c for c in cases if _pass_name(c) not in report.skipped]
    peer = LlamaCpp(
        path,
        threads=cores(),
        long=min(max(answers, *lengths, *(c.cached + c.nodes for c in cases), 1) + 1, context),
        short=max(answers, sizes.cached) + 2,
        sequences=sizes.concurrency,
        environments=environments,
    )
    counter = ProgressCounter(progress)
    with closing(peer):
        report.peer = peer.describe()
        last_only = sum(c.nodes > 1 for c in cases)
        counter.expected = (1 + PASSES * repeat) * (2 * len(cases) + last_only)
        counter.expected += 2 * sum(sum(generation.prompt_runs(n, repeat)) for n in lengths)
        if "requests" in parts:
            counter.expected += (1 + repeat) * generation.REQUEST_CASES
        if cases:
            _compare_passes(llm, peer, cases, repeat, seed, bounds, counter, report)
        if "requests" in parts:
            generation.compare_requests(
                *(llm, peer, turns, sizes.output, sizes.concurrency),
                *(repeat, bounds, counter, report),
            )
        generation.compare_prompts(llm, peer, turns, lengths, repeat, bounds, counter, report)
    return report


def _compare_passes(
    llm: LLM,
    peer: LlamaCpp,
    cases: Sequence[StepCase],
    repeat: int,
    seed: int,
    bounds: PeerBounds,
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
        batched = [case for case in cases if case.sequences > 1]
        concurrency = max((case.sequences for case in batched), default=0)
        cached = min((case.cached for case in batched), default=0)
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
        report.rows += _pass_rows(cases, series, bounds)


def _pass_rows(
    cases: Sequence[StepCase], series: Mapping[tuple[str, StepCase], Series], bounds: PeerBounds
) -> Iterator[Row]:
    """A row for each case that both engines were timed on."""
    for case in cases:
        name, mine = _pass_name(case), series.get(("ours", case), Series())
        limit = {"cached": bounds.long, "sequences": bounds.sequences}.get(
            case.sweep, bounds.passes.get(case.nodes)
        )
        for other, label, must in (
            ("theirs", name, at_most(limit)),
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
