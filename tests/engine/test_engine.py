"""The engine: errors stay with their request, bad input is rejected, counts are right."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.accept.match import Match
from outstride.core.contracts import Drafter, Rounds
from outstride.core.graph import BoolArray, chain
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import Status, View
from outstride.engine.engine import Engine
from outstride.engine.scheduler import Limits
from outstride.errors import (
    InvalidGrammar,
    InvalidParams,
    InvalidPrompt,
    MethodFailed,
    OutOfMemory,
    RequestError,
    UnknownMethod,
)
from outstride.models.toy import Toy
from tests.conformance.harness import PLAIN, SAMPLINGS, Bench, alone, some_prompts, toy_method


class Breaks(Drafter):
    """Fails in a chosen verb after a few steps."""

    def __init__(self, where: str) -> None:
        self.where = where
        if where == "models":
            self.models = ("draft",)

    def _maybe(self, view: View, where: str) -> None:
        if self.where == where and view.steps >= 3:
            raise RuntimeError(f"broken in {where}")

    def demand(self, view: View) -> Any:
        self._maybe(view, "demand")
        return super().demand(view)

    def propose(self, view: View, room: int) -> Rounds:
        self._maybe(view, "propose")
        given = view.given()
        if self.where == "greedy for room" and view.steps >= 3:
            return Proposal(given.grow(chain([1, 2, 3], view.end)), len(given))
        if self.where == "unknown model" and view.steps >= 3:
            yield Proposal(given, len(given), "nobody")
        if self.where == "rewrites" and view.steps >= 3:
            yield Proposal(given, len(given), layers=(0, 1))
            return Proposal(chain([9] * len(given), 3), len(given))
        return Proposal(given, len(given))

    def draft_ahead(self, view: View, proposal: Proposal) -> Any:
        self._maybe(view, "ahead")

    def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Any:
        self._maybe(view, "observe")


class BreaksAccepting(Match):
    def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
        if view.steps >= 3:
            raise RuntimeError("broken in accept")
        return super().accept(view, proposal, scores)


@pytest.mark.parametrize(
    "where",
    [
        "demand",
        "propose",
        "greedy for room",
        "unknown model",
        "rewrites",
        "ahead",
        "observe",
        "accept",
    ],
)
def test_a_broken_method_ends_its_own_request_only(where: str) -> None:
    bench, prompts, params = Bench(), some_prompts(1, 5), SAMPLINGS["endless"]
    acceptor = BreaksAccepting() if where == "accept" else Match()
    broken = toy_method(Breaks(where), acceptor)
    sequences = [
        bench.engine.submit(p, params, broken if i == 2 else registry.build("ngram"))
        for i, p in enumerate(prompts)
    ]
    bench.finish()
    for i, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        expected = alone(prompt, params)
        if i == 2:
            assert sequence.finish_reason == "error"
            assert isinstance(sequence.error, MethodFailed)
            assert sequence.output == expected[: len(sequence.output)]
        else:
            assert sequence.output == expected
    pool = bench.engine.pool()
    assert pool.available == pool.pages


@pytest.mark.parametrize(
    ("tokens", "params", "error", "words"),
    [
        ([], {}, InvalidPrompt, "empty"),
        ([1, 99], {}, InvalidPrompt, "token id 99"),
        ([1, -1], {}, InvalidPrompt, "token id -1"),
        ([1] * 512, {}, InvalidPrompt, "512 tokens"),
        ([1], {"logit_bias": {24: 1.0}}, InvalidParams, "logit_bias names token id 24"),
        ([1], {"logit_bias": {-1: 1.0}}, InvalidParams, "logit_bias names token id -1"),
        ([1], {"stop_token_ids": (99,)}, InvalidParams, "stop_token_ids names token id 99"),
        ([1], {"logit_bias": dict.fromkeys(range(24), -math.inf)}, InvalidParams, "every token"),
        ([1] * 300, {"max_tokens": 100}, OutOfMemory, "400 slots of the KV cache"),
    ],
)
def test_bad_requests_are_rejected(
    tokens: list[int], params: dict[str, Any], error: type[RequestError], words: str
) -> None:
    bench = Bench()
    running = bench.engine.submit([1, 2, 3], SAMPLINGS["greedy"], PLAIN)
    bench.step()
    with pytest.raises(error, match=words):
        bench.engine.submit(tokens, SamplingParams(**params), PLAIN)
    bench.finish()
    assert running.output == alone([1, 2, 3], SAMPLINGS["greedy"])


def test_a_model_that_is_not_loaded_is_named() -> None:
    with pytest.raises(UnknownMethod, match="elsewhere"):
        Bench().engine.submit([1], SamplingParams(), registry.build("draft:model=elsewhere"))


def test_the_context_bounds_the_answer() -> None:
    bench = Bench(pages=200)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    [sequence] = bench.run([[1] * 500], registry.build("ngram"), params)
    assert sequence.finish_reason == "length"
    assert len(sequence.tokens) == 512


def test_cancel_at_any_moment_frees_the_pages() -> None:
    for steps in range(8):
        bench = Bench(nodes=8)
        params = replace(SAMPLINGS["endless"], n=3, temperature=0.9)
        leader = bench.engine.submit([1] * 20, params, registry.build("draft:model=draft"))
        other = bench.engine.submit([2] * 9, SAMPLINGS["greedy"], PLAIN)
        for _ in range(steps):
            bench.step()
        for sequence in list(leader.group):
            bench.engine.cancel(sequence)
        assert all(s.status is Status.FINISHED and not s.tables for s in leader.group)
        bench.finish()
        assert other.output == alone([2] * 9, SAMPLINGS["greedy"])


def test_the_ledger_counts_everything_once() -> None:
    bench = Bench(nodes=16)
    prompts = some_prompts(5, 6)
    found = bench.run(prompts, registry.build("ngram"), SAMPLINGS["endless"])
    total = bench.engine.gauges().totals
    for name in ("passes", "prompt_passes", "proposed", "accepted", "emitted"):
        assert getattr(total, name) == sum(getattr(s.counts, name) for s in found)
    for sequence in found:
        counts, kinds = sequence.counts, [p.kind for p in sequence.trace]
        assert counts.emitted == 50
        assert counts.accepted == kinds.count("drafted")
        assert counts.emitted == counts.accepted + counts.passes
        assert counts.prompt_passes >= len(sequence.tokens[: sequence.prompt_length]) // 16 - 1
        assert len({p.step for p in sequence.trace}) == counts.passes
    assert set(bench.engine.gauges().seconds) == {"plan", "propose", "forward", "accept", "commit"}


def test_rounds_are_shared_by_all_drafting_sequences() -> None:
    """Sixteen drafting sequences cost one pass of the draft model per round."""
    bench = Bench(pages=400, nodes=512)
    method = registry.build("draft:model=draft,length=4")
    bench.run([[1, 2, 3]] * 16, method, SAMPLINGS["endless"])
    gauges = bench.engine.gauges()
    assert gauges.model_passes["draft"] <= 5 * gauges.steps


def test_random_seeds_are_returned() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    first, second = Bench().run([[1], [1]], PLAIN, params)
    assert first.seed != second.seed
    assert first.output == alone([1], replace(params, seed=first.seed))


class DeadEnd:
    """A grammar that allows no token of the vocabulary after the second one."""

    def allowed(self, output: Seq[int]) -> BoolArray:
        return np.full(Toy().vocab_size, len(output) < 2)


@pytest.mark.parametrize("spec", ["plain", "ngram"])
def test_a_grammar_without_a_next_token_ends_its_own_request_only(spec: str) -> None:
    engine = Engine({"target": Toy()}, limits=Limits(nodes=64))
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    stuck = engine.submit([3, 4], params, registry.build(spec), grammar=DeadEnd())
    free = engine.submit([3, 4], params, registry.build(spec))
    while engine.busy:
        engine.step()
        engine.check_integrity()
    assert isinstance(stuck.error, InvalidGrammar)
    assert len(stuck.output) == 2
    assert free.error is None
    assert len(free.output) == 8
