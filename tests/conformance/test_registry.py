"""Every registered method keeps the exactness that it declares."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.accept.match import Match
from outstride.core.contracts import Exactness, Method
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.core.sampling import Purpose, probabilities
from outstride.engine.logits_processors import sampling_spec
from outstride.errors import UnknownMethod
from tests.accept.chi_square import p_value
from tests.conformance.harness import (
    END,
    PLAIN,
    SAMPLINGS,
    Bench,
    alone,
    some_prompts,
    to_text,
    yardstick,
)

VARIANTS = {
    "plain": ["plain"],
    "ngram": [
        "ngram",
        "ngram:length=3,longest=2",
        "ngram:length=12,longest=6,shortest=2",
        "ngram:guided=true",
    ],
    "suffix": ["suffix", "suffix:size=40,branch=4,min_prob=0.01", "suffix:memory=64"],
    "recycle": ["recycle", "recycle:size=6,depth=3"],
    "trigram": ["trigram", "trigram:size=30,explore=1.5", "trigram:explore=0,contexts=20"],
    "lookahead": [
        "lookahead",
        "lookahead:window=3,level=3,branches=2",
        "lookahead:window=8,level=2",
        "lookahead:retrieve=true",
        "lookahead:recycle=true,window=4",
    ],
    "consensus": ["consensus", "consensus:size=3,length=2"],
    "early-exit": ["early-exit", "early-exit:layer=1,length=3"],
    "prune": ["prune:of=recycle:size=14,depth=3,layer=1,keep=4", "prune:of=mix,keep=3"],
    "draft": [
        "draft:model=draft",
        "draft:model=draft,length=1",
        "draft:model=draft,length=3,width=2",
        "draft:model=draft,length=5,width=4",
        "draft:model=draft,length=6,width=3,nodes=9,min_prob=0.05",
    ],
    "pearl": ["pearl:model=draft", "pearl:model=draft,length=3,width=3"],
    "rejection": ["rejection:model=draft"],
    "block-verify": ["block-verify:model=draft"],
    "mcsd": ["mcsd:model=draft,width=2"],
    "spectr": ["spectr:model=draft,width=2"],
    "rsd": ["rsd:model=draft"],
    "typical": ["typical:model=draft", "typical:model=draft,width=1,epsilon=0.5,delta=0.9"],
    "rooted": ["rooted:model=draft", "rooted:model=draft,length=2,width=2"],
    "entropy-switch": ["entropy-switch:model=draft,entropy=2.4"],
    "confident": ["confident:sure=0.2", "confident:length=1,pad=3,sure=0.1"],
    "diffuse": [
        "diffuse:model=blocks",
        "diffuse:model=canvas,length=5,width=3,nodes=9,pair=0.2",
        "diffuse:model=blocks,passes=2,length=6,pair=0",
    ],
    "self-diffuse": ["self-diffuse", "self-diffuse:length=3"],
    "mix": ["mix", "mix:from=block", "mix:from=block,parts=ngram,nodes=5"],
    "auto": ["auto", "auto:from=block"],
    "eagle": ["eagle:from=eagle", "eagle:from=eagle,depth=2,width=1,nodes=3"],
    "block-drafter": ["block-drafter:from=block", "block-drafter:from=block,width=1,nodes=3"],
    "heads": ["heads:from=heads", "heads:from=sequential", "heads:from=sequential,width=1,nodes=3"],
    "accept-head": [
        "accept-head:model=draft,from=accept",
        "accept-head:model=draft,from=accept,length=3,stop=0.6",
    ],
    "judge": ["judge:model=draft,from=judge", "judge:model=draft,from=judge,width=2,sure=0.5"],
    "prompt-tokens": [
        "prompt-tokens:from=prompts",
        "prompt-tokens:from=prompts,nodes=9,min_prob=0",
        "prompt-tokens:from=prompts,nodes=6,min_prob=0.1",
    ],
}
"""Each method with options that matter; a method that is missing here is tried with none. Methods
that fill in masks have tests of their own."""


def variants(exactness: Exactness) -> list[str]:
    specs: list[str] = []
    for entry in registry.entries():
        if entry.exactness is exactness and TARGET not in entry.drafter.masked_models:
            specs += VARIANTS.get(entry.name, [entry.name])
    return specs


EXACT = variants(Exactness.EXACT)


def samples(spec: str) -> int:
    """How many samples a request needs for a method to have something to draft from."""
    return 4 if spec.startswith("consensus") else 1


SMALL: tuple[dict[str, Any], ...] = ({"nodes": 7}, {"pages": 26, "nodes": 24})
"""Limits under which requests wait for each other and are preempted."""


def corners(specs: list[str]) -> list[tuple[str, str]]:
    """Each method with every corner of the request contract; further options of it with every third.

    The outcome of a corner hardly depends on the options, and all corners come up among them.
    """
    names, found, seen = list(SAMPLINGS), [], set[str]()
    for i, spec in enumerate(specs):
        name = spec.partition(":")[0]
        chosen = names[i % 3 :: 3] if name in seen else names
        seen.add(name)
        found += [(spec, sampling) for sampling in chosen]
    return found


@pytest.mark.parametrize(
    ("spec", "sampling", "small"),
    [(*corner, SMALL[i % len(SMALL)]) for i, corner in enumerate(corners(EXACT))],
)
def test_exact_methods_equal_plain(spec: str, sampling: str, small: dict[str, Any]) -> None:
    """With ample space, and with one of the small limits: each method meets both of them."""
    params, prompts = SAMPLINGS[sampling], some_prompts(1, 5)
    expected = [yardstick(prompt, params) for prompt in prompts]
    for bench in (Bench(), Bench(**small)):
        found = bench.run(prompts, registry.build(spec), params)
        assert [s.output for s in found] == expected
        for sequence in found:
            assert sequence.counts.emitted == len(sequence.output) == len(sequence.trace)
            assert [p.token for p in sequence.trace] == sequence.output


@cache
def text_with_adapter(number: int, adapter: str) -> list[int]:
    """The text of plain decoding alone with an adapter."""
    params = replace(SAMPLINGS["sampled"], adapter=adapter)
    return alone(some_prompts(1, 6)[number], params, adapters=("french", "legal"))


@pytest.mark.parametrize("spec", EXACT)
def test_exact_methods_equal_plain_with_adapters(spec: str) -> None:
    """Requests with different LoRA adapters and without one, in one batch, with preemptions."""
    names = ("", "french", "legal", "french", "", "legal")
    prompts = some_prompts(1, 6)
    params = [replace(SAMPLINGS["sampled"], adapter=name) for name in names]
    bench = Bench(adapters=("french", "legal"), pages=120, nodes=40, shake=5)
    found = bench.run(prompts, registry.build(spec), params)
    expected = [text_with_adapter(i, name) for i, name in enumerate(names)]
    assert [sequence.output for sequence in found] == expected


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("spec", [s for s in EXACT if s != "plain"])
def test_exact_methods_save_passes(spec: str, sampling: str) -> None:
    """A method that never accepts anything would pass the test of equality."""
    params = replace(SAMPLINGS[sampling], n=samples(spec))
    leaders = Bench().run(some_prompts(4, 8), registry.build(spec), params)
    found = [sequence for leader in leaders for sequence in leader.group]
    assert sum(s.counts.accepted for s in found) > 0
    assert sum(s.counts.passes for s in found) < sum(s.counts.emitted for s in found)


@pytest.mark.parametrize("seed", range(6))
def test_mixed_batches(seed: int) -> None:
    """All methods and all kinds of requests in one batch: each gives the text that it gives alone."""
    rng = random.Random(seed)
    prompts = some_prompts(seed, 14)
    names = rng.choices(list(SAMPLINGS), k=len(prompts))
    params = [SAMPLINGS[name] for name in names]
    specs = [rng.choice(EXACT) for _ in prompts]
    bench = Bench(pages=rng.choice([40, 96, 200]), nodes=rng.choice([16, 64]))
    found = bench.run(prompts, [registry.build(s) for s in specs], params)
    for sequence, prompt, its_params in zip(found, prompts, params, strict=True):
        assert sequence.output == yardstick(prompt, its_params)


@pytest.mark.parametrize("spec", EXACT)
def test_stop_string_inside_an_accepted_run(spec: str) -> None:
    """The text ends before the stop string, wherever in a run it falls."""
    cut_inside, min_tokens = 0, 15
    for seed, prompt in enumerate(some_prompts(9, 24)):
        free = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True, min_tokens=min_tokens)
        whole = to_text(yardstick(prompt, free))
        stop = whole[20:22]
        at = min(i for i in range(20, -1, -1) if whole[i : i + 2] == stop and i + 2 >= min_tokens)
        bench = Bench()
        params = replace(free, stop=(stop,), n=samples(spec))
        for sequence in bench.run([prompt], registry.build(spec), params)[0].group:
            assert sequence.finish_reason == "stop"
            assert bench.texts[sequence.id] == whole[:at]
            assert to_text(sequence.output) == whole[: at + 2]
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
    prompts, score = some_prompts(3, 4), SamplingParams(max_tokens=1, prompt_logprobs=3)
    found = Bench(nodes=8).run(prompts, registry.build(spec), params)
    oracles = Bench().run([[*sequence.tokens, 1] for sequence in found], PLAIN, score)
    for prompt, sequence, oracle in zip(prompts, found, oracles, strict=True):
        tokens = sequence.tokens
        for position in range(1, len(tokens)):
            expected = oracle.prompt_logprobs[position]
            if position < len(prompt):
                assert sequence.prompt_logprobs[position] == expected[:3]
            else:
                assert sequence.logprobs[position] == expected
                assert sequence.logprobs[position][0][0] == tokens[position]


FOUR = SamplingParams(max_tokens=30, temperature=0.9, seed=21, n=4)


@cache
def yardstick_samples() -> list[list[int]]:
    """The samples of plain decoding, in order; computed once."""
    [first] = Bench().run(some_prompts(5, 1, max_length=60), PLAIN, FOUR)
    return [s.output for s in sorted(first.group, key=lambda s: s.index)]


@pytest.mark.parametrize("spec", EXACT)
def test_n_samples_are_n_requests(spec: str) -> None:
    """Samples share the prompt's pages and differ by their index."""
    [prompt], expected = some_prompts(5, 1, max_length=60), yardstick_samples()
    assert len({tuple(output) for output in expected}) == 4
    assert expected[0] == yardstick(prompt, replace(FOUR, n=1))
    [first] = Bench().run([prompt], registry.build(spec), FOUR)
    assert [s.output for s in sorted(first.group, key=lambda s: s.index)] == expected


