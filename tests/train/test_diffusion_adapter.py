"""The diffusion adapter: what is trained is what runs, what counts, and what training gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outstride.core.graph import block
from outstride.errors import UnknownMethod
from outstride.models.decoder import Decoder
from outstride.models.diffusion import Diffusion
from outstride.models.draft_heads import attach
from outstride.train import diffusion_adapter as module
from outstride.train import recipe
from outstride.train.block_sizes import shares
from outstride.train.checkpoint import packed, write_model
from outstride.train.corpus_files import TrainingRows
from outstride.train.diffusion_adapter import DiffusionAdapterRecipe
from outstride.train.loop import advance, optimizer_of, rate_at
from outstride.train.target import Target
from tests.models.drive import Hand, logits
from tests.train.test_block_drafter import target, texts


def made(
    own: Target | None = None, *, shaken: bool = True, **options: Any
) -> DiffusionAdapterRecipe:
    """An adapter; shaken, none of its weights is as it was made, so that all of them count."""
    values: dict[str, Any] = {"rank": 3, "sizes": "2,4,8", "nodes": 32, **options}
    torch.manual_seed(0)
    found = DiffusionAdapterRecipe(own or target(), **values)
    found.prepare(texts())
    numbers = torch.Generator().manual_seed(2)
    for name, value in found.weights.items() if shaken else ():
        found.weights[name] = value + 0.2 * torch.randn(value.shape, generator=numbers)
    return found


def scores_of(
    adapter: DiffusionAdapterRecipe, rows: TrainingRows, firsts: Any, masks: Any
) -> torch.Tensor:
    """What the nodes of blocks of one size say: [rows, blocks, size, vocabulary]."""
    blocks = adapter._blocks(rows, [(firsts, masks)])
    states = adapter._block_hidden(adapter.context_hidden(rows, final=False), blocks)
    return (states @ target().head.T).view(*masks.shape, -1)


@pytest.mark.parametrize("window", [None, 9])
def test_what_is_trained_is_what_runs(tmp_path: Path, window: int | None) -> None:
    """Blocks behind a text that the model has read, through the engine's own operations."""
    own = target()
    if window is not None:
        config = replace(own.config, windows=(window, None), rope_layers=(True, False))
        own = Target(config, dict(own.weights), "cpu")
    adapter, rows = made(own), texts().take(torch.tensor([0, 5]))
    adapter.weights = {name: value.half().float() for name, value in adapter.weights.items()}
    about = {"outstride": adapter.name, "target": dict(own.about())}
    write_model(
        tmp_path, {**about, **adapter.config()}, {**adapter.weights, **adapter.state()}, int8=False
    )
    model = Decoder.from_tensors(
        own.config, {n: v.clone() for n, v in own.weights.items()}, pages=8
    )
    attach(model, "adapter", tmp_path)
    assert model.masked_spec is not None
    mask, size = model.masked_spec.token, 8
    masks = torch.rand(2, 2, size, generator=torch.Generator().manual_seed(1)) < 0.6
    firsts = torch.tensor([[9, 20], [4, 16]])
    found = scores_of(adapter, rows, firsts, masks)
    for row in range(2):
        said = rows.tokens[row].tolist()
        for i, first in enumerate(firsts[row].tolist()):
            hand = Hand(model, [3, 1, 5])
            hand.read(said[:first])
            open_ = [True, *masks[row, i].tolist()]
            inputs = [mask if open_[j] else said[first + j] for j in range(size)]
            ran = torch.from_numpy(logits(hand.run(block(inputs, first))))
            torch.testing.assert_close(ran, found[row, i], rtol=1e-3, atol=1e-3)


def test_what_counts_is_open_and_within_the_text() -> None:
    adapter, rows = made(), texts().take(slice(0, 1))
    assert int(rows.stops[0]) == 29
    masks = torch.tensor([[[True, False, True, True], [True, True, True, True]]])
    blocks = adapter._blocks(rows, [(torch.tensor([[10, 26]]), masks)])
    assert blocks.masked.tolist() == [[True, True, False, True, True, True, True, True]]
    assert blocks.counted.tolist() == [[True, False, True, True, True, True, False, False]]
    assert blocks.places.tolist() == [[10, 11, 12, 13, 26, 27, 28, 29]]
    assert blocks.targets[0, :4].tolist() == rows.tokens[0, 11:15].tolist()
    # What stands behind a text, and what a mask hides, teaches nothing.
    other = rows.tokens.clone()
    other[:, 29:] = 7
    one, two, three = (
        adapter.loss(replace(rows, tokens=tokens), torch.Generator().manual_seed(1)).item()
        for tokens in (rows.tokens, other, rows.tokens.roll(1, 1))
    )
    assert one == two != three


