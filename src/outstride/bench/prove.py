"""Compares a method with plain decoding, token for token, on prompts of the user's choice.

An exact method gives the tokens of plain decoding, alone or in any batch. All prompts run in batches
under both, some of them again one by one, and all of them once more in a batch with other methods,
on so few pages that requests are preempted. Besides tokens, log-probabilities are compared bit for
bit: arithmetic that depends on the batch shows there long before it changes a token. Where two
answers diverge, one more pass over their common prefix shows how close the two tokens were.

A method that is exact in distribution is tested for that instead (`bench.chi_square`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from outstride.bench import batch_contexts, chi_square, logits_inspection
from outstride.bench.prompts import BenchPrompt
from outstride.bench.proof import ProofCase, ProofReport
from outstride.bench.proof_state import PLAIN, ProofRun, baseline_of, batches
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
    """Runs all prompts under plain and under `method` and compares the answers.

    A method for masked models is compared with the schedule of `steps` that it is exact to. A method
    that is exact in distribution is tested for its distribution, except at temperature 0, where its
    text is determined.

    Sampling without a seed cannot be compared, so seed 0 is used then. Prompts that neither can
    answer (too long for the context) are listed and prove nothing.
    """
    if batch < 1 or alone < 0:
        raise InvalidParams("batch must be at least 1 and alone at least 0")
    if not prompts:
        raise InvalidParams("there are no prompts to test")
    params = params or SamplingParams()
    if params.seed is None:
        params = replace(params, seed=0)
    alone = min(alone, len(prompts)) if batch > 1 else 0  # in batches of one they are alone already
    proof = _start(llm, llm.method(method), prompts, params, batch, alone, raw)
    proof.progress = progress
    count, by_distribution = len(prompts), _by_distribution(proof.judged, params)
    proof.total = (
        2 * count if by_distribution else (4 if mixed else 2) * count + 2 * proof.report.alone
    )
    proof.tick(0)
    if by_distribution:
        _test_distribution(proof)
    else:
        batch_contexts.in_batches(proof)
        batch_contexts.alone(proof)
        if mixed and proof.report.answered:
            batch_contexts.among_other_methods(proof)
    return _closed(proof)


def _by_distribution(judged: Method, params: SamplingParams) -> bool:
    """Whether a method is tested for its distribution; at temperature 0 its text is determined."""
    return judged.exactness is Exactness.DISTRIBUTION and params.temperature > 0


def _start(
    llm: LLM,
    judged: Method,
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    batch: int,
    alone: int,
    raw: bool,
) -> ProofRun:
    """The initial state of a proof."""
    baseline, by_distribution = baseline_of(judged), _by_distribution(judged, params)
    if by_distribution and baseline != PLAIN:
        raise InvalidParams(
            f"{judged.name} is exact in distribution on a canvas; there is no test for that"
        )
    report = ProofReport(
        method=judged.spec or judged.name,
        exactness=judged.exactness,
        baseline=baseline,
        params=params,
        batch=batch,
        alone=0 if by_distribution else alone,
        rounding=not row_invariant(llm.model),
        cases=[ProofCase(prompt) for prompt in prompts],
    )
    return ProofRun(
        llm=llm,
        judged=judged,
        plain=llm.method(baseline),
        tokens=[llm.encode(prompt.text, chat=not raw) for prompt in prompts],
        params=params,
        report=report,
    )


def row_invariant(model: object) -> bool:
    """Whether the bits of a row depend on that row alone, as far as the model says."""
    return bool(getattr(getattr(model, "ops", None), "row_invariant", True))


def _closed(proof: ProofRun) -> ProofReport:
    """The report, after a check of the cache's integrity."""
    report = proof.report
    try:
        proof.llm.engine.check_integrity()
    except IntegrityError as error:
        report.integrity = str(error)
    if not report.answered:
        raise OutstrideError(f"no prompt could be answered: {report.cases[0].error}")
    return report


def _test_distribution(proof: ProofRun) -> None:
    """Samples answers in batches and tests whether their tokens follow the target's distributions."""
    texts: list[list[chi_square.Numbers]] = []
    tops: list[chi_square.Numbers] = []
    seed = proof.params.seed or 0
    for chunk in batches(len(proof.tokens), proof.report.batch):
        group = [proof.tokens[i] for i in chunk]
        results = proof.answers(group, [proof.judged] * len(group), "prove", bits=False)
        proof.tick(len(chunk))
        for i, result in zip(chunk, results, strict=True):
            case = proof.report.cases[i]
            if result.error is not None:
                _record_failure(proof, i, result.error)
            else:
                case.stats = Stats.total(result.outputs)
                case.tokens = case.stats.emitted
                tokens = [output.token_ids for output in result.outputs]
                places, best = logits_inspection.rank_positions(
                    proof.llm, proof.tokens[i], tokens, proof.params, seed + 7919 * i
                )
                texts.append(places)
                tops.append(best)
            proof.tick(1)
    proof.report.distribution = chi_square.run_tests(texts)
    chi_square.estimate_power(proof.report.distribution, np.concatenate([np.zeros(0), *tops]))


def _record_failure(proof: ProofRun, i: int, error: Exception) -> None:
    """Records an error: as a failure of the method if plain decoding can answer the prompt."""
    case = proof.report.cases[i]
    [plain] = proof.answers([proof.tokens[i]], [proof.plain], "prove", bits=False)
    if plain.error is not None:
        case.error = str(error)
    else:
        case.equal = False
        case.failure = f"only {proof.report.method} failed: {error}"