def exact_distribution(
    bench: Bench, prompt: list[int], params: SamplingParams, depth: int
) -> dict[tuple[int, ...], float]:
    """The true distribution over the first `depth` tokens, from plain's own logits."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        longer: dict[tuple[int, ...], float] = {}
        for path, probability in found.items():
            tokens = np.asarray([*prompt, *path])
            state = toy_state(bench, tokens)
            row = bench.target.logits(tokens[-1:], state)[0]
            draw = sampling_spec(params, 0, 0, Purpose.TOKEN)
            for token, p in enumerate(probabilities(row, draw)):
                if p > 0:
                    longer[(*path, token)] = probability * float(p)
        found = longer
    return found


def toy_state(
    bench: Bench, tokens: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    from outstride.core.contracts import PassInput
    from outstride.core.graph import chain
    from outstride.core.proposal import Proposal, Wants
    from outstride.core.sequence import BlockTable

    table = BlockTable(pages=list(range(bench.target.pages)))
    proposal = Proposal(chain(tokens), len(tokens), wants=Wants(hidden=(2,)))
    work = PassInput(proposal, table, np.arange(len(tokens)))
    [scores] = bench.target.forward([work]).wait()
    return np.ascontiguousarray(scores.hidden[2][-1:]).view(np.uint64).reshape(-1)


@pytest.mark.parametrize("spec", variants(Exactness.DISTRIBUTION))
def test_distribution_methods_sample_the_same_distribution(spec: str) -> None:
    """Chi-square over the first two tokens of many seeds; `tests/accept` tries the rules themselves
    far more often."""
    for top_p in (1.0, 0.5):
        assert sampled_as_plain(registry.build(spec), top_p, trials=700) > 1e-3


def sampled_as_plain(method: Method, top_p: float, trials: int, batch: int = 100) -> float:
    """The p-value of a method's first two tokens."""
    prompt = [3, 5, 3]
    params = SamplingParams(max_tokens=3, temperature=1.0, top_p=top_p, ignore_eos=True, seed=0)
    expected = exact_distribution(Bench(), prompt, params, 2)
    counts = dict.fromkeys(expected, 0)
    accepted = 0
    for start in range(0, trials, batch):
        bench = Bench(pages=10 * batch, nodes=16 * batch, sequences=batch)
        seeded = [replace(params, seed=start + i) for i in range(batch)]
        for sequence in bench.run([prompt] * batch, method, seeded):
            counts[tuple(sequence.output[:2])] += 1
            accepted += sequence.counts.accepted
    assert accepted > trials / 10
    return chi_square(counts, expected, trials)