def test_masks_are_complementary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come in pairs with opposite masks at one place, or are nothing but masks."""
    adapter, rows = made(whole=0.3), texts().take(slice(0, 40))
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    blocks = adapter._blocks

    def noted(rows: TrainingRows, given: Any) -> module.MaskedBlocks:
        parts.extend(given)
        return blocks(rows, given)

    monkeypatch.setattr(adapter, "_blocks", noted)
    adapter.progress = 0.9
    adapter.loss(rows, torch.Generator().manual_seed(4))
    assert [masks.shape[2] for _, masks in parts] == [8, 4, 2]
    assert sum(masks.shape[1] * masks.shape[2] for _, masks in parts) == 32
    whole = others = 0
    for firsts, masks in parts:
        for row in range(len(rows)):
            pairs = zip(
                firsts[row].view(-1, 2), masks[row].view(-1, 2, masks.shape[2]), strict=True
            )
            for (one, two), (left, right) in pairs:
                if bool((left & right).all()):
                    whole += 1
                    continue
                others += 1
                assert one == two
                assert torch.equal(left, ~right)
            assert int(firsts[row].min()) >= int(rows.starts[row])
            assert int(firsts[row].max()) < int(rows.stops[row]) - 1
    assert 0.15 < whole / (whole + others) < 0.45


def test_blocks_grow_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, seen = made(), []
    blocks = adapter._blocks

    def noted(rows: TrainingRows, given: Any) -> module.MaskedBlocks:
        seen.append(max(masks.shape[2] for _, masks in given))
        return blocks(rows, given)

    monkeypatch.setattr(adapter, "_blocks", noted)
    for progress in (0.0, 0.3, 0.5, 0.99):
        adapter.progress = progress
        adapter.loss(texts().take(slice(0, 2)), torch.Generator().manual_seed(1))
    assert seen == [2, 4, 8, 8]
    assert shares((2, 4, 8, 16, 32), 256) == [(32, 1), (16, 1), (8, 3), (4, 7), (2, 14)]


def test_many_scores_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, rows, found = made(soft=0.3), texts().take(slice(0, 4)), []
    for at_once in (1 << 28, 64 * 23):
        monkeypatch.setattr(module, "_AT_ONCE", at_once)
        for value in adapter.weights.values():
            value.requires_grad_().grad = None
        loss = adapter.loss(rows, torch.Generator().manual_seed(1))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.item(), {name: v.grad for name, v in adapter.weights.items()}))
    (one, slopes), (two, others) = found
    assert one == pytest.approx(two, rel=1e-5)
    for name, slope in slopes.items():
        assert slope is not None, f"{name} is not trained"
        assert slope.abs().max() > 0, f"{name} is not trained"
        torch.testing.assert_close(slope, others[name], rtol=1e-3, atol=1e-5)


def test_training_raises_the_acceptance_rate() -> None:
    train, held = texts().take(slice(0, 112)), texts().take(slice(112, 128))
    adapter = made(shaken=False, rank=8)
    before = adapter.measure(held)
    optimizer, numbers, steps = optimizer_of(adapter.weights), torch.Generator().manual_seed(3), 160
    for step in range(steps):
        adapter.progress = step / steps
        batch = train.take(torch.randint(len(train), (16,), generator=numbers))
        rate = rate_at(step, steps, 1e-2)
        advance(
            lambda batch=batch: adapter.loss(batch, numbers),  # type: ignore[misc]
            adapter.weights,
            optimizer,
            rate,
        )
    after = adapter.measure(held)
    assert before.tokens_per_pass < 1.1
    assert after.tokens_per_pass > 1.3
    assert list(after.by_depth) == sorted(after.by_depth, reverse=True)
    assert after.figures["loss_ar"] == before.figures["loss_ar"]
    for size in (2, 4, 8):
        assert after.figures[f"loss_{size}"] < 0.7 * before.figures[f"loss_{size}"]


def test_drafts_are_measured_as_they_are_used() -> None:
    """Along a decode: masks from the last settled token on guess what follows it."""
    adapter, rows = made(), texts().take(slice(0, 2))
    passes = emitted = 0
    for row in range(2):
        one, stop = rows.take(slice(row, row + 1)), int(rows.stops[row])
        said, at = rows.tokens[row].tolist(), int(rows.starts[row])
        emitted, passes = emitted + stop - at, passes + 1  # the pass over the prompt drafts nothing
        while at < stop - 1:
            masks = torch.ones(1, 1, 8, dtype=torch.bool)
            guesses = scores_of(adapter, one, torch.tensor([[at]]), masks).argmax(-1)[0, 0]
            hits = [a == b for a, b in zip(guesses.tolist(), said[at + 1 : stop], strict=False)]
            at += [*hits, False].index(False) + 1
            passes += 1
    assert adapter.measure(rows).tokens_per_pass == pytest.approx(emitted / passes)


def test_an_untrained_adapter_adds_nothing() -> None:
    """Masks are all that it changes before it is trained."""
    adapter = made(shaken=False)
    added = [value for name, value in adapter.weights.items() if name.endswith(".high")]
    assert len(added) == 7
    assert not any(value.any() for value in added)


def test_an_adapter_is_small() -> None:
    """At rank 8, for a model of the default one's shape, in 8 bits."""
    shape = replace(
        target().config,
        vocab_size=256,
        hidden_size=576,
        intermediate_size=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        rope_layers=(True,) * 30,
        windows=(None,) * 30,
    )
    weights = {name: torch.zeros(size) for name, size in shape.shapes().items()}
    adapter = DiffusionAdapterRecipe(Target(shape, weights, "cpu"))
    stored = packed(adapter.weights, int8=True)
    assert sum(value.numel() * value.element_size() for value in stored.values()) < 2.6e6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank"),
        ({"whole": 1.5}, "whole"),
        ({"sizes": "4,2"}, "rising"),
        ({"sizes": "two"}, "rising"),
        ({"sizes": "2,5"}, "multiples"),
        ({"sizes": "2,32", "nodes": 64}, "need 68 nodes"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    recipe.discover()
    values = {"rank": 2, "sizes": "2,4", "nodes": 16, **options}
    with pytest.raises(UnknownMethod, match=words):
        recipe.build(recipe.entry("diffusion-adapter"), target(), values)


def test_models_with_masks_need_none() -> None:
    config = replace(target().config, diffusion=Diffusion(block=4))
    with pytest.raises(ValueError, match="this one is masked"):
        DiffusionAdapterRecipe(Target(config, dict(target().weights), "cpu"))
