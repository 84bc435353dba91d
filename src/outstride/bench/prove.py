"""Plain decoding against a method, token for token, on prompts of the user's choice.

An exact method promises the tokens of plain decoding, alone or in company. Here is where anybody can
hold it to that. All prompts run in batches under both; some of them again one by one; and all of them
once more in bad company: beside requests with other methods, on so few pages that they are preempted.
Besides tokens, the log-probabilities behind them are compared to the last bit: arithmetic that depends
on the company shows there long before it changes a token. Where two answers part, one more pass over
what they have in common shows how close the two tokens were.

A method that promises a distribution is held to that instead, by the tests of `bench.chance`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from outstride import registry
from outstride.bench import chance, look
from outstride.bench.prompts import BenchPrompt
from outstride.bench.proof import (
    ALONE,
    BATCH,
    MIXED,
    Company,
    Divergence,
    ProofCase,
    ProofReport,
    Side,
)
from outstride.core.contracts import Exactness, Method
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.core.sequence import Table
from outstride.engine.engine import Engine
from outstride.errors import IntegrityError, InvalidParams, OutstrideError, UnknownMethod
from outstride.llm import LLM
from outstride.results import Completion, Result, Stats

PLAIN = "plain"


# --- the run --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """A proof under way."""

    llm: LLM
    judged: Method
    plain: Method
    tokens: list[list[int]]
    params: SamplingParams
    report: ProofReport
    progress: Callable[[int, int], None] | None
    total: int
    done: int = 0
    references: dict[int, Result] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return self.judged.exactness is Exactness.EXACT

    def tick(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)

    def answers(
        self, prompts: Sequence[list[int]], methods: Sequence[Method], salt: str, *, bits: bool
    ) -> list[Result]:
        """One result per prompt; a failure stays with its prompt, also where there is only one."""
        params = replace(self.params, logprobs=0) if bits else self.params
        try:
            return self.llm.generate(prompts, params, method=list(methods), salt=salt)
        except OutstrideError as error:
            if len(prompts) != 1:
                raise
            return [Result(list(prompts[0]), error=error)]


def _baseline(judged: Method) -> str:
    """What a method is held to; plain decoding for one that is not registered."""
    try:
        return registry.baseline(judged.spec or judged.name)
    except UnknownMethod:
        return PLAIN


def _batches(count: int, size: int) -> Iterator[range]:
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def _in_batches(run: _Run) -> None:
    """All prompts under plain, then under the method; prefixes of the first are there for the second.

    The reference asks for log-probabilities, the method does not: both ways through a pass are used.
    """
    count, size, batch = len(run.tokens), run.report.batch, "prove"
    for chunk in _batches(count, size):
        group = [run.tokens[i] for i in chunk]
        plain = run.answers(group, [run.plain] * len(group), batch, bits=True)
        run.references.update(zip(chunk, plain, strict=True))
        run.tick(len(chunk))
        judged = run.answers(group, [run.judged] * len(group), batch, bits=False)
        for i, result in zip(chunk, judged, strict=True):
            case = run.report.cases[i]
            _compare(run, i, result, run.report.method, BATCH)
            if case.error is None and case.failure is None:
                case.stats = Stats.total(result.outputs)
                case.plain_stats = Stats.total(run.references[i].outputs)
                case.tokens = case.stats.emitted
        run.tick(len(chunk))


def _alone(run: _Run) -> None:
    """The first prompts one by one, under both, each read anew."""
    for i in range(run.report.alone):
        if run.report.cases[i].error is None:
            pairs = ((run.plain, run.report.baseline, False), (run.judged, run.report.method, True))
            for method, name, bits in pairs:
                salt = f"prove alone {name}"
                [result] = run.answers([run.tokens[i]], [method], salt, bits=bits)
                _compare(run, i, result, name, ALONE)
        run.tick(2)


def _in_company(run: _Run) -> None:
    """Every prompt beside requests with other methods, on too few pages for all of them."""
    others = _companions(run)
    company = run.report.mixed = Company(tuple(name for name, _ in others))
    place = 0
    for chunk in _batches(len(run.tokens), run.report.batch):
        able = [i for i in chunk if run.report.cases[i].error is None]
        methods, names = [run.judged] * len(able), [run.report.method] * len(able)
        beside = able[1:] + able[:1]
        for _ in beside:
            name, method = others[place % len(others)]
            place += 1
            methods.append(method)
            names.append(name)
        prompts = [run.tokens[i] for i in able + beside]
        if prompts:
            with _squeezed(run, able + beside) as pages:
                results = run.answers(prompts, methods, f"prove mixed {place}", bits=run.exact)
            company.pages = max(company.pages, pages)
            for i, name, result in zip(able + beside, names, results, strict=True):
                _compare(run, i, result, name, MIXED)
                company.preempted += Stats.total(result.outputs).preempted
        run.tick(2 * len(chunk))


def _companions(run: _Run) -> list[tuple[str, Method]]:
    """What others may be asking for meanwhile: plain, and all that promise the same text.

    Methods that need something, and those that time passes first, stay away.
    """
    model, found = run.llm.model, [(run.report.baseline, run.plain)]
    for entry in registry.entries():
        required = any(option.required for option in entry.options)
        if entry.exactness is not Exactness.EXACT or required or entry.drafter.weighed:
            continue
        if registry.baseline(entry.name) != run.report.baseline:
            continue
        if entry.name in (run.report.baseline, run.report.method):
            continue
        method = registry.build(entry.name)
        fits = method.drafter.fits(model.vision, model.masking) is None
        if fits and (not entry.needs or entry.exact_to != PLAIN):
            found.append((entry.name, method))
    return found


@contextmanager
def _squeezed(run: _Run, places: Sequence[int]) -> Iterator[int]:
    """Takes pages away until a third of what the requests will fill is left; yields how many are.

    The largest request alone still fits, or nobody would ever finish.
    """
    engine, vision = run.llm.engine, run.llm.model.vision
    pool = engine.passes.pools[TARGET]
    _rest(engine)
    longest, filled, most = 0, 0, min(run.params.max_tokens, run.llm.model.context)
    for i in places:
        prompt = len(run.tokens[i])
        entries = run.judged.drafter.entries(prompt + most, vision)
        longest = max(longest, pool.pages_for(entries) + 2)
        for output in run.references[i].outputs:
            filled += pool.pages_for(prompt + len(output.token_ids))
    left = max(longest, filled // 3)
    ballast = Table()
    if pool.available > left:
        pool.reserve(ballast, (pool.available - left) * pool.page_size)
    try:
        yield pool.available
    finally:
        _rest(engine)
        pool.close(ballast)


def _rest(engine: Engine) -> None:
    """Waits until the last step of what was before is entered."""
    while engine.busy:
        time.sleep(0.001)


# --- comparing ------------------------------------------------------------------------------------


def _parting(plain: Completion, other: Completion) -> int | None:
    """At which output token two answers part; None if they are the same."""
    pairs = zip(plain.token_ids, other.token_ids, strict=False)
    for i, (a, b) in enumerate(pairs):
        if a != b:
            return i
    if len(plain.token_ids) != len(other.token_ids):
        return min(len(plain.token_ids), len(other.token_ids))
    if (plain.text, plain.finish_reason) != (other.text, other.finish_reason):
        return len(plain.token_ids)
    return None


def _bits(plain: Completion, other: Completion) -> int | None:
    """At which output token the log-probabilities of equal answers part, if both have them."""
    rows = zip(plain.logprobs or (), other.logprobs or (), strict=False)
    for i, (a, b) in enumerate(rows):
        if (a.token_id, a.logprob) != (b.token_id, b.logprob):
            return i
    return None


def _diverge(
    run: _Run, i: int, plain: Completion, other: Completion, at: int, who: str, company: str
) -> Divergence:
    said = plain.token_ids[:at]
    tokens = [c.token_ids[at] if at < len(c.token_ids) else None for c in (plain, other)]
    row = None
    if run.report.baseline == PLAIN and any(t is not None for t in tokens):
        row = look.logits_after(run.llm, run.tokens[i] + said)

    def side(token: int | None) -> Side:
        if token is None:
            return Side(None, "", None, None)
        text = run.llm.tokenizer.decode([token], skip_special=False)
        if row is None:  # on a canvas, the logits depend on the step
            return Side(token, text, None, None)
        return Side(token, text, float(row[token]), int((row > row[token]).sum()))

    left, right = side(tokens[0]), side(tokens[1])
    gap = None
    if left.logit is not None and right.logit is not None:
        gap = left.logit - right.logit
    return Divergence(
        position=at,
        sample=plain.index,
        company=company,
        method=who,
        plain=left,
        other=right,
        gap=gap,
        before=run.llm.tokenizer.decode(said)[-60:],
        finish=(plain.finish_reason, other.finish_reason),
    )


def _blur(
    run: _Run, plain: Completion, other: Completion, at: int, who: str, company: str
) -> Divergence:
    """The same tokens from other logits."""
    assert plain.logprobs is not None
    assert other.logprobs is not None
    rows = plain.logprobs[at], other.logprobs[at]
    sides = [
        Side(
            r.token_id, run.llm.tokenizer.decode([r.token_id], skip_special=False), r.logprob, None
        )
        for r in rows
    ]
    return Divergence(
        position=at,
        sample=plain.index,
        company=company,
        method=who,
        plain=sides[0],
        other=sides[1],
        gap=rows[0].logprob - rows[1].logprob,
        before=run.llm.tokenizer.decode(plain.token_ids[:at])[-60:],
        finish=(plain.finish_reason, other.finish_reason),
        bits=True,
    )


def _compare(run: _Run, i: int, other: Result, who: str, company: str) -> None:
    """Enters into a case whether a result is the reference, and if not, where they part."""
    case, plain = run.report.cases[i], run.references[i]
    if plain.error is not None and other.error is not None:
        case.error = str(plain.error)
        return
    if plain.error is not None or other.error is not None:
        case.equal = False
        name = run.report.baseline if plain.error is not None else who
        case.failure = f"only {name} failed, in company {company!r}: {plain.error or other.error}"
        return
    for ours, theirs in zip(plain.outputs, other.outputs, strict=True):
        at = _parting(ours, theirs)
        if at is not None:
            case.equal = False
            case.divergences.append(_diverge(run, i, ours, theirs, at, who, company))
        elif run.exact and (at := _bits(ours, theirs)) is not None:
            case.equal = False
            case.divergences.append(_blur(run, ours, theirs, at, who, company))


# --- distributions --------------------------------------------------------------------------------


def _by_chance(run: _Run) -> None:
    """Draws answers in batches and asks whether their tokens follow the target's distributions."""
    texts: list[list[chance.Numbers]] = []
    tops: list[chance.Numbers] = []
    seed = run.params.seed or 0
    for chunk in _batches(len(run.tokens), run.report.batch):
        group = [run.tokens[i] for i in chunk]
        results = run.answers(group, [run.judged] * len(group), "prove", bits=False)
        run.tick(len(chunk))
        for i, result in zip(chunk, results, strict=True):
            case = run.report.cases[i]
            if result.error is not None:
                _blame(run, i, result.error)
            else:
                case.stats = Stats.total(result.outputs)
                case.tokens = case.stats.emitted
                said = [output.token_ids for output in result.outputs]
                places, best = look.weigh(run.llm, run.tokens[i], said, run.params, seed + 7919 * i)
                texts.append(places)
                tops.append(best)
            run.tick(1)
    run.report.chance = chance.judge(texts)
    chance.foresee(run.report.chance, np.concatenate([np.zeros(0), *tops]))


