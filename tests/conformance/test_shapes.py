"""The shapes of `toy_methods` in the loop: exact where they say so, sound in any case."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.accept.match import Match
from outstride.core.contracts import FULL, AttentionPattern, Exactness, MaskedSpec, Method
from outstride.core.graph import BoolArray
from outstride.core.params import SamplingParams
from tests.conformance import toy_methods as toys
from tests.conformance.harness import (
    PLAIN,
    SAMPLINGS,
    VOCABULARY,
    Bench,
    alone,
    some_prompts,
    toy_method,
    yardstick,
)

CAUSAL_SHAPES: dict[str, Callable[[], Method]] = {
    "jacobi": lambda: toy_method(toys.JacobiWindow(), Match()),
    "heads": lambda: toy_method(toys.Heads(), Match()),
    "early exit": lambda: toy_method(toys.EarlyExit(), Match()),
    "beam": lambda: toy_method(toys.Beam(), Match()),
    "while verifying": lambda: toy_method(toys.WhileVerifying(), Match()),
    "siblings": lambda: toy_method(toys.Siblings(), Match()),
}
BLOCK_SHAPES: dict[str, Callable[[], Method]] = {
    "masked block": lambda: toy_method(toys.MaskedBlock(), toys.Unmask()),
    "two at once": lambda: toy_method(toys.MaskedBlock(), toys.Unmask(2), Exactness.LOSSY),
    "assumed blocks": lambda: toy_method(toys.AssumedBlocks(), toys.VerifyAssumed()),
    "pipeline": lambda: toy_method(toys.Pipeline(), toys.Unmask(4), Exactness.LOSSY),
}
BLOCKS: dict[str, Any] = {
    "vision": AttentionPattern(block=4),
    "masking": MaskedSpec(toys.MASK, block=4, shifted=False, causal=False),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("shape", CAUSAL_SHAPES)
def test_causal_shapes_equal_plain(shape: str, sampling: str) -> None:
    params, prompts = SAMPLINGS[sampling], some_prompts(6, 6, max_length=28)
    expected = [yardstick(prompt, params) for prompt in prompts]
    preempted = 0
    for bench in (Bench(), Bench(pages=23, nodes=24)):
        found = bench.run(prompts, CAUSAL_SHAPES[shape](), params)
        assert [s.output for s in found] == expected
        preempted += sum(s.counts.preempted for s in found)
    assert preempted > 0 or sampling != "endless"


@pytest.mark.parametrize("shape", ["jacobi", "early exit", "beam", "while verifying"])
def test_causal_shapes_save_passes(shape: str) -> None:
    found = Bench().run(some_prompts(6, 10), CAUSAL_SHAPES[shape](), SAMPLINGS["endless"])
    assert sum(s.counts.accepted for s in found) > 0.1 * sum(s.counts.emitted for s in found)


def test_drafting_ahead_spares_rounds() -> None:
    """What was written during the pass need not be written before the next one."""
    bench = Bench()
    [sequence] = bench.run([[3, 4]], CAUSAL_SHAPES["while verifying"](), SAMPLINGS["endless"])
    assert sequence.counts.accepted > 0
    used = [s for s in sequence.trace if s.kind == "drafted"]
    assert len(used) == sequence.counts.accepted


def test_features_survive_prefix_hits_and_forks() -> None:
    """A drafter finds the pages' features although another sequence computed them."""
    prompt = some_prompts(8, 1, max_length=50)[0] * 2
    params = replace(SAMPLINGS["sampled"], n=3)
    bench = Bench()
    plain = [s.output for s in bench.run([prompt], PLAIN, params)[0].group]
    [first] = bench.run([prompt], CAUSAL_SHAPES["heads"](), params)
    assert first.counts.reused > 0
    assert [s.output for s in first.group] == plain
    assert all(s.counts.proposed > 0 for s in first.group)


def test_forks_go_on_as_samples_of_their_own() -> None:
    params = replace(SAMPLINGS["sampled"], ignore_eos=True)
    for prompt in some_prompts(7, 6):
        bench = Bench()
        method = toy_method(registry.build("ngram").drafter, toys.Forking())
        [first] = bench.run([prompt], method, params)
        assert first.output == alone(prompt, params)
        child = first.group[1]
        assert len(first.group) == 2
        assert child.output[:2] == first.output[:2]
        both = Bench().run([prompt], PLAIN, replace(params, n=2))[0].group
        common = alone([*prompt, *first.output[:2]], replace(params, max_tokens=38))
        assert first.output[2:] == common
        assert child.output[2:] != both[0].output[2:]


def test_siblings_draft_for_each_other() -> None:
    params = SamplingParams(max_tokens=60, temperature=0.3, seed=5, n=6, ignore_eos=True)
    prompt = some_prompts(12, 1)[0]
    plain = Bench(pages=300).run([prompt], PLAIN, params)[0].group
    found = Bench(pages=300).run([prompt], CAUSAL_SHAPES["siblings"](), params)[0].group
    assert [s.output for s in found] == [s.output for s in plain]
    assert sum(s.counts.accepted for s in found) > 0


class OddAfterEven:
    """A grammar: an even token must be followed by an odd one, and some tokens never come."""

    def allowed(self, output: Sequence[int]) -> BoolArray | None:
        mask = np.ones(VOCABULARY, dtype=np.bool_)
        mask[[0, 5]] = False
        if output and output[-1] % 2 == 0:
            mask[::2] = False
        return mask


