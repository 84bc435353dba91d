"""The companies in which a method is tried: beside itself, by itself, and among others on few pages."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outstride import registry
from outstride.bench.parting import compare
from outstride.bench.proof import ALONE, BATCH, MIXED, Company
from outstride.bench.trial import PLAIN, Trial, batches
from outstride.core.contracts import Exactness, Method
from outstride.core.proposal import TARGET
from outstride.core.sequence import Table
from outstride.engine.engine import Engine
from outstride.results import Stats


def in_batches(trial: Trial) -> None:
    """All prompts under plain, then under the method; prefixes of the first are there for the second.

    The reference asks for log-probabilities, the method does not: both ways through a pass are used.
    """
    count, size, batch = len(trial.tokens), trial.report.batch, "prove"
    for chunk in batches(count, size):
        group = [trial.tokens[i] for i in chunk]
        plain = trial.answers(group, [trial.plain] * len(group), batch, bits=True)
        trial.references.update(zip(chunk, plain, strict=True))
        trial.tick(len(chunk))
        judged = trial.answers(group, [trial.judged] * len(group), batch, bits=False)
        for i, result in zip(chunk, judged, strict=True):
            case = trial.report.cases[i]
            compare(trial, i, result, trial.report.method, BATCH)
            if case.error is None and case.failure is None:
                case.stats = Stats.total(result.outputs)
                case.plain_stats = Stats.total(trial.references[i].outputs)
                case.tokens = case.stats.emitted
        trial.tick(len(chunk))


def alone(trial: Trial) -> None:
    """The first prompts one by one, under both, each read anew."""
    for i in range(trial.report.alone):
        if trial.report.cases[i].error is None:
            pairs = (
                (trial.plain, trial.report.baseline, False),
                (trial.judged, trial.report.method, True),
            )
            for method, name, bits in pairs:
                salt = f"prove alone {name}"
                [result] = trial.answers([trial.tokens[i]], [method], salt, bits=bits)
                compare(trial, i, result, name, ALONE)
        trial.tick(2)


def in_company(trial: Trial) -> None:
    """Every prompt beside requests with other methods, on too few pages for all of them."""
    others = _companions(trial)
    company = trial.report.mixed = Company(tuple(name for name, _ in others))
    place = 0
    for chunk in batches(len(trial.tokens), trial.report.batch):
        able = [i for i in chunk if trial.report.cases[i].error is None]
        methods, names = [trial.judged] * len(able), [trial.report.method] * len(able)
        beside = able[1:] + able[:1]
        for _ in beside:
            name, method = others[place % len(others)]
            place += 1
            methods.append(method)
            names.append(name)
        prompts = [trial.tokens[i] for i in able + beside]
        if prompts:
            with _squeezed(trial, able + beside) as pages:
                results = trial.answers(prompts, methods, f"prove mixed {place}", bits=trial.exact)
            company.pages = max(company.pages, pages)
            for i, name, result in zip(able + beside, names, results, strict=True):
                compare(trial, i, result, name, MIXED)
                company.preempted += Stats.total(result.outputs).preempted
        trial.tick(2 * len(chunk))


def _companions(trial: Trial) -> list[tuple[str, Method]]:
    """What others may be asking for meanwhile: plain, and all that promise the same text.

    Methods that need something, and those that time passes first, stay away.
    """
    model, found = trial.llm.model, [(trial.report.baseline, trial.plain)]
    for entry in registry.entries():
        required = any(option.required for option in entry.options)
        if entry.exactness is not Exactness.EXACT or required or entry.drafter.weighed:
            continue
        if registry.baseline(entry.name) != trial.report.baseline:
            continue
        if entry.name in (trial.report.baseline, trial.report.method):
            continue
        method = registry.build(entry.name)
        fits = method.drafter.fits(model.vision, model.masking) is None
        if fits and (not entry.needs or entry.exact_to != PLAIN):
            found.append((entry.name, method))
    return found


@contextmanager
def _squeezed(trial: Trial, places: Sequence[int]) -> Iterator[int]:
    """Takes pages away until a third of what the requests will fill is left; yields how many are.

    The largest request alone still fits, or nobody would ever finish.
    """
    engine, vision = trial.llm.engine, trial.llm.model.vision
    pool = engine.passes.pools[TARGET]
    _rest(engine)
    longest, filled, most = 0, 0, min(trial.params.max_tokens, trial.llm.model.context)
    for i in places:
        prompt = len(trial.tokens[i])
        entries = trial.judged.drafter.entries(prompt + most, vision)
        longest = max(longest, pool.pages_for(entries) + 2)
        for output in trial.references[i].outputs:
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