def _blame(run: _Run, i: int, error: Exception) -> None:
    """Whether plain decoding fails on a prompt, too, decides whose fault it is."""
    case = run.report.cases[i]
    [plain] = run.answers([run.tokens[i]], [run.plain], "prove", bits=False)
    if plain.error is not None:
        case.error = str(error)
    else:
        case.equal = False
        case.failure = f"only {run.report.method} failed: {error}"


# --- the proof ------------------------------------------------------------------------------------


def prove(
    llm: LLM,
    method: str | Method,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams | None = None,
    *,
    batch: int = 8,
    raw: bool = False,
    alone: int = 3,
    mixed: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> ProofReport:
    """Runs all prompts under plain and under `method` and compares what they say.

    A method for masked models is compared with what it is exact to instead: the schedule of `steps`.
    One that promises a distribution is tested for it, unless the temperature is 0: then its text is
    as certain as plain's.

    Sampling without a seed could not be compared; seed 0 is used then. Prompts that neither can
    answer (too long for the context) are listed and prove nothing.
    """
    if batch < 1 or alone < 0:
        raise InvalidParams("batch must be at least 1 and alone at least 0")
    if not prompts:
        raise InvalidParams("there are no prompts to prove anything with")
    params = params or SamplingParams()
    if params.seed is None:
        params = replace(params, seed=0)
    judged = llm.method(method)
    baseline = _baseline(judged)
    loose = judged.exactness is Exactness.DISTRIBUTION and params.temperature > 0
    if loose and baseline != PLAIN:
        raise InvalidParams(
            f"{judged.name} promises a distribution on a canvas, and there is no test for that here"
        )
    count = len(prompts)
    alone = min(alone, count) if batch > 1 else 0  # in batches of one they are alone already
    report = ProofReport(
        method=judged.spec or judged.name,
        exactness=judged.exactness,
        baseline=baseline,
        params=params,
        batch=batch,
        alone=0 if loose else alone,
        cases=[ProofCase(prompt) for prompt in prompts],
    )
    run = _Run(
        llm=llm,
        judged=judged,
        plain=llm.method(baseline),
        tokens=[llm.encode(prompt.text, chat=not raw) for prompt in prompts],
        params=params,
        report=report,
        progress=progress,
        total=2 * count if loose else (4 if mixed else 2) * count + 2 * alone,
    )
    run.tick(0)
    if loose:
        _by_chance(run)
    else:
        _in_batches(run)
        _alone(run)
        if mixed and report.answered:
            _in_company(run)
    try:
        llm.engine.check_integrity()
    except IntegrityError as error:
        report.integrity = str(error)
    if not report.answered:
        raise OutstrideError(f"no prompt could be answered: {report.cases[0].error}")
    return report
