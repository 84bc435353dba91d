"""Draft models: trees, acceptance rates, and drafting while the target verifies."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.core.contracts import Drafter, PassInput, PendingPass
from outstride.core.draft_tree import DraftTree
from outstride.core.sampling import Purpose, SamplingSpec, gumbel, independent
from outstride.core.sequence import Sequence
from outstride.draft.draft import DraftModelDrafter
from outstride.draft.sampled import sample_top
from outstride.draft.tree_expansion import Branch, best_paths, noise_of
from outstride.engine.engine import Engine
from outstride.engine.scheduler import Limits
from outstride.errors import UnknownMethod
from outstride.models.toy import Toy
from tests.conformance.harness import SAMPLINGS, Bench, some_prompts


def rate(spec: str, sampling: str = "sampled", nodes: int = 400) -> float:
    """Tokens per pass."""
    bench = Bench(nodes=nodes, pages=300)
    found = bench.run(some_prompts(4, 5), registry.build(spec), SAMPLINGS[sampling])
    return sum(s.counts.emitted for s in found) / sum(s.counts.passes for s in found)


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_a_tree_accepts_more_than_a_chain(sampling: str) -> None:
    """It accepts no less with the same number of nodes."""
    chain = rate("draft:model=draft,length=4", sampling)
    assert rate("draft:model=draft,length=4,width=3,nodes=4", sampling) > chain - 0.1
    assert rate("draft:model=draft,length=4,width=3,nodes=16", sampling) > chain + 0.3


def asked(
    spec: str, sampling: str = "sampled", budget: int = 64
) -> tuple[list[DraftTree], Sequence]:
    """The trees that a drafter proposed for one request."""
    method, drafts = registry.build(spec), []
    original = type(method.drafter).draft_tree

    class Listening(type(method.drafter)):  # type: ignore[misc]
        def draft_tree(self, view: Any, budget: int) -> Any:
            draft = yield from original(self, view, budget)
            drafts.append(draft)
            return draft

    method.drafter.__class__ = Listening
    [sequence] = Bench(nodes=budget).run([[3, 4, 5]], method, SAMPLINGS[sampling])
    return [draft for draft in drafts if len(draft)], sequence


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "filtered"])
def test_rates_of_siblings_are_ordered_and_sum_to_one(sampling: str) -> None:
    drafts, _ = asked("draft:model=draft,length=4,width=3,nodes=9", sampling)
    assert drafts
    for draft in drafts:
        assert len(draft) <= 9
        assert all(0 < rate <= 1 for rate in draft.rates)
        for parent in {*draft.parents}:
            children = [i for i, above in enumerate(draft.parents) if above == parent]
            assert len({draft.tokens[i] for i in children}) == len(children)
            ranks = [draft.keys[i].key[0] for i in children]
            assert ranks == list(range(len(ranks))), "better siblings stay first"
            rates = [draft.rates[i] for i in children]
            assert sum(rates) < 1.0 + 1e-6
    held = {
        key.key: rate for draft in drafts for key, rate in zip(draft.keys, draft.rates, strict=True)
    }
    assert len(held) > 5


def test_a_bare_chain_asks_for_tokens_alone() -> None:
    """No row of logits has to leave the pass then."""
    assert DraftModelDrafter(model="draft").asks.logprobs is None
    assert DraftModelDrafter(model="draft", width=2).asks.logprobs is not None


def test_a_draft_ends_where_its_rate_is_low() -> None:
    long, _ = asked("draft:model=draft,length=6")
    short, _ = asked("draft:model=draft,length=6,min_prob=0.3")
    assert np.mean([len(g) for g in short]) < np.mean([len(g) for g in long])
    assert rate("draft:model=draft,length=6,min_prob=0.3") > 1.3


def test_pruning_keeps_paths_whole() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        written: list[Branch] = []
        for place in range(20):
            parent = int(rng.integers(-1, place))
            top = 0.0 if parent < 0 else written[parent].score
            score = top - float(rng.integers(2))  # ties, too
            written.append(Branch(place, parent, place=place, score=score))
        kept = best_paths(written, 7)
        assert len(kept) == 7
        for i, branch in enumerate(kept):
            assert branch.place == i
            assert branch.parent < i
            above = written[branch.token].parent
            assert (kept[branch.parent].token if branch.parent >= 0 else -1) == above


@pytest.mark.parametrize(
    "spec", ["draft:length=3", "draft:model=x,nodes=-1", "draft:model=x,min_prob=1"]
)
def test_invalid_options_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod):
        registry.build(spec)


# --- own draws ------------------------------------------------------------------------------------


def test_noise_of_tokens_in_any_order() -> None:
    draw = SamplingSpec(temperature=1.0, seed=5)
    whole = gumbel(draw, 7, np.arange(12))
    for tokens in ([3, 1], [2, 0, 1], [11, 4], [0, 5, 2]):
        np.testing.assert_array_equal(noise_of(draw, 7, tokens), whole[tokens])


def test_samples_without_replacement() -> None:
    row = np.asarray([0.0, 0.5, 0.2, 0.0, 0.3], dtype=np.float32)
    firsts = np.zeros(5)
    for seed in range(2000):
        draw = SamplingSpec(temperature=1.0, seed=seed, purpose=Purpose.DRAFT)
        tokens, values = sample_top(row, draw, 3, 4)
        assert sorted(tokens.tolist()) == [1, 2, 4], "as many as there are"
        assert (np.diff(values) <= 0).all()
        firsts[tokens[0]] += 1
    np.testing.assert_allclose(firsts / 2000, row, atol=0.04)


def test_independent_keys() -> None:
    draw = SamplingSpec(seed=1)
    seeds = {independent(draw, step, branch).seed for step in range(30) for branch in range(-1, 9)}
    assert len(seeds) == 300
    assert independent(draw, 2, 3) == independent(draw, 2, 3) != independent(draw, 3, 2)
    assert independent(draw) == draw


# --- while the target works -----------------------------------------------------------------------


class Watched(Toy):
    """Records when passes begin and when they are waited for."""

    def __init__(self, name: str, notes: list[str], **options: Any) -> None:
        super().__init__(**options)
        self._name, self._notes = name, notes

    def forward(self, work: Seq[PassInput]) -> PendingPass:
        done, notes, name = super().forward(work), self._notes, self._name

        class Later:
            started = False

            def start(self) -> None:
                self.started = True
                notes.append(name)

            def wait(self) -> Any:
                if not self.started:
                    notes.append(name)
                notes.append(f"{name} done")
                return done.wait()

        return Later()


def notes_of(spec: str) -> tuple[list[str], Sequence]:
    notes: list[str] = []
    models = {"target": Watched("target", notes), "draft": Watched("draft", notes, accent=1)}
    engine = Engine(models, limits=Limits(nodes=64))
    sequence = engine.submit([3, 4], SAMPLINGS["endless"], registry.build(spec))
    while engine.busy:
        engine.step()
    assert sequence.error is None
    return notes, sequence


def test_pearl_never_makes_the_target_wait() -> None:
    """Every pass of the draft model lies between a target's start and its end."""
    notes, sequence = notes_of("pearl:model=draft,length=3")
    assert sequence.counts.accepted > 0
    working = False
    for note in notes:
        if note.startswith("target"):
            working = note == "target"
        elif note == "draft":
            assert working
    waited, _ = notes_of("draft:model=draft,length=3")
    assert waited.index("draft") < waited.index("target")


def test_more_branches_survive_more_often() -> None:
    one, many = (rate(f"pearl:model=draft,length=3,width={width}") for width in (1, 4))
    assert many > one + 0.1


def test_a_perfect_draft_model_is_always_right() -> None:
    """The target as its own draft model: every drafted token is accepted."""
    for spec in ("draft:model=draft,length=3", "pearl:model=draft,length=3", "rsd:model=draft"):
        for sampling in ("greedy", "sampled"):
            params = replace(SAMPLINGS[sampling], ignore_eos=True)
            engine = Engine({"target": Toy(), "draft": Toy()}, limits=Limits(nodes=64))
            sequence = engine.submit([3, 4], params, registry.build(spec))
            while engine.busy:
                engine.step()
            counts = sequence.counts
            if not spec.startswith("rsd"):
                assert counts.accepted == counts.proposed
            assert counts.emitted / counts.passes > 2.8


def test_drafters_with_a_draft_model_name_it() -> None:
    for entry in registry.entries():
        if "draft model" in entry.needs:
            required = {option.name for option in entry.options if option.required}
            head = ",from=p" if "from" in required else ""
            drafter: Drafter = registry.build(f"{entry.name}:model=m{head}").drafter
            assert drafter.models == ("m",)
