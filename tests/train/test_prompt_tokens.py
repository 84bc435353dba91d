"""Prompt tokens: trained and decoding are the same function, and training makes them guess right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outstride import registry
from outstride.core.draft_heads import PromptTokensHead, head_of_kind
from outstride.core.graph import chain
from outstride.core.proposal import Wants
from outstride.errors import CorruptModel, UnknownMethod
from outstride.models.draft_heads import attach
from outstride.train import recipe
from outstride.train.prompt_tokens import PromptTokensRecipe
from outstride.train.target import Target
from tests.models.drive import Hand, logits
from tests.train.small import OPS, SAMPLINGS, decoder, said, trained, written
from tests.train.test_block_drafter import target, texts

registry.discover()


def made(own: Target | None = None, **options: Any) -> PromptTokensRecipe:
    torch.manual_seed(0)
    return PromptTokensRecipe(own or target(), **{"count": 2, "kept": 4, "anchors": 8, **options})


@pytest.mark.parametrize("window", [None, 5])
def test_the_engine_computes_what_was_trained(tmp_path: Path, window: int | None) -> None:
    config = replace(target().config, windows=(None, window))
    own = Target(config, dict(target().weights), "cpu")
    part, model = made(own), decoder(own)
    attach(model, "part", written(part, tmp_path))
    first = head_of_kind(model.draft_heads["part"], PromptTokensHead).first_token
    rows = texts().take(slice(0, 2))
    with torch.no_grad():
        scores, right, inside = part._scores(rows, torch.tensor([[7, 20], [9, 38]]))
    assert right[1].tolist() == [rows.tokens[1, 10:12].tolist(), rows.tokens[1, [39, 39]].tolist()]
    assert inside[1].tolist() == [[True, True], [True, False]]
    for row, anchor, at in ((0, 7, 0), (0, 20, 1), (1, 9, 0)):
        hand = Hand(model, [2, 0, 1])
        hand.read(rows.tokens[row, :anchor].tolist())
        graph = chain([first, first + 1], anchor, probe=True)
        found = logits(hand.run(graph, Wants(nodes=(0, 1), logits=True)))
        np.testing.assert_allclose(found, scores[row, at], atol=2e-3)


def test_training_raises_the_acceptance_rate(tmp_path: Path) -> None:
    train, held = texts().take(slice(0, 112)), texts().take(slice(112, 128))
    part = made()
    before = part.measure(held)
    losses = trained(part, train, 100, rate=3e-2)
    after = part.measure(held)
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert after.tokens_per_pass > before.tokens_per_pass + 0.15
    ranks = part.state()["ranks"]
    assert bool((ranks.sum(1) <= 1).all())
    assert ranks[0, 0] == ranks[0].max()
    prompts = [row[:4].tolist() for row in held.tokens[:6]]
    for ops in sorted(OPS):
        model = decoder(target(), ops)
        attach(model, "part", written(part, tmp_path / ops))
        for spec in (
            "prompt-tokens:from=part,nodes=2",
            "prompt-tokens:from=part,nodes=6,min_prob=0",
        ):
            for params in SAMPLINGS:
                plain, _ = said(model, registry.build("plain"), prompts, **params)
                found, rate = said(model, registry.build(spec), prompts, **params)
                assert found == plain
                assert rate > 1.1


def test_padding_has_no_loss() -> None:
    rows, part = texts().take(slice(0, 1)), made()
    stop = int(rows.stops[0])
    other, changed = (replace(rows, tokens=rows.tokens.clone()) for _ in range(2))
    other.tokens[:, stop:] = 7
    changed.tokens[:, stop - 1] = 7
    one, two, three = (
        part.loss(given, torch.Generator().manual_seed(1)).item()
        for given in (rows, other, changed)
    )
    assert one == two != three


def test_options_are_checked(tmp_path: Path) -> None:
    entry = recipe.entry("prompt-tokens")
    for text, about in [("count=0", "1 or more"), ("kept=17", "1 to 16"), ("decay=2", "up to 1")]:
        with pytest.raises(UnknownMethod, match=about):
            recipe.build(entry, target(), recipe.options(entry, text), 1)
    with pytest.raises(UnknownMethod, match="min_prob from 0 to 1"):
        registry.build("prompt-tokens:from=part,min_prob=2")
    part = made()
    part.weights = {}
    with pytest.raises(CorruptModel, match="prompt"):
        attach(decoder(target()), "part", written(part, tmp_path))
