"""Compares methods on the same prompts: tokens per pass, tokens per second, time by verb.

Tasks, batch sizes and temperatures vary; each pair of the latter two is a setting. All methods
answer the same few prompts in turns before the next few prompts, so that a slow moment of the
machine slows all of them, and comparisons are paired. In each round every method starts with empty
drafter memory and finds no other method's prompts in the prefix cache. `warm` rows come from one
further round that keeps the memory of the first. The engine's ledger counts for all methods.

Another engine may answer the same prompts, each directly after our methods: as many tokens as plain
decoding gave, one token per pass.
"""

from __future__ import annotations

import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from outstride import registry
from outstride.bench import clock
from outstride.bench.decode_report import VERBS, DecodeReport, DecodeRun
from outstride.bench.harness import ProgressCounter
from outstride.bench.prompts import BenchPrompt
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams, OutstrideError
from outstride.llm import LLM
from outstride.results import Stats

BASELINE = "plain"
INCOMPRESSIBLE = "random"
"""Group of random prompts, sampled at a high temperature: no drafter can predict the answers."""
MIXED = "mixed"
"""Group of batches that no single group can fill."""
SETTLE = 0.02
"""Seconds before another engine's turn and after it, in which threads stop spinning."""


class DecodePeer(Protocol):
    """Another engine that answers the same prompts."""

    name: str

    def generate(self, prompts: Sequence[Sequence[int]], output: int) -> list[list[int]]:
        """Continues all prompts in one batch, greedily, each by exactly `output` tokens."""
        ...


def incompressible(llm: LLM, count: int, length: int = 64) -> list[BenchPrompt]:
    """Prompts of random tokens. Their answers are sampled at a temperature at which nothing repeats."""
    numbers = random.Random(1)
    found = []
    for i in range(count):
        tokens = [numbers.randrange(llm.model.vocab_size) for _ in range(length)]
        found.append(BenchPrompt(f"random:{i}", INCOMPRESSIBLE, llm.tokenizer.decode(tokens)))
    return found


def exact_methods() -> list[str]:
    """All methods that are exact to plain decoding and need nothing but the model."""
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
class DecodeSetting:
    """Batch size, temperature and round."""

    batch: int
    temperature: float
    round: int
    warm: bool = False

    def memory(self, method: str) -> str:
        """The salt that separates a method's memory and prefixes; a warm round reuses that of the
        first round.
        """
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
    peer: DecodePeer | None = None,
    report: DecodeReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DecodeReport:
    """Answers all prompts with all methods, one batch of a group at a time, in turns.

    Without temperatures, that of `params` is used. `report` is filled while the run goes on.
    """
    if rounds < 1 or min(batches, default=0) < 1 or min(temperatures, default=0.0) < 0.0:
        raise InvalidParams("batches and rounds must be at least 1, temperatures at least 0")
    report = DecodeReport() if report is None else report
    report.methods = [BASELINE, *(m for m in dict.fromkeys(methods) if m != BASELINE)]
    report.peer = None if peer is None else peer.name
    settings = [
        DecodeSetting(batch, temperature, number, warm=number == rounds)
        for batch in dict.fromkeys(batches)
        for temperature in dict.fromkeys(temperatures or (params.temperature,))
        for number in range(rounds + warm)
    ]
    work = [(s, portion) for s in settings for portion in _portions(prompts, s.batch)]
    watch = ProgressCounter(progress)
    watch.expected = len(work) * (len(report.methods) + (peer is not None))
    _warm_up(llm, report.methods, prompts, params.max_tokens, raw)
    for setting, portion in work:
        seed = params.seed if params.seed is not None else 0  # the same noise for all methods
        chosen = replace(params, temperature=setting.temperature, seed=seed)
        _in_turns(llm, report, setting, portion, chosen, raw, peer, watch)
    return report


