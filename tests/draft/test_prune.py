"""`prune`: the text of plain, decisions of the early layers, no layer computed twice, no leaks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from outstride import registry
from outstride.cache.pool import Moves, PagePool
from outstride.core.contracts import Demand, Drafter, Method, PassInput, PendingPass, Rounds
from outstride.core.graph import NodeId, TokenGraph, chain, drafted
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal
from outstride.core.sequence import View
from outstride.draft.prune import Prune
from outstride.engine.engine import Engine
from outstride.engine.scheduler import Limits
from outstride.errors import IntegrityError, MethodFailed, UnknownMethod
from outstride.models.config import DecoderConfig
from outstride.models.decoder import Decoder
from outstride.models.toy import Toy
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelWeights
from tests.conformance.harness import SAMPLINGS, Bench, alone, some_prompts, toy_method, yardstick
from tests.draft.script import MATCH
from tests.models.drive import Hand, logits, random_decoder, tiny

SPEC = "prune:of=recycle:size=16,depth=4,keep=5"
IMPLEMENTATIONS: dict[str, Callable[[ModelWeights], Ops]] = {"reference": Reference}
if native.library_path() is not None:
    IMPLEMENTATIONS["cpu"] = Cpu.of


class Watched(Prune):
    """Records each tree, the text before it, and its survivors."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[tuple[list[int], TokenGraph, Proposal]] = []

    def propose(self, view: View, budget: int) -> Rounds:
        rounds, whole, scores = super().propose(view, budget), None, None
        while True:
            try:
                whole = rounds.send(scores)  # type: ignore[arg-type]
            except StopIteration as stop:
                if whole is not None:
                    self.seen.append((view.tokens[:], whole.graph, stop.value))
                return stop.value  # type: ignore[no-any-return]
            scores = yield whole


# --- the text -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_any_batch_on_few_pages(seed: int) -> None:
    """Seeds, sampling parameters, other requests and preemptions."""
    rng = random.Random(seed)
    prompts = some_prompts(50 + seed, 8, max_length=24)
    kinds = [replace(SAMPLINGS[rng.choice(list(SAMPLINGS))], seed=seed) for _ in prompts]
    kinds[0], kinds[1] = SAMPLINGS["greedy"], replace(SAMPLINGS["sampled"], seed=seed)
    specs = [SPEC, SPEC, *(rng.choice([SPEC, "prune", "plain", "early-exit"]) for _ in range(6))]
    bench = Bench(pages=30, nodes=40, shake=rng.choice([5, 9]))
    found = bench.run(prompts, [registry.build(spec) for spec in specs], kinds)
    for sequence, prompt, params in zip(found, prompts, kinds, strict=True):
        assert sequence.output == yardstick(prompt, params)
    assert sum(s.counts.preempted for s in found) > 0
    assert sum(s.counts.accepted for s in found if s.method.name == "prune") > 0


def run(on: Engine, prompts: list[list[int]], specs: Sequence[str], sampled: bool) -> Any:
    found = []
    for i, (prompt, spec) in enumerate(zip(prompts, specs, strict=True)):
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        if sampled:
            params = replace(params, temperature=0.5, seed=i)
        found.append(on.submit(prompt, params, registry.build(spec)))
    while on.busy:
        on.step()
        on.check_integrity()
    for sequence in found:
        assert sequence.error is None
    return found


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_real_arithmetic(ops: str, sampled: bool) -> None:
    """The same bits, although KV is moved between two layers of one pass."""
    rng = random.Random(3)
    prompts = [[rng.randrange(1, 97) for _ in range(rng.randrange(1, 30))] for _ in range(10)]
    prune = "prune:of=recycle:size=20,depth=4,layer=2,keep=12"
    specs = [prune, prune, prune, "plain", "early-exit:layer=1,length=2", prune, "recycle"] * 2

    def engine(pages: int, nodes: int) -> Engine:
        target = random_decoder(tiny(layers=3), pages=pages, make_ops=IMPLEMENTATIONS[ops])
        return Engine({"target": target}, limits=Limits(nodes=nodes))

    expected = [s.output for s in run(engine(64, 64), prompts, ["plain"] * 10, sampled)]
    for pages, nodes in ((200, 256), (16, 48)):
        found = run(engine(pages, nodes), prompts, specs[:10], sampled)
        assert [s.output for s in found] == expected
        assert sum(s.counts.accepted for s in found if s.method.name == "prune") > 0
        assert pages > 16 or sum(s.counts.preempted for s in found) > 0


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_stored_hidden_states_are_those_of_survivors(ops: str) -> None:
    """The hidden states stored for draft heads, before the cut and after it, move with the KV."""
    found: list[list[Any]] = []
    for spec in ("plain", "prune:of=recycle:size=20,depth=4,layer=2,keep=12"):
        make = IMPLEMENTATIONS[ops]
        target = random_decoder(tiny(layers=3), features=(1, 3), make_ops=make)
        engine = Engine({"target": target})
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        sequence = engine.submit([1, 2, 3], params, registry.build(spec))
        while len(sequence.output) < 50:
            engine.step()
        table = sequence.tables["target"]
        found.append([target.feature(table, position) for position in range(50)])
        assert spec == "plain" or sequence.counts.accepted > 0
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


