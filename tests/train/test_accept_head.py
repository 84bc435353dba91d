"""The accept-head and the judge: what they learn, and what drafts and texts become by them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outstride import registry
from outstride.core.draft_tree import scaled_logit
from outstride.core.graph import chain
from outstride.core.proposal import Wants
from outstride.errors import UnknownMethod
from outstride.models.draft_heads import attach
from outstride.train import recipe
from outstride.train.accept_head import LONGEST, STOP, AcceptHeadRecipe, JudgeRecipe, ranking_area
from outstride.train.target import Target
from tests.models.drive import Hand
from tests.train.small import decoder, said, trained, written
from tests.train.test_block_drafter import target, texts

registry.discover()


@lru_cache(maxsize=1)
def drafting() -> Target:
    """The same model with other weights here and there: often, but not always, of one mind with it."""
    numbers = torch.Generator().manual_seed(9)
    weights = {
        name: value + 0.12 * value.std() * torch.randn(value.shape, generator=numbers)
        for name, value in target().weights.items()
    }
    return Target(target().config, weights, "cpu")


def made(kind: type[AcceptHeadRecipe | JudgeRecipe], own: Target, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(own, **{"inner": 32, **options})


def test_area_is_the_share_of_pairs_in_order() -> None:
    scores, right = torch.tensor([0.1, 0.9, 0.4, 0.6]), torch.tensor([False, True, True, False])
    assert ranking_area(scores, right) == 0.75
    assert ranking_area(-scores, right) == 0.25
    assert ranking_area(scores, torch.ones(4).bool()) == 0.5


def test_the_head_foresees_what_holds(tmp_path: Path) -> None:
    train, held = texts().take(slice(0, 96)), texts().take(slice(96, 128))
    head = made(AcceptHeadRecipe, drafting())
    before = head.measure(held)
    trained(head, train, 100, rate=1e-2)
    after = head.measure(held)
    assert before.figures["area"] < 0.6
    assert after.figures["area"] > 0.75
    assert after.tokens_per_pass > before.tokens_per_pass + 0.3
    # In the engine: plain's text, and less of a draft is thrown away than at a fixed length.
    model, draft = decoder(target()), decoder(drafting())
    attach(draft, "head", written(head, tmp_path))
    model.filters["head"] = draft.filters["head"]
    prompts, both = [row[:4].tolist() for row in held.tokens[:8]], {"target": model, "draft": draft}
    plain, _ = said(model, registry.build("plain"), prompts)
    spent = {}
    for spec in ("accept-head:model=draft,from=head", f"draft:model=draft,length={LONGEST}"):
        found, rate, counts = _counted(both, spec, prompts)
        assert found == plain
        spent[spec[:5]] = counts, rate
    (proposed, accepted), rate = spent["accep"]
    (every, kept), highest = spent["draft"]
    assert proposed - accepted < 0.7 * (every - kept)
    assert rate > 0.75 * highest


def _counted(models: Any, spec: str, prompts: list[list[int]]) -> tuple[Any, float, Any]:
    sequences: list[Any] = []
    outputs, rate = said(models, registry.build(spec), prompts, seen=sequences)
    counts = [sum(getattr(s.counts, n) for s in sequences) for n in ("proposed", "accepted")]
    return outputs, rate, tuple(counts)


def test_the_measure_is_that_of_drafts_along_a_text() -> None:
    head, rows = made(AcceptHeadRecipe, drafting()), texts().take(slice(0, 2))
    head.weights["outer.weight"] = torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
    shown, right, _ = head._drafts(rows)
    rates = head._logits(shown).sigmoid()
    passes = drafted = taken = 0
    for row in range(2):
        at, stop = 3, int(rows.stops[row])
        while at < stop - 1:
            size, reached = 0, 1.0
            while size < LONGEST and reached >= STOP and at + size < stop - 1:
                reached *= float(rates[row, at + size])
                size += 1
            hits = 0
            while hits < size and bool(right[row, at + hits]):
                hits += 1
            passes, drafted, taken, at = passes + 1, drafted + size, taken + hits, at + hits + 1
    found = head.measure(rows)
    assert found.figures["drafted_per_pass"] == pytest.approx(drafted / passes)
    assert found.figures["wasted"] == pytest.approx(1 - taken / drafted)
    assert found.tokens_per_pass == pytest.approx(int((rows.stops - 4).sum()) / passes)


def test_only_greedy_texts_are_labels() -> None:
    head, rows = made(AcceptHeadRecipe, drafting()), texts().take(slice(0, 4))
    mixed = replace(rows, sampled=torch.tensor([True, False, False, True]))
    _, _, counted = head._examples(mixed, torch.Generator())
    assert counted.any(1).tolist() == [False, True, True, False]
    assert int(counted[1].sum()) == int(rows.stops[1]) - 4
    _, _, counted = head._examples(replace(rows, sampled=torch.ones(4).bool()), torch.Generator())
    assert bool(counted.any(1).all())


def test_the_engine_judges_as_it_was_trained(tmp_path: Path) -> None:
    head = made(AcceptHeadRecipe, target())
    numbers = torch.Generator().manual_seed(4)
    for name, value in head.weights.items():
        head.weights[name] = value + 0.5 * torch.randn(value.shape, generator=numbers)
    model = decoder(target())
    attach(model, "head", written(head, tmp_path))
    hand, rows = Hand(model, [2, 0, 1]), texts().take(slice(0, 1))
    judge, graph = model.filters["head"], chain(rows.tokens[0].tolist(), 0)
    wants = Wants(nodes=tuple(range(len(graph))), logprobs=0, hidden=(judge.layer,))
    scores = hand.run(graph, wants)
    right = head._logits(head._drafts(rows)[0]).sigmoid()[0]
    for node, [(_, logprob)] in enumerate(scores.logprobs):
        state = scores.hidden[judge.layer][node : node + 1]
        found = judge.of_hidden_states(state, scaled_logit(logprob))[0]
        assert found == pytest.approx(float(right[node]), abs=2e-3)


def test_the_judge_tells_own_tokens_from_others(tmp_path: Path) -> None:
    train, held = texts().take(slice(0, 96)), texts().take(slice(96, 128))
    judge = made(JudgeRecipe, target(), ranks=20)
    before = judge.measure(held)
    trained(judge, train, 100, rate=1e-2)
    after = judge.measure(held)
    assert before.figures["area"] < 0.6
    assert after.figures["area"] > 0.7
    assert after.figures["passed_wrong"] < after.figures["passed_right"]
    model, draft = decoder(target()), decoder(drafting())
    attach(model, "judge", written(judge, tmp_path))
    both = {"target": model, "draft": draft}
    prompts = [row[:4].tolist() for row in held.tokens[:8]]
    plain, _ = said(model, registry.build("plain"), prompts)
    strict, lowest = said(both, registry.build("judge:model=draft,from=judge,sure=1"), prompts)
    assert strict == plain  # who passes nothing changes nothing
    loose, highest = said(both, registry.build("judge:model=draft,from=judge,sure=0.3"), prompts)
    assert loose != plain
    assert highest > lowest


def test_negatives_are_other_tokens_of_the_answer() -> None:
    judge, rows = made(JudgeRecipe, target(), share=0.5, ranks=5), texts().take(slice(0, 6))
    _, right, counted = judge._examples(rows, torch.Generator().manual_seed(1))
    assert bool(right[~counted].all())
    assert 0.3 < float((~right[counted]).float().mean()) < 0.7


def test_options_are_checked() -> None:
    for name, text, about in [
        ("accept-head", "inner=0", "inner of 1"),
        ("judge", "share=1", "between 0 and 1"),
        ("judge", "ranks=1", "from 2"),
    ]:
        entry = recipe.entry(name)
        with pytest.raises(UnknownMethod, match=about):
            recipe.build(entry, target(), recipe.options(entry, text), 1)
    for spec, about in [
        ("accept-head:model=m,from=f,stop=1", "stop between"),
        ("judge:model=m,from=f,sure=0", "sure above 0"),
    ]:
        with pytest.raises(UnknownMethod, match=about):
            registry.build(spec)
