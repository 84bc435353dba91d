"""Every registered method keeps the promise that it declares."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from outstride import registry
from outstride.core.contracts import Exactness, Method
from outstride.core.params import SamplingParams
from outstride.core.sampling import Purpose, probabilities
from outstride.engine.rules import draw_of
from tests.conformance.harness import PLAIN, SAMPLINGS, Bench, alone, some_prompts, spell

VARIANTS = {
    "plain": ["plain"],
    "ngram": ["ngram", "ngram:length=3,longest=2", "ngram:length=12,longest=6,shortest=2"],
    "draft": [
        "draft:model=draft",
        "draft:model=draft,length=1",
        "draft:model=draft,length=3,width=2",
        "draft:model=draft,length=5,width=4",
    ],
    "rejection": ["rejection:model=draft", "rejection:model=draft,length=2"],
}
"""Each method with options that matter; a method that is missing here is tried with none."""


def variants(exactness: Exactness) -> list[str]:
    specs: list[str] = []
    for entry in registry.entries():
        if entry.exactness is exactness:
            specs += VARIANTS.get(entry.name, [entry.name])
    return specs


EXACT = variants(Exactness.EXACT)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("spec", EXACT)
def test_exact_methods_equal_plain(spec: str, sampling: str) -> None:
    params, prompts = SAMPLINGS[sampling], some_prompts(1, 6)
    expected = [alone(prompt, params) for prompt in prompts]
    for bench in (Bench(), Bench(nodes=7), Bench(pages=26, nodes=24)):
        found = bench.run(prompts, registry.build(spec), params)
        assert [s.output for s in found] == expected
        for sequence in found:
            assert sequence.counts.emitted == len(sequence.output) == len(sequence.trace)
            assert [p.token for p in sequence.trace] == sequence.output


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("spec", [s for s in EXACT if s != "plain"])
def test_exact_methods_save_passes(spec: str, sampling: str) -> None:
    """A method that never accepts anything would pass the test of equality."""
    bench = Bench()
    found = bench.run(some_prompts(4, 12), registry.build(spec), SAMPLINGS[sampling])
    assert sum(s.counts.accepted for s in found) > 0
    assert sum(s.counts.passes for s in found) < sum(s.counts.emitted for s in found)


@pytest.mark.parametrize("seed", range(6))
def test_mixed_company(seed: int) -> None:
    """All methods and all kinds of requests in one batch: each says what it says alone."""
    rng = random.Random(seed)
    prompts = some_prompts(seed, 14)
    names = rng.choices(list(SAMPLINGS), k=len(prompts))
    params = [SAMPLINGS[name] for name in names]
    specs = [rng.choice(EXACT) for _ in prompts]
    bench = Bench(pages=rng.choice([40, 96, 200]), nodes=rng.choice([16, 64]))
    found = bench.run(prompts, [registry.build(s) for s in specs], params)
    for sequence, prompt, its_params in zip(found, prompts, params, strict=True):
        assert sequence.output == alone(prompt, its_params)


@pytest.mark.parametrize("spec", EXACT)
def test_stop_string_inside_an_accepted_run(spec: str) -> None:
    """The text ends before the stop string, wherever in a run it falls."""
    cut_inside, least = 0, 15
    for seed, prompt in enumerate(some_prompts(9, 24)):
        free = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True, min_tokens=least)
        whole = spell(alone(prompt, free))
        stop = whole[20:22]
        at = min(i for i in range(20, -1, -1) if whole[i : i + 2] == stop and i + 2 >= least)
        bench = Bench()
        [sequence] = bench.run([prompt], registry.build(spec), replace(free, stop=(stop,)))
        assert sequence.finish_reason == "stop"
        assert bench.texts[sequence.id] == whole[:at]
        assert spell(sequence.output) == whole[: at + 2]
        steps = [p.step for p in sequence.trace]
        cut_inside += steps.count(steps[-1]) > 1
    assert spec == "plain" or cut_inside > 0


@pytest.mark.parametrize("spec", EXACT + variants(Exactness.DISTRIBUTION))
def test_logprobs_are_those_of_the_raw_logits(spec: str) -> None:
    params = SamplingParams(
        max_tokens=20,
        temperature=0.9,
        top_k=5,
        seed=4,
        logprobs=3,
        prompt_logprobs=2,
        frequency_penalty=0.5,
    )
    for prompt in some_prompts(3, 5):
        [sequence] = Bench(nodes=8).run([prompt], registry.build(spec), params)
        tokens = sequence.tokens
        score = SamplingParams(max_tokens=1, prompt_logprobs=3)
        [oracle] = Bench().run([[*tokens, 1]], PLAIN, score)
        for position in range(1, len(tokens)):
            expected = oracle.prompt_logprobs[position]
            if position < len(prompt):
                assert sequence.prompt_logprobs[position] == expected[:3]
            else:
                assert sequence.logprobs[position] == expected
                assert sequence.logprobs[position][0][0] == tokens[position]


@pytest.mark.parametrize("spec", EXACT)
def test_n_samples_are_n_requests(spec: str) -> None:
    """Samples share the prompt's pages and differ by their index; greedy ones do not differ."""
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=21, n=4)
    prompt = some_prompts(5, 1, most=60)[0]
    outputs = []
    for method in (PLAIN, registry.build(spec)):
        bench = Bench()
        [first] = bench.run([prompt], method, params)
        outputs.append([s.output for s in sorted(first.group, key=lambda s: s.index)])
    assert len(outputs[0]) == 4
    assert len({tuple(o) for o in outputs[0]}) == 4
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == alone(prompt, SamplingParams(max_tokens=30, temperature=0.9, seed=21))