def _warm_up(
    llm: LLM, methods: Sequence[str], prompts: Sequence[BenchPrompt], length: int, raw: bool
) -> None:
    """Loads, compiles, captures CUDA graphs and measures the cost curve before anything is timed."""
    by_length = sorted(prompts, key=lambda prompt: len(prompt.text))
    for method in methods:
        llm.chat("Count to ten.", SamplingParams(max_tokens=24), method=method, salt="warm-up")
        for prompt in {p.id: p for p in by_length[:1] + by_length[-1:]}.values():
            params = SamplingParams(max_tokens=min(length, 64))
            with suppress(OutstrideError):  # what is wrong with a prompt shows when its turn comes
                _asking(llm, prompt, raw)(prompt.text, params, method=method, salt="warm-up")


def _asking(llm: LLM, prompt: BenchPrompt, raw: bool) -> Any:
    """The call that answers a prompt: `generate` for raw prompts, else `chat`."""
    return llm.generate if raw or prompt.group == INCOMPRESSIBLE else llm.chat


def _portions(prompts: Sequence[BenchPrompt], batch: int) -> list[list[BenchPrompt]]:
    """Batches of prompts of the same group.

    Where no group fills a batch, groups are mixed; each batch then has prompts of all groups.
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
    setting: DecodeSetting,
    portion: Sequence[BenchPrompt],
    params: SamplingParams,
    raw: bool,
    peer: DecodePeer | None,
    watch: ProgressCounter,
) -> None:
    """One batch by all methods. It is recorded as a whole, so that methods stay comparable."""
    first = setting.round % len(report.methods)
    runs: dict[str, tuple[DecodeRun, list[list[int]]]] = {}
    for method in report.methods[first:] + report.methods[:first]:
        runs[method] = _answer(llm, method, setting, portion, params, raw)
        if len(runs) < len(report.methods):
            watch.advance()
    reference = runs[report.methods[0]][1]
    if peer is not None:
        watch.advance()
        given = [llm.encode(p.text, chat=not raw) for p in portion]
        runs[peer.name] = _peer_answer(peer, setting, portion, given, reference)
    for name in [*report.methods, *(() if peer is None else (peer.name,))]:
        run, tokens = runs[name]
        run.equal = sum(a == b for a, b in zip(tokens, reference, strict=True))
        report.runs.append(run)
    watch.advance()


def _peer_answer(
    peer: DecodePeer,
    setting: DecodeSetting,
    portion: Sequence[BenchPrompt],
    given: Sequence[list[int]],
    reference: Sequence[list[int]],
) -> tuple[DecodeRun, list[list[int]]]:
    """One batch by another engine, as long as our longest answer; each answer is cut like ours."""
    time.sleep(SETTLE)
    start = clock.now()
    answers = peer.generate(given, max(1, max(map(len, reference))))
    seconds = clock.now() - start
    time.sleep(SETTLE)
    answers = [a[: len(ours)] for a, ours in zip(answers, reference, strict=True)]
    emitted = sum(map(len, answers))
    run = DecodeRun(
        method=peer.name,
        group=portion[0].group,
        batch=setting.batch,
        temperature=setting.temperature,
        round=setting.round,
        warm=setting.warm,
        prompts=tuple(prompt.id for prompt in portion),
        seconds=seconds,
        emitted=emitted,
        passes=emitted,
        nodes=emitted,
        verbs={},
        equal=0,
        drafts=0,
        expected=0.0,
        sources={},
    )
    return run, answers


def _answer(
    llm: LLM,
    method: str,
    setting: DecodeSetting,
    portion: Sequence[BenchPrompt],
    params: SamplingParams,
    raw: bool,
) -> tuple[DecodeRun, list[list[int]]]:
    """One batch by one method: counts, seconds, and the tokens of the answers."""
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
    before = llm.engine.gauges().seconds
    start = clock.now()
    results = _asking(llm, portion[0], raw)(
        texts, chosen, method=method, salt=setting.memory(method)
    )
    seconds = clock.now() - start
    after = llm.engine.gauges().seconds
    outputs = [output for result in results for output in result.outputs]
    for result in results:
        if result.error is not None:
            raise result.error
    stats = Stats.total(outputs)
    run = DecodeRun(
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