# --- what is cut off ----------------------------------------------------------------------------


def first_layers(
    config: DecoderConfig, count: int, make: Callable[[ModelWeights], Ops]
) -> tuple[Decoder, Decoder]:
    """A model that ends after some layers, and one that does not, with the same weights."""
    source = torch.Generator().manual_seed(4)
    tensors = {
        name: torch.randn(shape, generator=source) * (1.5 * shape[-1] ** -0.5)
        if len(shape) == 2
        else 1 + 0.1 * torch.randn(shape, generator=source)
        for name, shape in config.shapes().items()
    }
    short = tiny(layers=count)
    kept = {name: tensors[name].clone() for name in short.shapes()}
    return (
        Decoder.from_tensors(short, kept, pages=64, make_ops=make),
        Decoder.from_tensors(config, dict(tensors), pages=64, make_ops=make),
    )


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_early_candidates_are_those_of_the_first_layers_alone(ops: str) -> None:
    """Every cut is compared with a model that has no other layers, in plain passes."""
    layer, keep = 2, 6
    short, whole = first_layers(tiny(layers=4), layer, IMPLEMENTATIONS[ops])
    drafter = Watched(of="recycle:size=14,depth=3", layer=layer, keep=keep)
    method = Method("watched", drafter, MATCH, registry.build("prune").exactness)
    engine = Engine({"target": whole})
    for prompt in ([5, 6, 7], [90, 3]):
        engine.submit(prompt, SamplingParams(max_tokens=20, ignore_eos=True), method)
    while engine.busy:
        engine.step()
    cut = left = 0
    for tokens, graph, proposal in drafter.seen:
        expected = {0}
        for node in range(1, len(graph)):
            parent = int(graph.parents[node])
            above = [int(graph.tokens[n]) for n in graph.path(NodeId(parent))]
            row = logits(Hand(short, list(range(8))).run(chain([*tokens[:-1], *above])))[-1]
            predicted = np.argsort(-row, kind="stable")[:keep].tolist()
            if parent in expected and int(graph.tokens[node]) in predicted:
                expected.add(node)
        assert proposal.survivors == tuple(sorted(expected))
        left, cut = left + len(expected) - 1, cut + len(graph) - len(expected)
    assert cut > 20
    assert left > 20


def test_each_layer_sees_a_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layers see the tree, the others the survivors, in one pass each."""
    passes: list[tuple[tuple[int, int], int]] = []
    original = Toy.forward

    def forward(self: Toy, work: Sequence[PassInput]) -> PendingPass:
        for item in work:
            if item.proposal.layers is not None:
                assert item.first == 0
                passes.append((item.proposal.layers, len(item.proposal.graph)))
        return original(self, work)

    monkeypatch.setattr(Toy, "forward", forward)
    drafter = Watched(of="recycle:size=16", keep=2)
    Bench().run([[3, 4, 5]], toy_method(drafter, MATCH), SAMPLINGS["endless"])
    sizes = [(len(whole), len(rest.graph)) for _, whole, rest in drafter.seen]
    assert passes == [step for a, b in sizes for step in (((0, 1), a), ((1, 2), b))]
    assert sum(b for _, b in sizes) < 0.7 * sum(a for a, _ in sizes)


def test_keeping_all_candidates_prunes_nothing() -> None:
    """With as many candidates as there are tokens nothing is cut off, and passes are the drafter's."""
    prompts, params = some_prompts(7, 4), SAMPLINGS["sampled"]
    counts = []
    base = "recycle:size=12"
    for spec in (base, f"prune:of={base},keep=24", f"prune:of={base},keep=3"):
        found = Bench(nodes=512, pages=400).run(prompts, registry.build(spec), params)
        counts.append([(s.counts.passes, s.counts.proposed) for s in found])
    assert counts[0] == counts[1]
    whole, left = (sum(proposed for _, proposed in counts[i]) for i in (0, 2))
    assert left < 0.7 * whole