def exact_distribution(
    bench: Bench, prompt: list[int], params: SamplingParams, depth: int
) -> dict[tuple[int, ...], float]:
    """The true distribution over the first `depth` tokens, from plain's own logits."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        longer: dict[tuple[int, ...], float] = {}
        for path, chance in found.items():
            tokens = np.asarray([*prompt, *path])
            state = toy_state(bench, tokens)
            row = bench.target.logits(tokens[-1:], state)[0]
            draw = draw_of(params, 0, 0, Purpose.TOKEN)
            for token, p in enumerate(probabilities(row, draw)):
                if p > 0:
                    longer[(*path, token)] = chance * float(p)
        found = longer
    return found


def toy_state(
    bench: Bench, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    from outstride.core.contracts import Work
    from outstride.core.graph import chain
    from outstride.core.proposal import Proposal, Wants
    from outstride.core.sequence import Table

    table = Table(pages=list(range(bench.target.pages)))
    proposal = Proposal(chain(tokens), len(tokens), wants=Wants(hidden=(2,)))
    work = Work(proposal, table, np.arange(len(tokens)))
    [scores] = bench.target.forward([work]).wait()
    return np.ascontiguousarray(scores.hidden[2][-1:]).view(np.uint64).reshape(-1)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("spec", variants(Exactness.DISTRIBUTION))
def test_distribution_methods_sample_the_same_distribution(spec: str, top_p: float) -> None:
    """Chi-square over the first two tokens of many seeds."""
    trials, prompt = 6000, [3, 5, 3]
    params = SamplingParams(max_tokens=3, temperature=1.0, top_p=top_p, ignore_eos=True, seed=0)
    expected = exact_distribution(Bench(), prompt, params, 2)
    counts = dict.fromkeys(expected, 0)
    method = registry.build(spec)
    accepted = 0
    for start in range(0, trials, 60):
        bench = Bench(pages=300, nodes=512)
        seeded = [
            SamplingParams(
                max_tokens=3, temperature=1.0, top_p=top_p, ignore_eos=True, seed=start + i
            )
            for i in range(60)
        ]
        for sequence in bench.run([prompt] * 60, method, seeded):
            counts[tuple(sequence.output[:2])] += 1
            accepted += sequence.counts.accepted
    assert accepted > trials / 10
    assert chi_square(counts, expected, trials) > 1e-3


def chi_square(
    counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float], trials: int
) -> float:
    """The chance of a deviation at least this large; rare outcomes are pooled."""
    rare_seen, rare_due, statistic, cells = 0, 0.0, 0.0, 0
    for key, p in expected.items():
        due = p * trials
        if due < 8:
            rare_seen, rare_due = rare_seen + counts[key], rare_due + due
            continue
        statistic += (counts[key] - due) ** 2 / due
        cells += 1
    if rare_due >= 8:
        statistic += (rare_seen - rare_due) ** 2 / rare_due
        cells += 1
    half = torch.tensor((cells - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def test_chi_square_notices_a_bias() -> None:
    expected: dict[tuple[int, ...], float] = {(i,): 0.25 for i in range(4)}
    fair = dict(zip(expected, (250, 260, 240, 250), strict=True))
    skewed = dict(zip(expected, (310, 240, 240, 210), strict=True))
    assert chi_square(fair, expected, 1000) > 0.5
    assert chi_square(skewed, expected, 1000) < 1e-3


def test_rejection_reduces_to_equality_when_greedy() -> None:
    for prompt in some_prompts(2, 8):
        for spec in variants(Exactness.DISTRIBUTION):
            params = SAMPLINGS["greedy"]
            assert alone(prompt, params, registry.build(spec)) == alone(prompt, params)


def test_methods_are_built_from_text() -> None:
    for spec in EXACT:
        method = registry.build(spec)
        assert isinstance(method, Method)
        assert method.spec == spec
