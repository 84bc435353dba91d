"""`skip-layers`: the number of layers only falls, no missing KV is used, the text is the same in every
batch, and no KV that lacks layers is shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outstride import registry
from outstride.core.contracts import Demand
from outstride.core.graph import FloatArray
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence, View
from outstride.draft.skip_layers import SkipLayers
from outstride.engine.engine import Engine
from outstride.engine.ledger import SequenceProgress
from outstride.engine.scheduler import Limits
from outstride.errors import UnknownMethod
from outstride.models.draft_heads import attach
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelWeights
from tests.draft.script import Script
from tests.models.drive import random_decoder, tiny, tokens
from tests.models.test_draft_heads import part_tensors, write_part

IMPLEMENTATIONS: dict[str, Callable[[ModelWeights], Ops]] = {"reference": Reference}
if native.library_path() is not None:
    IMPLEMENTATIONS["cpu"] = Cpu.of
QUICKEST = IMPLEMENTATIONS.get("cpu", Reference)

LAYERS = 6
SPEC = "skip-layers:warm=1,min_layers=3,span=12"
PLAIN = registry.build("plain")
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
SAMPLED = replace(GREEDY, temperature=0.9, seed=7)


def engine(make: Callable[[ModelWeights], Ops] = QUICKEST, pages: int = 64) -> Engine:
    decoder = random_decoder(tiny(layers=LAYERS), pages=pages, make_ops=make)
    return Engine({"target": decoder}, limits=Limits(nodes=48))


def finish(on: Engine, sequences: Iterable[Sequence], shake: int = 0) -> None:
    """Steps to the end; after every `shake` steps one sequence loses all pages."""
    steps = 0
    while on.busy:
        steps += 1
        assert steps < 2000, "the engine does not come to an end"
        running = on.scheduler.running
        if shake and steps % shake == 0 and running:
            on.scheduler.preempt(running[steps // shake % len(running)])
        on.step()
        on.check_integrity()
    assert [s.error for s in sequences if s.error is not None] == []


def answer(
    on: Engine, prompt: list[int], spec: str, params: SamplingParams = GREEDY
) -> tuple[list[int], object]:
    sequence = on.submit(prompt, params, registry.build(spec))
    finish(on, [sequence])
    return sequence.output, sequence.logprobs


# --- the budget -----------------------------------------------------------------------------------


def starts(drafter: SkipLayers, layers: int, prompt: int = 5, count: int = 200) -> list[int]:
    script = Script(drafter, [1] * prompt, [0])
    view = View(script.sequence, {}, 0, layers=layers)
    return [drafter.resumes(position, view) for position in range(prompt + count)]


@pytest.mark.parametrize("layers", [1, 2, 3, 12, 30, 61])
@pytest.mark.parametrize(("warm", "min_layers", "span"), [(1, 0, 64), (4, 7, 1), (2, 24, 100)])
def test_the_budget_only_falls(layers: int, warm: int, min_layers: int, span: int) -> None:
    found = starts(SkipLayers(warm=warm, min_layers=min_layers, span=span), layers)
    left = [layers - (start - warm) for start in found]
    assert left == sorted(left, reverse=True)
    assert left[:5] == [layers] * 5, "a prompt passes all layers"
    assert left[-1] == min(max(min_layers or layers // 2, warm + 1), layers)
    assert left[4 + span] == left[-1]
    assert left[4 + span - 1] > left[-1] or left[-1] == layers or span > layers
    assert max(before - after for before, after in zip(found[1:], found, strict=False)) <= max(
        1, layers // span
    )


@pytest.mark.parametrize(
    "option", ["warm=0", "span=0", "min_layers=-1", "min_layers=1", "warm=4,min_layers=4"]
)
def test_senseless_options_are_refused(option: str) -> None:
    with pytest.raises(UnknownMethod, match="needs"):
        registry.build(f"skip-layers:{option}")


# --- the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", [f"skip-layers:min_layers={LAYERS},span=2", "skip-layers:warm=50"])
def test_with_all_layers_it_is_plain(ops: str, spec: str) -> None:
    on = engine(IMPLEMENTATIONS[ops])
    for params in (GREEDY, SAMPLED):
        assert answer(on, tokens(21), spec, params) == answer(on, tokens(21), "plain", params)


class Slow:
    """The same decoder written out, token by token; a skipped layer has no KV of that token."""

    def __init__(self, model: ModelWeights) -> None:
        self.model = model
        self.kv: list[list[tuple[FloatArray, FloatArray]]] = [[] for _ in model.layers]
        self.length = 0

    def norm(self, x: FloatArray, weight: FloatArray) -> FloatArray:
        found: FloatArray = x / np.sqrt(np.mean(x * x) + self.model.shape.norm_eps) * weight
        return found

    def turn(self, heads: FloatArray) -> FloatArray:
        half = heads.shape[1] // 2
        angles = self.length * 10000.0 ** (-np.arange(half) / half)
        low, high = heads[:, :half], heads[:, half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=1)

    def layer(self, number: int, x: FloatArray) -> FloatArray:
        weights, shape = self.model.layers[number], self.model.shape
        size, heads, kv_heads = shape.head_dim, shape.heads, shape.kv_heads
        joined = weights.qkv.double().numpy() @ self.norm(x, weights.attention_norm.numpy())
        rows = joined.reshape(-1, size)
        queries, keys = self.turn(rows[:heads]), self.turn(rows[heads : heads + kv_heads])
        kv = self.kv[number]
        kv.append((keys, rows[heads + kv_heads :]))
        assert len(kv) == self.length + 1, "an earlier token did not pass this layer"
        mixed = []
        for head, query in enumerate(queries):
            own = head * kv_heads // heads
            weight = np.exp(np.asarray([query @ k[own] for k, _ in kv]) / np.sqrt(size))
            values = np.asarray([v[own] for _, v in kv])
            mixed.append(weight @ values / weight.sum())
        x = x + weights.output.double().numpy() @ np.concatenate(mixed)
        inner = weights.gate_up.double().numpy() @ self.norm(x, weights.mlp_norm.numpy())
        gate, up = inner[: len(inner) // 2], inner[len(inner) // 2 :]
        found: FloatArray = x + weights.down.double().numpy() @ (gate / (1 + np.exp(-gate)) * up)
        return found

    def read(self, token: int, layers: Iterable[int]) -> FloatArray:
        """Log-probabilities after a token that passes these layers."""
        x = self.model.embedding[token].double().numpy()
        for number in layers:
            x = self.layer(number, x)
        self.length += 1
        head = self.model.embedding if self.model.head is None else self.model.head
        row = head.double().numpy() @ self.norm(x, self.model.norm.numpy())
        found: FloatArray = row - row.max() - np.log(np.exp(row - row.max()).sum())
        return found


@pytest.mark.parametrize(("warm", "min_layers", "span"), [(1, 3, 12), (2, 3, 5), (1, 2, 1)])
def test_it_equals_layers_run_by_hand(warm: int, min_layers: int, span: int) -> None:
    made: list[ModelWeights] = []

    def make(model: ModelWeights) -> Ops:
        made.append(model)
        return Reference(model)

    prompt, spec = (
        tokens(19, seed=3),
        f"skip-layers:warm={warm},min_layers={min_layers},span={span}",
    )
    on = engine(make)
    output, logprobs = answer(on, prompt, spec)
    slow, plain = Slow(made[0]), Slow(made[0])
    for token in prompt:
        row, other = slow.read(token, range(LAYERS)), plain.read(token, range(LAYERS))
    away = 0.0
    assert isinstance(logprobs, dict)
    for place, token in enumerate(output, start=1):
        [(chosen, value), *_] = logprobs[len(prompt) + place - 1]
        assert chosen == token == int(row.argmax())
        assert value == pytest.approx(row[token], abs=1e-4)
        away = max(away, abs(other[token] - row[token]))
        skipped = (LAYERS - min_layers) * min(place, span) // span
        row = slow.read(token, [*range(warm), *range(warm + skipped, LAYERS)])
        other = plain.read(token, range(LAYERS))
    assert away > 0.1, "all layers would have given the same text"


# --- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_any_batch_and_preemption(ops: str) -> None:
    """Requests at different places of their answers share passes and are preempted at any time."""
    make = IMPLEMENTATIONS[ops]
    prompts = [tokens(5 + 6 * i, seed=i) for i in range(6)]
    specs = [
        SPEC,
        "plain",
        "skip-layers:warm=2,span=3",
        SPEC,
        "ngram",
        "skip-layers:warm=1,min_layers=2,span=1",
    ]
    params = [GREEDY, SAMPLED, SAMPLED, replace(SAMPLED, seed=3), GREEDY, GREEDY]
    alone = [answer(engine(make), *each) for each in zip(prompts, specs, params, strict=True)]
    for pages, shake in ((64, 0), (64, 9), (14, 0)):
        on = engine(make, pages)
        sequences = [
            on.submit(prompt, its, registry.build(spec))
            for prompt, spec, its in zip(prompts, specs, params, strict=True)
        ]
        finish(on, sequences, shake)
        assert [(s.output, s.logprobs) for s in sequences] == alone
        assert (sum(s.counts.preempted for s in sequences) > 0) == (pages < 64 or shake > 0)


def resumed(prompt: list[int]) -> list[int]:
    """Its text if it is preempted late, and plain has computed the same text with all layers."""
    on = engine()
    output, _ = answer(engine(), prompt, SPEC)
    sequence = on.submit(prompt, GREEDY, registry.build(SPEC))
    while len(sequence.output) < 20:
        on.step()
    answer_of_plain = on.submit([*prompt, *output], GREEDY, PLAIN)
    while not answer_of_plain.output:
        on.step()
    on.scheduler.preempt(sequence)
    finish(on, [sequence, answer_of_plain])
    return sequence.output


def test_it_resumes_with_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tokens(n, seed=n) for n in (16, 23)]
    expected = [answer(engine(), prompt, SPEC)[0] for prompt in prompts]
    assert [resumed(prompt) for prompt in prompts] == expected
    monkeypatch.setattr(SkipLayers, "demand", lambda self, view: Demand())
    assert [resumed(prompt) for prompt in prompts] != expected, "the test notices nothing"


def test_samples_share_the_prompt_alone() -> None:
    prompt, params, outputs = tokens(37, seed=9), replace(SAMPLED, n=3), []
    for shake in (0, 5):
        on = engine()
        leader = on.submit(prompt, params, registry.build(SPEC))
        finish(on, leader.group, shake)
        assert (leader.output, leader.logprobs) == answer(engine(), prompt, SPEC, SAMPLED)
        outputs.append([s.output for s in sorted(leader.group, key=lambda s: s.index)])
    assert outputs[0] == outputs[1]
    assert len({tuple(output) for output in outputs[0]}) == 3


def test_a_cancelled_request_frees_everything() -> None:
    on = engine()
    sequence = on.submit(tokens(20), GREEDY, registry.build(SPEC))
    while len(sequence.output) < 15:
        on.step()
    on.cancel(sequence)
    finish(on, [])
    pool = on.runner.pools["target"]
    assert pool.available == pool.pages
    assert answer(on, sequence.tokens, "plain") == answer(engine(), sequence.tokens, "plain")


# --- what others see ------------------------------------------------------------------------------


def continued(length: int) -> tuple[list[int], object]:
    """The text of plain after a prompt and the answer to it, on the engine that wrote the answer."""
    on, prompt = engine(), tokens(length, seed=4)
    output, _ = answer(on, prompt, SPEC, replace(GREEDY, max_tokens=60))
    text = [*prompt, *output, *tokens(3, seed=5)]
    found = answer(on, text, "plain")
    assert on.runner.pools["target"].hits == length // 16 * 16, "the prompt itself is shared"
    assert found == answer(engine(), text, "plain")
    return found


@pytest.mark.parametrize("length", [16, 32, 41])
def test_kv_that_lacks_layers_is_not_shared(length: int) -> None:
    continued(length)


def test_the_guard_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the test above fails."""
    monkeypatch.setattr(SkipLayers, "partial_kv", False)
    on, prompt = engine(), tokens(32, seed=4)
    output, _ = answer(on, prompt, SPEC, replace(GREEDY, max_tokens=60))
    text = [*prompt, *output, *tokens(3, seed=5)]
    assert answer(on, text, "plain") != answer(engine(), text, "plain")


