"""The request contract on a canvas: grammars, stops, log-probabilities, the step map, infilling."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.core.contracts import CAUSAL, AttentionPattern, MaskedSpec, PassInput
from outstride.core.graph import BoolArray, FloatArray, NodeId, block, chain
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sampling import Purpose, SamplingSpec, logprobs, probabilities, uniform
from outstride.core.sequence import BlockTable, View
from outstride.engine import commit, logits_processors
from outstride.engine.logits_processors import sampling_spec
from outstride.errors import IntegrityError, InvalidPrompt, UnknownMethod
from tests.accept.chi_square import p_value
from tests.conformance.harness import (
    END,
    MASK,
    VOCABULARY,
    Bench,
    some_prompts,
    toy_method,
)
from tests.conformance.masked import KINDS, SAMPLED

ENDLESS = SamplingParams(max_tokens=16, ignore_eos=True, seed=1)


class OddAfterEven:
    """A grammar: an even token must be followed by an odd one, and some tokens never come."""

    def allowed(self, output: Seq[int]) -> BoolArray | None:
        mask = np.ones(VOCABULARY, dtype=np.bool_)
        mask[[0, 5]] = False
        if output and output[-1] % 2 == 0:
            mask[::2] = False
        return mask


def test_verify_is_exact_under_a_grammar() -> None:
    for kind in ("blocks", "canvas"):
        outputs = [
            [
                s.output
                for s in Bench(**KINDS[kind]).run(
                    some_prompts(3, 3, 14), registry.build(spec), SAMPLED, grammar=OddAfterEven()
                )
            ]
            for spec in ("steps", "verify")
        ]
        assert outputs[0] == outputs[1]


def scores_of(bench: Bench, tokens: dict[int, int]) -> Scores:
    """The scores of a full canvas."""
    places = sorted(tokens)
    graph = block([tokens[p] for p in places], positions=places)
    wants = Wants(logits=True, nodes=tuple(range(len(graph))))
    work = PassInput(Proposal(graph, 0, offset=0, wants=wants), BlockTable(), np.arange(len(graph)))
    [scores] = bench.target.forward([work]).wait()
    return scores


@pytest.mark.parametrize(
    "spec", ["steps", "verify", "threshold:threshold=0.2", "credit:threshold=0.3"]
)
def test_logprobs_are_those_of_the_step_of_settling(spec: str) -> None:
    """The step map says how the canvas was filled: replaying it gives the same log-probabilities."""
    params = replace(ENDLESS, temperature=0.7, logprobs=2, frequency_penalty=0.4)
    [prompt] = some_prompts(3, 1, max_length=10)
    bench = Bench(**KINDS["canvas"], nodes=512)
    [sequence] = bench.run([prompt], registry.build(spec), params)
    steps = {len(prompt) + i: row.step for i, row in enumerate(sequence.trace)}
    assert all(row.kind == "unmasked" for row in sequence.trace)
    assert sorted(sequence.logprobs) == list(range(len(prompt), sequence.limit))
    if spec == "verify":  # several steps in a pass: the map is by pass, the numbers are of steps
        slow = Bench(**KINDS["canvas"]).run([prompt], registry.build("steps"), params)[0]
        assert sequence.logprobs == slow.logprobs
        return
    for step in sorted(set(steps.values())):
        canvas = dict(enumerate(prompt)) | {
            p: sequence.tokens[p] if steps[p] < step else MASK for p in steps
        }
        scores = scores_of(bench, canvas)
        assert scores.logits is not None
        for position in (p for p in steps if steps[p] == step):
            token = sequence.tokens[position]
            expected = logprobs(scores.logits[position], [token], 2)
            assert sequence.logprobs[position] == tuple(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_of_text_frees_the_rest(kind: str) -> None:
    """After a settled end nothing is computed; before it everything is still filled in."""
    params = SamplingParams(max_tokens=24, logit_bias={END: 2.5}, seed=1)
    bench = Bench(**KINDS[kind], nodes=512)
    method = registry.build("steps:order=random")
    seen = 0
    for prompt in some_prompts(2, 6, max_length=9):
        sequence = bench.engine.submit(prompt, params, method)
        while bench.engine.busy:
            known, nodes = dict(sequence.canvas), sequence.counts.nodes
            ends = [p for p, t in known.items() if t == END]
            bench.step()
            bench.engine.take_outputs()
            if ends and sequence.finish_reason is None:
                assert all(p < min(ends) for p in set(sequence.canvas) - set(known))
                assert "canvas" not in kind or sequence.counts.nodes - nodes == min(ends) + 1
                seen += 1
        assert sequence.finish_reason in ("stop", "length")
        assert END not in sequence.output[:-1]
    seldom = kind in ("shifted blocks", "gated")
    assert seen > 0 or seldom, "one gap at a time, and seldom an end after it"


def test_every_step_of_a_canvas_is_reported() -> None:
    bench, [prompt] = Bench(**KINDS["canvas"]), some_prompts(4, 1, max_length=9)
    states: list[dict[int, int]] = []
    bench.engine.submit(prompt, ENDLESS, registry.build("steps"), stream_canvas=True)
    while bench.engine.busy:
        bench.engine.step(lambda updates: states.extend({**p.canvas} for p in updates))
    assert len(states) == 16
    assert any(states)
    assert max(len(canvas) for canvas in states) > 1


# --- holes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["steps", "threshold:threshold=0.2", "pipeline:threshold=0.2"])
def test_infilling_keeps_fixed_tokens(spec: str, kind: str) -> None:
    prompt, fixed = [3, 4], {5: 9, 6: 8, 10: 7, 11: 6}
    params = SamplingParams(
        max_tokens=10, min_tokens=10, ignore_eos=True, seed=2, n=2, temperature=0.9
    )
    [first] = Bench(**KINDS[kind]).run([prompt], registry.build(spec), params, fixed=fixed)
    assert len(first.group) == 2
    for sequence in first.group:
        assert len(sequence.tokens) == 12
        assert {p: sequence.tokens[p] for p in fixed} == fixed
        assert [row.kind for row in sequence.trace] == [
            "given" if p in fixed else "unmasked" for p in range(2, 12)
        ]
    small = Bench(**KINDS[kind], pages=12, nodes=16)
    again = small.run([prompt] * 3, registry.build(spec), params, fixed=fixed)
    assert all(s.output == first.output for s in again)


def test_tokens_right_of_a_hole_matter_on_a_canvas() -> None:
    outputs = set()
    for token in range(1, 8):
        params = SamplingParams(max_tokens=4, min_tokens=4, ignore_eos=True)
        method = registry.build("steps")
        [s] = Bench(**KINDS["canvas"]).run([[3, 4]], method, params, fixed={5: token})
        outputs.add(tuple(s.output[:3]))
    assert len(outputs) > 3


def test_holes_at_the_very_beginning() -> None:
    params = SamplingParams(max_tokens=5, min_tokens=5, ignore_eos=True)
    [s] = Bench(**KINDS["canvas"]).run([[]], registry.build("steps"), params, fixed={2: 5, 4: 6})
    assert (s.tokens[2], s.tokens[4], len(s.tokens)) == (5, 6, 5)
    with pytest.raises(InvalidPrompt):
        Bench(**KINDS["shifted canvas"]).run([[]], registry.build("steps"), params, fixed={2: 5})
    with pytest.raises(UnknownMethod, match="cannot do infilling"):
        Bench().run([[1]], registry.build("plain"), params, fixed={2: 5})


# --- the joint distribution -----------------------------------------------------------------------


def row_after(bench: Bench, known: list[tuple[int, int]], position: int) -> FloatArray:
    """The logits of a mask at a position, after (position, token) pairs computed in this order."""
    places = [*(p for p, _ in known), position]
    graph = chain([*(t for _, t in known), MASK], positions=places)
    wants = Wants(nodes=(len(known),), logits=True)
    work = PassInput(
        Proposal(graph, len(known), offset=0, wants=wants), BlockTable(), np.arange(len(places))
    )
    [scores] = bench.target.forward([work]).wait()
    assert scores.logits is not None
    row: FloatArray = scores.logits[0]
    return row


def constrained(row: FloatArray, grammar: OddAfterEven | None, text: list[int]) -> FloatArray:
    """A row of logits without the tokens that may not follow a text."""
    mask = None if grammar is None else grammar.allowed(text)
    return row if mask is None else np.where(mask, row, np.float32(-np.inf))


@pytest.mark.parametrize("grammar", [None, OddAfterEven()], ids=["free", "grammar"])
@pytest.mark.parametrize("order", ["left", "random"])
def test_any_subset_keeps_the_joint_distribution(order: str, grammar: OddAfterEven | None) -> None:
    """Chi-square over two tokens of many seeds, against the product of the model's own rows.

    Under a grammar, the rows are masked and tokens are settled from left to right in any case.
    """
    prompt, trials = [3, 5, 3], 700
    params = SamplingParams(max_tokens=2, temperature=0.9, top_k=4, ignore_eos=True)
    bench = Bench(**KINDS["in turn"], pages=6 * trials, nodes=16 * trials, sequences=trials)
    method = registry.build(f"any-subset:order={order},block=2")
    sequences = [
        bench.engine.submit(prompt, replace(params, seed=seed), method, grammar=grammar)
        for seed in range(trials)
    ]
    while bench.engine.busy:
        bench.engine.step()
    seen: Counter[tuple[int, int]] = Counter((s.output[0], s.output[1]) for s in sequences)
    assert sum(s.counts.passes for s in sequences) <= 2 * trials
    known, draw = list(enumerate(prompt)), sampling_spec(params, 0, 0, Purpose.TOKEN)
    expected: dict[tuple[int, int], float] = defaultdict(float)
    for first, second in ((3, 4), (4, 3)):
        orders = [SamplingSpec(seed=seed, purpose=Purpose.ORDER) for seed in range(trials)]
        count = sum((uniform(d, 0, first) < uniform(d, 0, second)) for d in orders)
        random_order = order == "random" and grammar is None
        count = count if random_order else trials * (first < second)
        row = constrained(row_after(bench, known, first), grammar, [])
        for a, p in enumerate(probabilities(row, draw)):
            row = constrained(row_after(bench, [*known, (first, a)], second), grammar, [a])
            rows = probabilities(row, draw)
            for b, q in enumerate(rows if p > 0 else ()):
                expected[(a, b) if first == 3 else (b, a)] += count * float(p) * float(q)
    keys = [key for key in sorted(expected) if expected[key] > 0]
    assert set(seen) <= set(keys)
    counts = np.asarray([seen[key] for key in keys])
    assert p_value(counts, np.asarray([expected[key] for key in keys])) > 1e-3


# --- planted faults -------------------------------------------------------------------------------


def outputs(method: Any, kind: str, **limits: Any) -> list[list[int]]:
    prompts, params = some_prompts(1, 4, max_length=14), replace(SAMPLED, ignore_eos=True)
    return [s.output for s in Bench(**KINDS[kind], **limits).run(prompts, method, params)]


def test_kv_of_a_block_that_saw_masks_is_kept() -> None:
    inner = registry.build("threshold:threshold=0.2")

    class KeepsMasks(type(inner.acceptor)):  # type: ignore[misc]
        def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
            verdict: Verdict = super().accept(view, proposal, scores)
            early = [
                n
                for n in range(proposal.given, len(proposal.graph))
                if proposal.graph.positions[n] < view.end
            ]
            return replace(verdict, keep=(*verdict.keep, *map(NodeId, early)))

    method = toy_method(inner.drafter, KeepsMasks(threshold=0.2, cache="none"))
    with pytest.raises((IntegrityError, AssertionError)):
        outputs(method, "blocks")


def test_prefixes_do_not_know_their_attention_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    from outstride.cache.prefix import PrefixTree

    original = PrefixTree._root
    monkeypatch.setattr(
        PrefixTree, "_root", lambda self, key: original(self, replace(key, pattern=CAUSAL))
    )
    bench = Bench(vision=AttentionPattern(4), masking=MaskedSpec(MASK, 4, False, True), pages=200)
    prompt = [1 + i % 23 for i in range(45)]
    bench.run([prompt], registry.build("plain"), ENDLESS)
    with pytest.raises((IntegrityError, AssertionError)):
        bench.run([prompt], registry.build("steps"), ENDLESS)


def test_noise_keyed_by_pass_instead_of_position(monkeypatch: pytest.MonkeyPatch) -> None:
    original, count = logits_processors.attach_masked, iter(range(10**9))

    def attach(*args: Any) -> Proposal:
        proposal = original(*args)
        proposal.sampling = replace(proposal.sampling, index=next(count))
        return proposal

    before = [outputs(registry.build(spec), "blocks") for spec in ("steps", "verify")]
    assert before[0] == before[1]
    monkeypatch.setattr("outstride.engine.model_runner.attach_masked", attach)
    after = [outputs(registry.build(spec), "blocks") for spec in ("steps", "verify")]
    assert after[0] != after[1]


def test_random_orders_keyed_by_engine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    method = registry.build("steps:order=random")
    assert outputs(method, "blocks") == outputs(method, "blocks", nodes=9)
    clock = iter(range(10**9))
    monkeypatch.setattr(
        "outstride.diffusion.canvas.CanvasState.num_settled", property(lambda self: next(clock))
    )
    assert outputs(method, "blocks") != outputs(method, "blocks", nodes=9)


def test_a_reordered_text_is_computed_again_from_left_to_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a preemption: KV computed in another order is other KV."""
    method = registry.build("steps:count=2")
    ample, tight = {"nodes": 512}, {"nodes": 512, "shake": 3}
    assert outputs(method, "in turn", **ample) == outputs(method, "in turn", **tight)
    original = commit.Commit._keep

    def forgetful(self: commit.Commit, turn: Any, verdict: Verdict, moves: Any) -> None:
        original(self, turn, verdict, moves)
        turn.sequence.order = []

    monkeypatch.setattr(commit.Commit, "_keep", forgetful)
    assert outputs(method, "in turn", **ample) != outputs(method, "in turn", **tight)
