"""The batch contexts of a proof: in batches of the same method, alone, and among other methods on
few pages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from outstride import registry
from outstride.bench.first_divergence import compare
from outstride.bench.proof import ALONE, BATCH, MIXED, MixedBatch
from outstride.bench.proof_state import PLAIN, ProofRun, batches
from outstride.core.contracts import Exactness, Method
from outstride.core.sequence import BlockTable
from outstride.engine.engine import Engine
from outstride.results import Stats


def in_batches(proof: ProofRun) -> None:
    """Runs all prompts under plain decoding, then under the method, which finds the prefixes of the
    first run.

    Only the reference asks for log-probabilities, so both code paths of a pass are used.
    """
    count, size, batch = len(proof.tokens), proof.report.batch, "prove"
    for chunk in batches(count, size):
        group = [proof.tokens[i] for i in chunk]
        plain = proof.answers(group, [proof.plain] * len(group), batch, bits=True)
        proof.references.update(zip(chunk, plain, strict=True))
        proof.tick(len(chunk))
        judged = proof.answers(group, [proof.judged] * len(group), batch, bits=False)
        for i, result in zip(chunk, judged, strict=True):
            case = proof.report.cases[i]
            compare(proof, i, result, proof.report.method, BATCH)
            if case.error is None and case.failure is None:
                case.stats = Stats.total(result.outputs)
                case.plain_stats = Stats.total(proof.references[i].outputs)
                case.tokens = case.stats.emitted
        proof.tick(len(chunk))


def alone(proof: ProofRun) -> None:
    """Runs the first prompts one by one under both, each with a prefill of its own."""
    for i in range(proof.report.alone):
        if proof.report.cases[i].error is None:
            pairs = (
                (proof.plain, proof.report.baseline, False),
                (proof.judged, proof.report.method, True),
            )
            for method, name, bits in pairs:
                salt = f"prove alone {name}"
                [result] = proof.answers([proof.tokens[i]], [method], salt, bits=bits)
                compare(proof, i, result, name, ALONE)
        proof.tick(2)


def among_other_methods(proof: ProofRun) -> None:
    """Runs every prompt in a batch with requests of other methods, on too few pages for all of them."""
    others = _other_methods(proof)
    mixed = proof.report.mixed = MixedBatch(tuple(name for name, _ in others))
    place = 0
    for chunk in batches(len(proof.tokens), proof.report.batch):
        answerable = [i for i in chunk if proof.report.cases[i].error is None]
        methods, names = [proof.judged] * len(answerable), [proof.report.method] * len(answerable)
        neighbours = answerable[1:] + answerable[:1]
        for _ in neighbours:
            name, method = others[place % len(others)]
            place += 1
            methods.append(method)
            names.append(name)
        prompts = [proof.tokens[i] for i in answerable + neighbours]
        if prompts:
            with _few_pages(proof, answerable + neighbours) as pages:
                results = proof.answers(prompts, methods, f"prove mixed {place}", bits=proof.exact)
            mixed.pages = max(mixed.pages, pages)
            for i, name, result in zip(answerable + neighbours, names, results, strict=True):
                compare(proof, i, result, name, MIXED)
                mixed.preempted += Stats.total(result.outputs).preempted
        proof.tick(2 * len(chunk))


def _other_methods(proof: ProofRun) -> list[tuple[str, Method]]:
    """Methods for the other requests of a batch: plain, and all exact methods of the same baseline.

    Methods that need something besides the model, and those that time passes first, are left out.
    """
    model, found = proof.llm.model, [(proof.report.baseline, proof.plain)]
    for entry in registry.entries():
        required = any(option.required for option in entry.options)
        if entry.exactness is not Exactness.EXACT or required or entry.drafter.cost_aware:
            continue
        if registry.baseline(entry.name) != proof.report.baseline:
            continue
        if entry.name in (proof.report.baseline, proof.report.method):
            continue
        method = registry.build(entry.name)
        fits = method.drafter.unsupported_reason(model.attention_pattern, model.masked_spec) is None
        if method.drafter.layer_ranges and _runs_as_a_whole(model):
            continue
        if fits and (not entry.needs or entry.exact_to != PLAIN):
            found.append((entry.name, method))
    return found


def _runs_as_a_whole(model: object) -> bool:
    """Whether a model runs all its layers or none: through transformers, or with recurrent layers."""
    return bool(getattr(model, "whole_passes", False) or getattr(model, "state_spec", None))


@contextmanager
def _few_pages(proof: ProofRun, places: Sequence[int]) -> Iterator[int]:
    """Reserves pages until a third of what the requests will fill is left; yields the number left.

    The largest request alone still fits; otherwise no request could finish.
    """
    engine, pattern = proof.llm.engine, proof.llm.model.attention_pattern
    pool = engine.pool()
    _wait_until_idle(engine)
    largest, filled, max_output = 0, 0, min(proof.params.max_tokens, proof.llm.model.context)
    for i in places:
        prompt = len(proof.tokens[i])
        needed = proof.judged.drafter.kv_needed(prompt + max_output, pattern)
        largest = max(largest, pool.pages_for(needed) + 2)
        for output in proof.references[i].outputs:
            filled += pool.pages_for(prompt + len(output.token_ids))
    left = max(largest, filled // 3)
    ballast = BlockTable()
    if pool.available > left:
        pool.reserve(ballast, (pool.available - left) * pool.page_size)
    try:
        yield pool.available
    finally:
        _wait_until_idle(engine)
        pool.close(ballast)


def _wait_until_idle(engine: Engine) -> None:
    """Waits until the engine has recorded its last step."""
    while engine.busy:
        time.sleep(0.001)
