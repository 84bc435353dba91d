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

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from outstride.bench import chance, companies, look
from outstride.bench.prompts import BenchPrompt
from outstride.bench.proof import ProofCase, ProofReport
from outstride.bench.trial import PLAIN, Trial, baseline_of, batches
from outstride.core.contracts import Exactness, Method
from outstride.core.params import SamplingParams
from outstride.errors import IntegrityError, InvalidParams, OutstrideError
from outstride.llm import LLM
from outstride.results import Stats


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
    alone = min(alone, len(prompts)) if batch > 1 else 0  # in batches of one they are alone already
    trial = _trial(llm, llm.method(method), prompts, params, batch, alone, raw)
    trial.progress = progress
    count, loose = len(prompts), _by_distribution(trial.judged, params)
    trial.total = 2 * count if loose else (4 if mixed else 2) * count + 2 * trial.report.alone
    trial.tick(0)
    if loose:
        _by_chance(trial)
    else:
        companies.in_batches(trial)
        companies.alone(trial)
        if mixed and trial.report.answered:
            companies.in_company(trial)
    return _closed(trial)


def _by_distribution(judged: Method, params: SamplingParams) -> bool:
    """Whether a method is held to a distribution; at temperature 0 its text is certain."""
    return judged.exactness is Exactness.DISTRIBUTION and params.temperature > 0


def _trial(
    llm: LLM,
    judged: Method,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    batch: int,
    alone: int,
    raw: bool,
) -> Trial:
    """All that a proof begins with."""
    baseline, loose = baseline_of(judged), _by_distribution(judged, params)
    if loose and baseline != PLAIN:
        raise InvalidParams(
            f"{judged.name} promises a distribution on a canvas, and there is no test for that here"
        )
    report = ProofReport(
        method=judged.spec or judged.name,
        exactness=judged.exactness,
        baseline=baseline,
        params=params,
        batch=batch,
        alone=0 if loose else alone,
        cases=[ProofCase(prompt) for prompt in prompts],
    )
    return Trial(
        llm=llm,
        judged=judged,
        plain=llm.method(baseline),
        tokens=[llm.encode(prompt.text, chat=not raw) for prompt in prompts],
        params=params,
        report=report,
    )


def _closed(trial: Trial) -> ProofReport:
    """The report, after a look at what the engine was left with."""
    report = trial.report
    try:
        trial.llm.engine.check_integrity()
    except IntegrityError as error:
        report.integrity = str(error)
    if not report.answered:
        raise OutstrideError(f"no prompt could be answered: {report.cases[0].error}")
    return report


def _by_chance(trial: Trial) -> None:
    """Draws answers in batches and asks whether their tokens follow the target's distributions."""
    texts: list[list[chance.Numbers]] = []
    tops: list[chance.Numbers] = []
    seed = trial.params.seed or 0
    for chunk in batches(len(trial.tokens), trial.report.batch):
        group = [trial.tokens[i] for i in chunk]
        results = trial.answers(group, [trial.judged] * len(group), "prove", bits=False)
        trial.tick(len(chunk))
        for i, result in zip(chunk, results, strict=True):
            case = trial.report.cases[i]
            if result.error is not None:
                _blame(trial, i, result.error)
            else:
                case.stats = Stats.total(result.outputs)
                case.tokens = case.stats.emitted
                said = [output.token_ids for output in result.outputs]
                places, best = look.weigh(
                    trial.llm, trial.tokens[i], said, trial.params, seed + 7919 * i
                )
                texts.append(places)
                tops.append(best)
            trial.tick(1)
    trial.report.chance = chance.judge(texts)
    chance.foresee(trial.report.chance, np.concatenate([np.zeros(0), *tops]))


def _blame(trial: Trial, i: int, error: Exception) -> None:
    """Whether plain decoding fails on a prompt, too, decides whose fault it is."""
    case = trial.report.cases[i]
    [plain] = trial.answers([trial.tokens[i]], [trial.plain], "prove", bits=False)
    if plain.error is not None:
        case.error = str(error)
    else:
        case.equal = False
        case.failure = f"only {trial.report.method} failed: {error}"
