"""Heads: trained and decoding are the same function, training makes them right, text stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outstride import registry
from outstride.core.draft_heads import MedusaDraftHead, head_of_kind
from outstride.core.graph import chain, tree
from outstride.core.proposal import Wants
from outstride.errors import CorruptModel, UnknownMethod, UnsupportedModel
from outstride.models.draft_heads import attach
from outstride.train import recipe
from outstride.train.heads import HeadsRecipe, head_hidden
from tests.models.drive import Hand
from tests.train.small import OPS, SAMPLINGS, decoder, said, trained, written
from tests.train.test_block_drafter import target, texts

registry.discover()


def made(*, shaken: bool = True, **options: Any) -> HeadsRecipe:
    """Heads; shaken, none of their weights is as it was made, so that all of them count."""
    torch.manual_seed(0)
    found = HeadsRecipe(target(), **{"heads": 3, "anchors": 8, "inner": 40, **options})
    found.prepare(texts())
    numbers = torch.Generator().manual_seed(2)
    for name, value in found.weights.items() if shaken else ():
        found.weights[name] = value + 0.2 * torch.randn(value.shape, generator=numbers)
    return found


@pytest.mark.parametrize("ops", sorted(OPS))
@pytest.mark.parametrize("chained", [True, False])
def test_the_engine_asks_what_was_trained(tmp_path: Path, ops: str, chained: bool) -> None:
    heads = made(chained=chained, cover=0.8)
    model = decoder(target(), ops)
    attach(model, "part", written(heads, tmp_path))
    head = head_of_kind(model.draft_heads["part"], MedusaDraftHead)
    tokens = texts().tokens[0, :21].tolist()
    hand = Hand(model, [2, 0, 1])
    hand.read(tokens[:20])
    low, high = head.feature_range
    state = model.feature(hand.table, 19)[low:high]
    last = target().hidden_states(texts().tokens[:1, :20], (2,))[2][0, 19]
    close = 2e-3 if ops == "reference" else 0.1
    np.testing.assert_allclose(state, last, atol=close)
    front = [*tokens[20:], 7, 9]
    told = target().embedding[torch.tensor(front)] if chained else None
    right = head_hidden(heads.weights, 3, target().config.norm_eps, torch.from_numpy(state), told)
    states = np.repeat(state[None], 3, axis=0)
    wants = Wants(nodes=(0, 1, 2), best=6, hidden=(0,))
    if chained:  # each goes on from what left the one before it
        for depth in (1, 2):
            ask = Wants(nodes=(depth - 1,), hidden=(0,))
            passed = hand.run(chain(front, 20), ask, draft_head="part", hidden=states)
            states[depth] = passed.hidden[0][0]
    scores = hand.run(chain(front, 20), wants, draft_head="part", hidden=states)
    values = right.detach().numpy() @ heads._head.numpy().T
    assert scores.values is not None
    for row in range(3):
        places = np.searchsorted(heads.vocabulary.numpy(), scores.best[row])
        spread = float(np.abs(values[row]).max())
        np.testing.assert_allclose(scores.values[row], values[row][places], atol=close * spread)
        if ops == "reference":
            assert places.tolist() == np.argsort(-values[row], kind="stable")[:6].tolist()


@pytest.mark.parametrize("ops", sorted(OPS))
def test_a_row_does_not_depend_on_the_batch(tmp_path: Path, ops: str) -> None:
    heads, model = made(), decoder(target(), ops)
    attach(model, "part", written(heads, tmp_path))
    hand = Hand(model, [2, 0, 1])
    states = np.random.default_rng(0).normal(size=(6, 48)).astype(np.float32)
    graph = tree([5, 6, 7, 8, 9, 10], [-1, 0, 0, 0, 1, 1], 20)
    nodes = (0, 1, 2, 3, 4, 5)
    whole = hand.run(graph, Wants(nodes=nodes, best=5), draft_head="part", hidden=states)
    assert whole.values is not None
    for node in nodes:
        one = hand.run(graph, Wants(nodes=(node,), best=5), draft_head="part", hidden=states)
        np.testing.assert_array_equal(one.best[0], whole.best[node])
        np.testing.assert_array_equal(np.asarray(one.values)[0], whole.values[node])


@pytest.mark.parametrize("chained", [True, False])
def test_training_raises_the_acceptance_rate(tmp_path: Path, chained: bool) -> None:
    train, held = texts().take(slice(0, 112)), texts().take(slice(112, 128))
    heads = made(shaken=False, chained=chained)
    before = heads.measure(held)
    losses = trained(heads, train, 120)
    after = heads.measure(held)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert before.tokens_per_pass < 1.5  # what repeats itself is guessed by saying it again
    assert after.tokens_per_pass > before.tokens_per_pass + 0.3
    assert list(after.by_depth) == sorted(after.by_depth, reverse=True)
    # The same in the engine: fewer passes than plain, and plain's text, greedy and sampled.
    model, prompts = decoder(target()), [row[:4].tolist() for row in held.tokens[:6]]
    attach(model, "part", written(heads, tmp_path / "part"))
    chain_of = registry.build("heads:from=part,width=1,nodes=3")
    for params in SAMPLINGS:
        plain, _ = said(model, registry.build("plain"), prompts, **params)
        texts_of, rate = said(model, chain_of, prompts, **params)
        assert texts_of == plain
        assert rate > (1.2 if params else 0.75 * after.tokens_per_pass)
        assert said(model, registry.build("heads:from=part"), prompts, **params)[0] == plain


def test_untrained_heads_say_what_the_target_says() -> None:
    heads = made(shaken=False, chained=False)
    rows = texts().take(slice(0, 4))
    anchors = torch.full((4, 1), 9)
    scores, _, _ = heads._scores(rows, anchors, heads._last_hidden(rows))
    own = target().logits(heads._last_hidden(rows)[:, 8])[:, heads.vocabulary]
    for head in range(3):
        torch.testing.assert_close(scores[:, 0, head], own, rtol=1e-4, atol=1e-4)


def test_padding_has_no_loss() -> None:
    rows = texts().take(slice(0, 1))
    stop, heads = int(rows.stops[0]), made()
    other, changed = (replace(rows, tokens=rows.tokens.clone()) for _ in range(2))
    other.tokens[:, stop:] = 7
    changed.tokens[:, stop - 1] = 7
    one, two, three = (
        heads.loss(given, torch.Generator().manual_seed(1)).item()
        for given in (rows, other, changed)
    )
    assert one == two != three


def test_options_are_checked() -> None:
    entry = recipe.entry("heads")
    for text, about in [
        ("heads=0", "1 or more"),
        ("inner=-1", "0 or more"),
        ("decay=0", "above 0"),
    ]:
        with pytest.raises(UnknownMethod, match=about):
            recipe.build(entry, target(), recipe.options(entry, text), 1)
    assert HeadsRecipe(target()).inner == 96
    for text in ("nodes=0", "width=17"):
        with pytest.raises(UnknownMethod, match="needs nodes"):
            registry.build(f"heads:from=part,{text}")


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, model = made(), decoder(target())
    del heads.weights["heads.2.last.weight"]
    with pytest.raises(CorruptModel, match="last"):
        attach(model, "part", written(heads, tmp_path / "short"))
    monkeypatch.setattr(model.ops.draft_heads, "unsupported_draft_head", lambda weights: "too big")
    with pytest.raises(UnsupportedModel, match=r"reference .* cannot run this draft head: too big"):
        attach(model, "part", written(made(), tmp_path / "whole"))