def drafts(folder: Path, prompt: list[int], *, shared: bool) -> list[list[int]]:
    """The drafts of a draft head: alone, or next to requests that skip layers."""
    config = tiny(layers=LAYERS, tied=True)
    model = random_decoder(config, make_ops=QUICKEST)
    attach(model, "part", write_part(folder, config, part_tensors(config)))
    on, found = Engine({"target": model}, limits=Limits(nodes=48)), []
    if shared:
        answer(on, prompt[:20], SPEC)
        on.submit(prompt[:30], GREEDY, registry.build("skip-layers:warm=1,min_layers=2,span=1"))
    drafting = registry.build("block-drafter:from=part,nodes=6")
    sequence = on.submit(prompt, GREEDY, drafting, stream_canvas=True)

    def hear(news: list[SequenceProgress]) -> None:
        for progress in news:
            if progress.sequence is sequence and progress.drawn and len(sequence.output) > 1:
                found.append(progress.drawn[0].graph.tokens.tolist())

    while on.busy:
        on.step(hear)
    assert sequence.error is None
    return found


def test_draft_heads_are_not_affected(tmp_path: Path) -> None:
    """Passes over some layers store hidden states only in the slots of their own sequence."""
    prompt = tokens(40, seed=6)
    alone = drafts(tmp_path / "one", prompt, shared=False)
    assert any(len(graph) > 2 for graph in alone)
    assert drafts(tmp_path / "two", prompt, shared=True) == alone
