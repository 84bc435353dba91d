"""Random arrivals, lengths, methods and cancels on too few pages: nothing lost, nothing doubled."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence, Status
from tests.conformance.harness import SAMPLINGS, Bench, alone, some_prompts

SPECS = ["plain", "ngram", "draft:model=draft", "draft:model=draft,length=3,width=3"]


@settings(max_examples=25, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    seed=st.integers(0, 10**6),
    pages=st.integers(26, 80),
    draft_pages=st.integers(4, 80),
    nodes=st.integers(1, 48),
    sequences=st.integers(1, 12),
)
def test_random_batches(
    seed: int, pages: int, draft_pages: int, nodes: int, sequences: int
) -> None:
    rng = random.Random(seed)
    bench = Bench(pages=pages, draft_pages=draft_pages, nodes=nodes, sequences=sequences)
    live: list[tuple[Sequence, list[int], SamplingParams]] = []
    cancelled: set[int] = set()
    for i in range(rng.randrange(4, 16)):
        [prompt] = some_prompts(seed + i, 1)
        params = replace(SAMPLINGS[rng.choice(list(SAMPLINGS))], seed=i, n=rng.choice([1, 1, 1, 3]))
        sequence = bench.engine.submit(prompt, params, registry.build(rng.choice(SPECS)))
        live.append((sequence, prompt, params))
        for _ in range(rng.randrange(6)):
            bench.step()
        if rng.random() < 0.2:
            victim = rng.choice(live)[0]
            if victim.status is not Status.FINISHED:
                bench.engine.cancel(victim)
                cancelled.add(victim.id)
    bench.finish()
    for leader, prompt, params in live:
        for sequence in leader.group:
            assert sequence.error is None
            assert sequence.status is Status.FINISHED
            assert bench.tokens.get(sequence.id, []) == sequence.output
        if leader.id in cancelled:
            assert leader.finish_reason == "cancelled"
            assert leader.output == alone(prompt, replace(params, n=1))[: len(leader.output)]
            continue
        assert len(leader.group) == params.n
        assert leader.output == alone(prompt, replace(params, n=1))
    pool = bench.engine.pool()
    assert pool.available == pool.pages, "a finished engine holds no page but idle prefixes"


@pytest.mark.parametrize("nodes", [8, 16, 32])
def test_running_requests_do_not_wait_for_a_long_prompt(nodes: int) -> None:
    bench = Bench(pages=200, nodes=nodes)
    params = replace(SAMPLINGS["endless"], max_tokens=40)
    early = [bench.engine.submit(p, params, registry.build("ngram")) for p in some_prompts(3, 4, 5)]
    for _ in range(12):
        bench.step()
    late = bench.engine.submit([1 + i % 23 for i in range(400)], params, registry.build("plain"))
    while any(s.status is not Status.FINISHED for s in early):
        before = [len(s.output) for s in early]
        reading = len(late.output) == 0
        bench.step()
        for sequence, length in zip(early, before, strict=True):
            if sequence.status is not Status.FINISHED:
                assert len(sequence.output) > length, "everybody moves in every pass"
        assert reading or late.counts.prompt_passes > 1
    bench.finish()
    assert late.output == alone([1 + i % 23 for i in range(400)], params, pages=200)


def test_a_second_request_computes_only_new_tokens() -> None:
    bench = Bench(pages=200)
    prompt = [1 + i % 23 for i in range(90)]
    params = SAMPLINGS["greedy"]
    [first] = bench.run([prompt], registry.build("plain"), params)
    [second] = bench.run([prompt], registry.build("ngram"), params)
    [third] = bench.run([[*prompt, *first.output, 5]], registry.build("plain"), params)
    assert first.counts.reused == 0
    assert second.counts.reused == 88
    assert third.counts.reused >= 88 + len(first.output) // 4 * 4 - 4
    assert second.output == first.output


def test_evicted_prefixes_are_computed_again() -> None:
    bench = Bench(pages=40)
    params = SAMPLINGS["greedy"]
    for round_ in range(3):
        for prompt in some_prompts(7, 12):
            [sequence] = bench.run([prompt], registry.build("ngram"), params)
            assert sequence.output == alone(prompt, params), f"round {round_}"