def test_labels_go_with_their_nodes() -> None:
    drafter = Watched(of="mix", keep=4)
    bench = Bench()
    found = bench.run(some_prompts(8, 6), toy_method(drafter, MATCH), SAMPLINGS["endless"])
    names = Counter(name for s in found for name in s.counts.sources)
    assert names
    assert all(set(name.split("+")) <= {"suffix", "recycle"} for name in names)
    assert any(rest.labels and len(rest.graph) < len(whole) for _, whole, rest in drafter.seen)
    for _, _, rest in drafter.seen:
        assert list(rest.labels) == list(range(1, len(rest.graph)))


# --- planted faults -----------------------------------------------------------------------------


def compare(method: Method) -> None:
    prompts, params = some_prompts(1, 5), SAMPLINGS["sampled"]
    expected = [alone(prompt, params) for prompt in prompts]
    same = [s.output for s in Bench().run(prompts, method, params)] == expected
    assert same  # a plain bool: the difference itself is of no interest


class Wrong(Prune):
    """Hands over the wrong hidden states or nodes."""

    def spoilt(self, proposal: Proposal) -> Proposal:
        raise NotImplementedError

    def propose(self, view: View, budget: int) -> Rounds:
        proposal = yield from super().propose(view, budget)
        if proposal.survivors is None or len(proposal.graph) < 3:
            return proposal
        return self.spoilt(proposal)


class WrongStates(Wrong):
    """A survivor goes on from the hidden state of the node next to it."""

    def spoilt(self, proposal: Proposal) -> Proposal:
        assert proposal.hidden is not None
        return replace(proposal, hidden=np.roll(proposal.hidden, 1, axis=0))


class OnlyOneWrongState(Wrong):
    """The last survivor goes on from the hidden state of the root."""

    def spoilt(self, proposal: Proposal) -> Proposal:
        assert proposal.hidden is not None
        hidden = proposal.hidden.copy()
        hidden[-1] = hidden[0]
        return replace(proposal, hidden=hidden)


@pytest.mark.parametrize("kind", [WrongStates, OnlyOneWrongState])
def test_hidden_states_of_other_nodes_are_noticed(kind: type[Prune]) -> None:
    options: dict[str, Any] = {"of": "recycle:size=12,depth=4", "keep": 6}
    compare(toy_method(Prune(**options), MATCH))
    with pytest.raises((AssertionError, IntegrityError)):
        compare(toy_method(kind(**options), MATCH))


def _stay(self: PagePool, table: Any, nodes: Sequence[int]) -> Moves:
    return Moves()


def _neighbours(self: PagePool, table: Any, nodes: Sequence[int]) -> Moves:
    """Takes the KV before a survivor's: most often that of a pruned node."""
    slots = self.slots(table, nodes[-1] + 1).tolist()
    wrong = [(slots[n - 1], slots[i]) for i, n in enumerate(nodes) if n != i]
    return Moves([source for source, _ in wrong], [target for _, target in wrong])