def chi_square(
    counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float], trials: int
) -> float:
    """The probability of a deviation at least this large."""
    seen = np.asarray([counts[key] for key in expected])
    return p_value(seen, np.asarray(list(expected.values())) * trials)


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


@pytest.mark.parametrize(("spec", "sampling"), corners(variants(Exactness.LOSSY)))
def test_lossy_methods_are_sound(spec: str, sampling: str) -> None:
    """No token is lost or doubled, stops are honoured, and nothing else is random than the seed."""
    params, prompts = SAMPLINGS[sampling], some_prompts(1, 3)
    method = registry.build(spec)
    for bench in (Bench(), Bench(pages=26, nodes=24)):
        for sequence in bench.run(prompts, method, params):
            output, text = sequence.output, bench.texts[sequence.id]
            assert 0 < len(output) <= params.max_tokens
            assert sequence.counts.emitted == len(output) == len(sequence.trace)
            assert [p.token for p in sequence.trace] == output
            ends = {END, *params.stop_token_ids} - ({END} if params.ignore_eos else set())
            assert not ends & set(output[:-1])
            assert not any(stop in text[params.min_tokens :] for stop in params.stop)
            if sequence.finish_reason == "length":
                assert len(output) == params.max_tokens
            else:
                assert len(output) >= params.min_tokens
                assert output[-1] in ends or to_text(output).endswith(tuple(params.stop))
    once, again = (alone(prompts[0], params, method) for _ in range(2))
    assert once == again