@pytest.mark.parametrize("name", ["ngram", "draft:model=draft,length=3,width=3", *CAUSAL_SHAPES])
def test_grammar_inside_a_draft(name: str) -> None:
    method = CAUSAL_SHAPES[name]() if name in CAUSAL_SHAPES else registry.build(name)
    for sampling in ("greedy", "penalties"):
        prompts, params = some_prompts(10, 5), SAMPLINGS[sampling]
        plain = Bench().run(prompts, PLAIN, params, grammar=OddAfterEven())
        found = Bench(pages=30).run(prompts, method, params, grammar=OddAfterEven())
        assert [s.output for s in found] == [s.output for s in plain]
        for sequence in found:
            pairs = zip(sequence.output, sequence.output[1:], strict=False)
            assert all(a % 2 or b % 2 for a, b in pairs)
            assert not {0, 5} & set(sequence.output)


# --- masked models --------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "stopped", "stop tokens"])
@pytest.mark.parametrize("shape", BLOCK_SHAPES)
def test_blocks_do_not_depend_on_the_batch(shape: str, sampling: str) -> None:
    params, prompts = SAMPLINGS[sampling], some_prompts(13, 6)
    if shape == "pipeline":  # a pipeline that waits for nodes would be another pipeline
        limits: list[dict[str, Any]] = [{"nodes": 512, "pages": 400}]
    else:
        limits = [{}, {"nodes": 18}, {"pages": 28, "nodes": 40}]
    method = BLOCK_SHAPES[shape]()
    expected = [alone(p, params, method, **BLOCKS) for p in prompts]
    for limit in limits:
        found = Bench(**BLOCKS, **limit).run(prompts, BLOCK_SHAPES[shape](), params)
        assert [s.output for s in found] == expected


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_assumed_blocks_are_exact_to_single_steps(sampling: str) -> None:
    prompts, params = some_prompts(14, 10), SAMPLINGS[sampling]
    slow = Bench(**BLOCKS).run(prompts, BLOCK_SHAPES["masked block"](), params)
    fast = Bench(**BLOCKS).run(prompts, BLOCK_SHAPES["assumed blocks"](), params)
    assert [s.output for s in fast] == [s.output for s in slow]
    steps = [sum(s.steps for s in group) for group in (fast, slow)]
    assert steps[0] < steps[1]


def test_pipeline_takes_fewer_passes() -> None:
    prompts, params = some_prompts(14, 10), SAMPLINGS["endless"]
    one = Bench(**BLOCKS, nodes=512).run(prompts, BLOCK_SHAPES["two at once"](), params)
    two = Bench(**BLOCKS, nodes=512).run(prompts, BLOCK_SHAPES["pipeline"](), params)
    assert all(len(s.output) == 50 for s in [*one, *two])
    assert sum(s.steps for s in two) < sum(s.steps for s in one)


@pytest.mark.parametrize("seed", range(4))
def test_tokens_settled_out_of_order(seed: int) -> None:
    """KV is stored in the order of settling; positions tell where it belongs."""
    params = replace(SAMPLINGS["sampled"], seed=seed, ignore_eos=True)
    method = toy_method(toys.OutOfOrder(), toys.Unmask(2), Exactness.LOSSY)
    loose = MaskedSpec(toys.MASK, block=None, shifted=False, causal=True)
    prompts = some_prompts(seed, 5)
    bench = Bench(pages=120, masking=loose)
    shuffled = False
    sequences = [bench.engine.submit(p, params, method) for p in prompts]
    while bench.engine.busy:
        bench.step()
        for sequence in bench.engine.running:
            shuffled |= not sequence.tables["target"].ordered
    assert shuffled
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.error is None
        assert len(sequence.output) == 40
        assert sequence.output == alone(prompt, params, method, masking=loose)


def test_approximate_cache_is_private_and_sound() -> None:
    params = replace(SAMPLINGS["sampled"], max_tokens=20, ignore_eos=True)
    method = toy_method(toys.DualCache(), toys.UnmaskAndReuse(), Exactness.LOSSY)
    prompts = some_prompts(15, 4, max_length=20)
    full = MaskedSpec(toys.MASK, block=None, shifted=False, causal=False)
    bench = Bench(vision=FULL, masking=full, nodes=512, pages=200)
    reused = 0
    sequences = [bench.engine.submit(p, params, method) for p in prompts]
    while bench.engine.busy:
        bench.step()
        reused += sum(s.tables["target"].stale for s in bench.engine.running)
    assert reused > 0
    assert bench.engine.pool().available == 200, "nothing stale is ever shared"
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.error is None
        assert len(sequence.output) == 20
        assert sequence.output == alone(
            prompt, params, method, vision=FULL, masking=full, nodes=512, pages=200
        )


def test_everything_in_one_engine() -> None:
    """All causal shapes and methods together, arriving one by one, with few pages."""
    rng = random.Random(3)
    names = [*CAUSAL_SHAPES, "plain", "ngram", "draft:model=draft,width=2"]
    bench = Bench(pages=60, nodes=32)
    wanted = []
    for i in range(40):
        name = rng.choice(names)
        method = CAUSAL_SHAPES[name]() if name in CAUSAL_SHAPES else registry.build(name)
        params = replace(SAMPLINGS[rng.choice(list(SAMPLINGS))], seed=i)
        prompt = some_prompts(100 + i, 1)[0]
        wanted.append((bench.engine.submit(prompt, params, method), prompt, params))
        for _ in range(rng.randrange(3)):
            bench.step()
    bench.finish()
    for sequence, prompt, params in wanted:
        assert sequence.error is None
        assert sequence.output == alone(prompt, params)