@pytest.mark.parametrize("fault", [_stay, _neighbours])
def test_kv_of_pruned_nodes_is_noticed(
    fault: Callable[..., Moves], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PagePool, "close_up", fault)
    with pytest.raises((AssertionError, IntegrityError)):
        compare(registry.build(SPEC))


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
@pytest.mark.parametrize("fault", [_stay, _neighbours])
def test_they_change_the_text_of_a_real_model(
    ops: str, fault: Callable[..., Moves], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The toy detects the wrong KV; with a decoder the text differs sooner or later."""
    prompts = [[i, i + 1] for i in range(0, 90, 9)]
    specs = ["prune:of=recycle:size=20,depth=4,layer=2,keep=12"] * len(prompts)

    def text(spec: list[str]) -> list[list[int]]:
        target = random_decoder(tiny(layers=3), pages=200, make_ops=IMPLEMENTATIONS[ops])
        return [s.output for s in run(Engine({"target": target}), prompts, spec, sampled=False)]

    plain = text(["plain"] * len(prompts))
    monkeypatch.setattr(PagePool, "close_up", fault)
    assert text(specs) != plain


class Choosy(Drafter):
    """Two rounds over a tree of three, of which it goes on with the given survivors."""

    def __init__(self, survivors: tuple[int, ...], graph: Callable[[TokenGraph], TokenGraph]):
        self.survivors, self.graph = survivors, graph

    def demand(self, view: View) -> Demand:
        return Demand(max_nodes=3 if view.end + 2 < view.limit else 0, gain=1.0)

    def propose(self, view: View, budget: int) -> Rounds:
        given = view.given()
        if budget < 3 or len(given) > 1:
            return Proposal(given, len(given))
        graph = drafted(given, [3, 4, 5], [-1, 0, -1], view.end)
        wide = Proposal(graph, 1, layers=(0, 1))
        found = yield replace(wide, wants=replace(wide.wants, hidden=(1,)))
        left = self.graph(graph)
        hidden = found.hidden[1][: len(left)]
        return Proposal(left, 1, layers=(1, 2), hidden=hidden, survivors=self.survivors)


@pytest.mark.parametrize(
    ("survivors", "graph", "complaint"),
    [
        ((0, 2), lambda g: g.part([0, 1]), "all nodes that its nodes see"),
        ((0, 1, 1), lambda g: g.part([0, 1, 2]), "rising order"),
        ((0, 3), lambda g: g.part([0, 1]), "graph or survivors"),
        ((1, 2), lambda g: g.part([0, 1]), "graph or survivors"),
        ((), lambda g: g.part([0]), "graph or survivors"),
    ],
)
def test_impossible_survivors_are_refused(
    survivors: tuple[int, ...], graph: Callable[[TokenGraph], TokenGraph], complaint: str
) -> None:
    """Children without parents, one twice, another graph, and nothing given."""
    bench = Bench()
    bad = bench.engine.submit(
        [3, 4, 5], SAMPLINGS["endless"], toy_method(Choosy(survivors, graph), MATCH)
    )
    good = bench.engine.submit([3, 4, 5], SAMPLINGS["greedy"], registry.build(SPEC))
    bench.finish()
    assert isinstance(bad.error, MethodFailed)
    assert complaint in str(bad.error)
    assert good.output == yardstick([3, 4, 5], SAMPLINGS["greedy"])


def test_rounds_follow_each_other() -> None:
    first = Proposal(chain([1], 0).grow(drafted(chain([2], 1), [3, 4], [-1, 0], 2)), 1)
    part = first.graph.part([0, 1])
    assert first.follows(None)
    assert not Proposal(part, 1, survivors=(0, 1)).follows(None)
    assert Proposal(part, 1, survivors=(0, 1)).follows(first)
    assert not Proposal(part, 1).follows(first)
    assert Proposal(part.grow(chain([9], 2)), 1, survivors=(0, 1)).follows(first)
    rounds = [first, replace(first, graph=first.graph.grow(chain([7], 4)))]
    assert all(later.follows(earlier) for earlier, later in pairwise(rounds))


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("prune:layer=-1", "needs layer"),
        ("prune:keep=0", "keep >= 1"),
        ("prune:of=early-exit", "cannot be pruned"),
        ("prune:of=lookahead", "cannot be pruned"),
        ("prune:of=auto", "cannot be pruned"),
        ("prune:of=prune", "cannot be pruned"),
        ("prune:of=draft:model=draft", "cannot be pruned"),
        ("prune:of=nothing", "unknown method"),
    ],
)
def test_senseless_options_are_refused(spec: str, complaint: str) -> None:
    with pytest.raises(UnknownMethod, match=complaint):
        registry.build(spec)


def test_a_model_that_has_no_more_layers_is_not_pruned() -> None:
    drafter = Watched(of="recycle:size=12", layer=2, keep=1)
    found = Bench().run([[3, 4, 5]], toy_method(drafter, MATCH), SAMPLINGS["endless"])
    assert not drafter.seen
    assert found[0].counts.accepted > 0