@pytest.mark.parametrize("spec", variants(Exactness.LOSSY))
def test_lossy_methods_save_passes(spec: str) -> None:
    """Those that leave out layers save these instead, and the toy has none to spare."""
    method = registry.build(spec)
    if method.drafter.partial_kv:
        assert alone([3, 4, 5], SAMPLINGS["sampled"], method) == alone(
            [3, 4, 5], SAMPLINGS["sampled"]
        )
        return
    found = Bench(nodes=256).run(some_prompts(4, 4), method, SAMPLINGS["sampled"])
    assert sum(s.counts.passes for s in found) < sum(s.counts.emitted for s in found)


def test_methods_are_built_from_text() -> None:
    for spec in EXACT:
        method = registry.build(spec)
        assert isinstance(method, Method)
        assert method.spec == spec


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("draft:model=x,least=0.1", "min_prob"),
        ("dilated:least=0.1", "min_prob"),
        ("suffix:least=0.1", "min_prob"),
        ("skip-layers:least=3", "min_layers"),
        ("prune:of=suffix:least=0.1", "min_prob"),
    ],
)
def test_a_renamed_option_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(UnknownMethod, match=f"'least' any more: it is called '{new}'"):
        registry.build(old)


def test_a_shared_acceptor_takes_no_options() -> None:
    class Picky(Match):
        def __init__(self, *, sure: float = 0.5) -> None:
            self.sure = sure

    with pytest.raises(TypeError, match="takes no options, but it has sure"):
        registry.acceptor("picky")(Picky)


def test_a_method_with_a_rule_of_its_own_is_its_own_acceptor() -> None:
    method = registry.build("threshold:threshold=0.3,cache=dual")
    assert id(method.acceptor) == id(method.drafter)
    assert registry.entry("rejection").acceptor == "rejection"
