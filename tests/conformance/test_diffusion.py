"""Methods for masked models: the same text in every batch, sound in any case."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from outstride import registry
from outstride.core.contracts import FULL, AttentionPattern, Exactness, MaskedSpec
from outstride.core.sequence import Sequence, Status
from tests.conformance.harness import (
    END,
    MASK,
    PLAIN,
    SAMPLINGS,
    Bench,
    alone,
    some_prompts,
    to_text,
)
from tests.conformance.masked import CACHED, KINDS, PAIRS, SAMPLED, masked_specs, suits

SHORT = {
    name: replace(params, max_tokens=10, min_tokens=min(params.min_tokens, 6), seed=5)
    for name, params in SAMPLINGS.items()
}

LIMITS: tuple[dict[str, Any], ...] = ({"nodes": 512}, {"nodes": 30, "pages": 22})


def sound(sequence: Sequence, text: str) -> None:
    """No token lost or doubled, none of them a mask, stops honoured."""
    params, output = sequence.params, sequence.output
    assert 0 < len(output) <= params.max_tokens
    assert MASK not in output
    assert sequence.counts.emitted == len(output) == len(sequence.trace)
    assert [p.token for p in sequence.trace] == output
    ends = {END, *params.stop_token_ids} - ({END} if params.ignore_eos else set())
    free = output[params.min_tokens : -1] if params.min_tokens else output[:-1]
    assert not ends & set(free)
    assert not any(stop in text[params.min_tokens :] for stop in params.stop)
    if sequence.finish_reason == "length":
        assert len(output) == params.max_tokens
    else:
        assert output[-1] in ends or to_text(output).endswith(tuple(params.stop))


@pytest.mark.parametrize(("spec", "kind"), PAIRS)
def test_the_batch_changes_nothing(spec: str, kind: str) -> None:
    """Alone, in a batch that is preempted, in small passes and with few pages: the same, sound text."""
    rng = random.Random(f"{spec} {kind}")
    prompts = some_prompts(rng.randrange(99), 3, max_length=18)
    params = [SHORT[name] for name in rng.sample(list(SHORT), 3)]
    if spec.startswith("regex"):  # every token of the toy but the end is a letter
        params = [replace(p, ignore_eos=False) for p in params]
    method = registry.build(spec)
    expected = [alone(p, q, method, **KINDS[kind]) for p, q in zip(prompts, params, strict=True)]
    small: dict[str, Any] = {"nodes": 18, "pages": 24, "draft_pages": 13}
    for limits in (small, {"nodes": 512, "shake": 3}):
        bench = Bench(**KINDS[kind], **limits)
        found = bench.run(prompts, method, params)
        assert [s.output for s in found] == expected
        for sequence in found:
            sound(sequence, bench.texts[sequence.id])


@pytest.mark.parametrize("kind", ["canvas", "shifted canvas"])
@pytest.mark.parametrize("spec", CACHED)
def test_stale_kv_is_private_and_saves_nodes(spec: str, kind: str) -> None:
    method, params = registry.build(spec), replace(SAMPLED, max_tokens=20, ignore_eos=True)
    prompts = some_prompts(15, 3, max_length=20)
    bench = Bench(**KINDS[kind], nodes=512, pages=200)
    sequences = [bench.engine.submit(p, params, method) for p in prompts]
    reused = 0
    while bench.engine.busy:
        bench.step()
        reused += sum(s.tables["target"].stale for s in bench.engine.running)
    assert reused > 0
    assert bench.engine.pool().available == 200, "nothing stale is ever shared"
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.error is None
        assert sequence.counts.nodes < sequence.counts.passes * sequence.limit
        assert sequence.output == alone(prompt, params, method, **KINDS[kind], nodes=512, pages=200)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if suits("verify", kind)])
@pytest.mark.parametrize(
    "options",
    ["", "count=3,order=margin", "order=entropy", "order=random,block=3", "order=confidence"],
)
def test_verify_is_exact_to_steps(options: str, kind: str) -> None:
    """So is every other method that declares it, with the options that both have."""
    names = [
        entry.name
        for entry in registry.entries()
        if entry.exactness is Exactness.EXACT and entry.exact_to == "steps"
    ]
    assert {"steps", "verify"} <= set(names)
    rng, fewer = random.Random(options + kind), 0
    for name in rng.sample(list(SHORT), 2):
        prompts, params = some_prompts(14, 2, max_length=20), SHORT[name]
        slow = Bench(**KINDS[kind]).run(prompts, registry.build(f"steps:{options}"), params)
        for other in sorted({*names} - {"steps"}):
            for limits in LIMITS:
                method = registry.build(f"{other}:{options}")
                fast = Bench(**KINDS[kind], **limits).run(prompts, method, params)
                assert [s.output for s in fast] == [s.output for s in slow], f"{other} {name}"
                if other == "verify":
                    fewer += sum(s.steps for s in slow) - sum(s.steps for s in fast)
    assert fewer > 0 or "count" in options, "it never saved a pass"


def test_two_kinds_of_requests_share_a_batch() -> None:
    """Sixteen requests, autoregressive and diffusion, on one model: each as if alone."""
    kind = {
        "vision": AttentionPattern(4),
        "masking": MaskedSpec(MASK, 4, shifted=False, causal=True),
    }
    masked = [spec for spec in masked_specs() if suits(spec, "blocks")]
    causal = [
        "plain",
        "ngram",
        "recycle",
        "self-diffuse",
        "draft:model=draft",
        "diffuse:model=blocks",
    ]
    rng = random.Random(4)
    specs = [rng.choice(masked if i % 2 else causal) for i in range(16)]
    params = [replace(SHORT[rng.choice(list(SHORT))], seed=i) for i in range(16)]
    [common] = some_prompts(3, 1, max_length=30)
    prompts = [[*common[: rng.randrange(30)], *p] for p in some_prompts(5, 16, max_length=12)]
    methods = [registry.build(spec) for spec in specs]
    for limits in ({"nodes": 512, "pages": 300}, {"nodes": 40, "pages": 60}):
        found = Bench(**kind, **limits).run(prompts, methods, params)  # type: ignore[arg-type]
        for sequence, prompt, method, its in zip(found, prompts, methods, params, strict=True):
            assert sequence.output == alone(prompt, its, method, **kind), method.spec
    assert {s.block for s in found} == {None, 4}


def test_kv_computed_in_blocks_is_not_used_causally() -> None:
    kind: dict[str, Any] = {
        "vision": AttentionPattern(4),
        "masking": MaskedSpec(MASK, 4, False, True),
    }
    bench, prompt = Bench(**kind, pages=200), [1 + i % 23 for i in range(45)]
    for spec, hit in (("plain", 0), ("steps", 0), ("ngram", 44), ("threshold", 44), ("plain", 44)):
        [sequence] = bench.run([prompt], registry.build(spec), SHORT["greedy"])
        assert sequence.counts.reused == hit, spec
        assert sequence.output == alone(prompt, SHORT["greedy"], registry.build(spec), **kind)


def test_a_canvas_larger_than_a_pass_does_not_wait_for_ever() -> None:
    """Nor do the requests next to it: such canvases are admitted one at a time."""
    kind: dict[str, Any] = {"vision": FULL, "masking": MaskedSpec(MASK, None, False, True)}
    bench = Bench(**kind, nodes=12, pages=200)
    steps, plain = registry.build("steps:count=4"), PLAIN
    long = replace(SHORT["endless"], max_tokens=40)
    talk = [bench.engine.submit([i + 1], long, plain) for i in range(3)]
    canvases = [bench.engine.submit([i + 4], long, steps) for i in range(2)]
    for _ in range(30):
        bench.step()
    assert all(len(sequence.output) > 15 for sequence in talk)
    assert all(sequence.counts.passes > 5 for sequence in canvases)
    bench.finish()
    for sequence, method in zip([*talk, *canvases], [plain] * 3 + [steps] * 2, strict=True):
        assert sequence.output == alone(sequence.tokens[:1], long, method, **kind)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["blocks", "canvas", "in turn"])
def test_random_arrivals_and_cancels(kind: str, seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(**KINDS[kind], pages=rng.choice([26, 60]), nodes=rng.choice([20, 60]))
    specs = [spec for spec in masked_specs() if suits(spec, kind) and "regex" not in spec]
    live: list[tuple[Sequence, list[int], str]] = []
    cancelled = set()
    for i in range(10):
        [prompt], spec = some_prompts(seed * 50 + i, 1, max_length=20), rng.choice(specs)
        params = replace(SHORT[rng.choice(list(SHORT))], seed=i, n=rng.choice([1, 1, 3]))
        live.append((bench.engine.submit(prompt, params, registry.build(spec)), prompt, spec))
        for _ in range(rng.randrange(5)):
            bench.step()
        if rng.random() < 0.25 and (victim := rng.choice(live)[0]).status is not Status.FINISHED:
            bench.engine.cancel(victim)
            cancelled.add(victim.id)
    bench.finish()
    for leader, prompt, spec in live:
        for sequence in leader.group:
            assert sequence.error is None
            assert bench.tokens.get(sequence.id, []) == sequence.output
        expected = alone(prompt, replace(leader.params, n=1), registry.build(spec), **KINDS[kind])
        if leader.id in cancelled:
            assert leader.output == expected[: len(leader.output)]
        else:
            assert len(leader.group) == leader.params.n
            assert leader.output == expected
    pool = bench.engine.pool()
    assert pool.available == pool.pages


@pytest.mark.parametrize("kind", KINDS)
def test_n_samples_are_n_requests(kind: str) -> None:
    """Samples start from the prompt, whatever the first of them has settled by then."""
    params = replace(SAMPLED, n=3, temperature=1.2, ignore_eos=True)
    for prompt in ([3] * 8, some_prompts(5, 1, max_length=30)[0]):
        [first] = Bench(**KINDS[kind]).run([prompt], registry.build("steps:count=2"), params)
        outputs = [s.output for s in sorted(first.group, key=lambda s: s.index)]
        assert len({tuple(o) for o in outputs}) == 3
        single = replace(params, n=1)
        assert outputs[0] == alone(prompt, single, registry.build("steps:count=2"), **KINDS[kind])
        again = Bench(**KINDS[kind], pages=40).run(
            [prompt], registry.build("steps:count=2"), params
        )
        assert [s.output for s in sorted(again[0].group, key=lambda s: s.index)] == outputs


def test_unsupported_methods_are_refused() -> None:
    from outstride.errors import InvalidParams, UnknownMethod

    greedy = SHORT["greedy"]
    with pytest.raises(
        UnknownMethod, match="has no mask token; use an autoregressive method, such as plain"
    ):
        Bench(masking=None).run([[1, 2]], registry.build("steps"), greedy)
    for kind in ("blocks", "canvas"):
        with pytest.raises(UnknownMethod, match="such as steps"):
            Bench(**KINDS[kind]).run([[1, 2]], PLAIN, greedy)
    with pytest.raises(UnknownMethod, match="this one's cache is exact"):
        Bench(**KINDS["blocks"]).run([[1]], registry.build("threshold:cache=dual"), greedy)
    with pytest.raises(UnknownMethod, match="decodes autoregressively"):
        Bench().run([[1]], registry.build("draft:model=blocks"), greedy)
    with pytest.raises(UnknownMethod, match="has no mask token"):
        Bench().run([[1]], registry.build("diffuse:model=draft"), greedy)
    with pytest.raises(UnknownMethod, match="also decodes causally"):
        Bench(masking=None).run([[1]], registry.build("self-diffuse"), greedy)
    shifted = MaskedSpec(MASK, 4, shifted=True, causal=True)
    with pytest.raises(UnknownMethod, match="out of order"):
        Bench(masking=shifted).run([[1]], registry.build("steps"), greedy)
    asking = replace(greedy, prompt_logprobs=1)
    with pytest.raises(InvalidParams, match="prompt_logprobs"):
        Bench(**KINDS["blocks"]).run([[1]], registry.build("steps"), asking)
