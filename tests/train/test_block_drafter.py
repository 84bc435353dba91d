"""The block-drafter: the same scores as a slow reading of its definition, and what training gives."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outstride.core.draft_heads import BlockDraftHead, head_of_kind
from outstride.core.graph import block
from outstride.core.proposal import Wants
from outstride.errors import UnknownMethod
from outstride.models.decoder import Decoder
from outstride.models.diffusion import Diffusion
from outstride.models.draft_heads import attach
from outstride.train import acceptance_length, draft_vocabulary, recipe
from outstride.train import block_drafter as module
from outstride.train.block_drafter import BlockDrafterRecipe
from outstride.train.checkpoint import write_model
from outstride.train.corpus_files import TrainingRows
from outstride.train.draft_blocks import DraftBlocks
from outstride.train.draft_vocabulary import draft_scores, frequent_tokens
from outstride.train.target import Target
from tests.models.drive import Hand, tiny

Matrix = torch.Tensor


@lru_cache(maxsize=1)
def target() -> Target:
    """A random model whose next token depends on the last one most, so that its text has a pattern."""
    config, numbers = tiny(vocab_size=64), torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in config.shapes().items():
        values = torch.randn(shape, generator=numbers)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * values
            continue
        late = name.endswith(("o_proj.weight", "down_proj.weight"))
        spread = 1.0 if "embed" in name else (0.4 if late else 1.5) * shape[-1] ** -0.5
        weights[name] = spread * values
    return Target(config, weights, "cpu")


@lru_cache(maxsize=1)
def texts() -> TrainingRows:
    """What the model says behind random prompts, greedily."""
    asked, model = torch.randint(64, (128, 4), generator=torch.Generator().manual_seed(1)), target()
    tokens = asked
    while tokens.shape[1] < 40:
        last = model.hidden_states(tokens, (2,))[2][:, -1:]
        tokens = torch.cat([tokens, model.logits(last).argmax(-1)], dim=1)
    count = len(tokens)
    stops = torch.full((count,), 40)
    stops[::3] = 29
    none = torch.zeros(count, dtype=torch.bool)
    return TrainingRows(tokens, torch.full((count,), 4), stops, none, torch.arange(count))


def made(own: Target | None = None, *, shaken: bool = True, **options: Any) -> BlockDrafterRecipe:
    """A drafter; shaken, none of its weights is as it was made, so that all of them count."""
    values: dict[str, Any] = {"layers": 2, "block": 5, "rank": 8, "anchors": 6, **options}
    torch.manual_seed(0)
    found = BlockDrafterRecipe(own or target(), **values)
    found.prepare(texts())
    numbers = torch.Generator().manual_seed(2)
    for name, value in found.weights.items() if shaken else ():
        found.weights[name] = value + 0.2 * torch.randn(value.shape, generator=numbers).to(value)
    return found


def trained(drafter: BlockDrafterRecipe, rows: TrainingRows, steps: int) -> list[float]:
    numbers, losses = torch.Generator().manual_seed(3), []
    for value in drafter.weights.values():
        value.requires_grad_()
    optimizer = torch.optim.AdamW(drafter.weights.values(), lr=4e-3)
    for _ in range(steps):
        batch = rows.take(torch.randint(len(rows), (24,), generator=numbers))
        loss = drafter.loss(batch, numbers)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


class Slow:
    """The definition read aloud: one anchor, one node and one head at a time, in float64."""

    def __init__(self, drafter: BlockDrafterRecipe, tokens: Matrix) -> None:
        self.config = target().config
        self.weights = {name: value.detach().double() for name, value in drafter.weights.items()}
        self.extra, self.block = drafter.state(), drafter.block
        self.layers = drafter.config()["layers"]
        states = target().hidden_states(tokens[None], drafter.config()["taps"])
        self.taps = [states[tap][0].double() for tap in drafter.config()["taps"]]
        self.tokens = tokens.tolist()
        self.vocabulary: list[int] = self.extra["vocabulary"].tolist()

    def norm(self, x: Matrix, name: str) -> Matrix:
        return x / math.sqrt(float((x * x).mean()) + self.config.norm_eps) * self.weights[name]

    def turned(self, head: Matrix, position: int) -> Matrix:
        half, found = len(head) // 2, head.clone()
        for i in range(half):
            angle = position * self.config.frequencies[i]
            value = complex(float(head[i]), float(head[half + i])) * cmath.exp(1j * angle)
            found[i], found[half + i] = value.real, value.imag
        return found

    def heads(self, at: str, kind: str, y: Matrix, position: int) -> list[Matrix]:
        parts = list((self.weights[f"{at}self_attn.{kind}_proj.weight"] @ y).view(-1, 16))
        return parts if kind == "v" else [self.turned(part, position) for part in parts]

    def read(self, position: int) -> Matrix:
        """What the drafter's layers see of a position that the target has read."""
        features = torch.cat([tap[position] for tap in self.taps])
        features = features * self.extra["taps.scale"].double()
        return self.norm(self.weights["fc.weight"] @ features, "hidden_norm.weight")

    def states(self, anchor: int) -> list[Matrix]:
        """The normalised states of the places behind an anchor."""
        embedding = target().weights["model.embed_tokens.weight"].double()
        x = [embedding[self.tokens[anchor]]] + [self.weights["mask.weight"][0]] * (self.block - 1)
        for i in range(self.layers):
            at = f"layers.{i}."
            keys, values = [], []
            for position in range(anchor):
                y = self.read(position)
                keys.append(self.heads(at, "k", y, position))
                values.append(self.heads(at, "v", y, position))
            normed = [self.norm(node, at + "input_layernorm.weight") for node in x]
            for j, y in enumerate(normed):
                keys.append(self.heads(at, "k", y, anchor + j))
                values.append(self.heads(at, "v", y, anchor + j))
            for j, y in enumerate(normed):
                kept = []
                for h, query in enumerate(self.heads(at, "q", y, anchor + j)):
                    group = h // (self.config.heads // self.config.kv_heads)
                    scores = torch.stack([query @ key[group] for key in keys]) / 4.0
                    shares = scores.softmax(0)
                    kept.append(sum(s * v[group] for s, v in zip(shares, values, strict=True)))
                x[j] = x[j] + self.weights[f"{at}self_attn.o_proj.weight"] @ torch.cat(kept)
                z = self.norm(x[j], at + "post_attention_layernorm.weight")
                gate, up = (
                    self.weights[f"{at}mlp.{kind}_proj.weight"] @ z for kind in ("gate", "up")
                )
                x[j] = x[j] + self.weights[f"{at}mlp.down_proj.weight"] @ (
                    gate * torch.sigmoid(gate) * up
                )
        return [self.norm(node, "norm.weight") for node in x[1:]]

    def scores(self, state: Matrix, front: int) -> Matrix:
        """The scores of the draft vocabulary behind a token."""
        known = self.vocabulary.index(front) if front in self.vocabulary else len(self.vocabulary)
        before = self.weights["follow.before.weight"][known]
        head = target().weights["lm_head.weight"].double()[self.vocabulary]
        return head @ state + self.weights["follow.after.weight"] @ before

    def chain(self, anchor: int) -> list[int]:
        """The greedy draft: each guess stands in front of the next one."""
        found = [self.tokens[anchor]]
        for state in self.states(anchor):
            found.append(self.vocabulary[int(self.scores(state, found[-1]).argmax())])
        return found[1:]

    def loss(self, anchor: int, stop: int, decay: float, soft: float) -> tuple[float, float]:
        """The sum over the places of a block that count, and their weights."""
        total = weights = 0.0
        said = (
            target()
            .logits(target().hidden_states(torch.tensor([self.tokens]), (2,))[2])[0]
            .double()
        )
        for j, state in enumerate(self.states(anchor)):
            at = anchor + 1 + j
            if at >= stop or self.tokens[at] not in self.vocabulary:
                continue
            scores = self.scores(state, self.tokens[at - 1]).log_softmax(0)
            loss = -scores[self.vocabulary.index(self.tokens[at])]
            teacher = said[at - 1, self.vocabulary].log_softmax(0)
            loss = loss + soft * (teacher.exp() * (teacher - scores)).sum()
            total += decay**j * float(loss)
            weights += decay**j
        return total, weights


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the draft vocabulary be smaller than the model's."""
    monkeypatch.setattr(draft_vocabulary, "ROUND", 4)


def scores_of(drafter: BlockDrafterRecipe, rows: TrainingRows, anchors: Matrix) -> Matrix:
    """The scores of all places, as the recipe computes them."""
    blocks = drafter._blocks(rows, anchors)
    states = drafter._draft_hidden(target().hidden_states(rows.tokens, drafter.taps), blocks)
    before = drafter.weights["follow.before.weight"][blocks.previous_tokens]
    return draft_scores(states, before, drafter._head, drafter.weights["follow.after.weight"])


@pytest.mark.parametrize("options", [{}, {"layers": 1, "block": 3, "taps": "1"}])
def test_scores_are_those_of_the_definition(few: None, options: dict[str, Any]) -> None:
    drafter, rows = made(cover=0.8, **options), texts().take(torch.tensor([0, 5]))
    assert 20 < len(drafter.vocabulary) < 60
    anchors = torch.tensor([[0, 3, 17, 39], [3, 4, 38, 9]])
    found = scores_of(drafter, rows, anchors)
    outside = 0
    for row in range(2):
        slow = Slow(drafter, rows.tokens[row])
        for i, anchor in enumerate(anchors[row].tolist()):
            for j, state in enumerate(slow.states(anchor)):
                if anchor + j < 40:  # there is a token in front
                    front = slow.tokens[anchor + j]
                    outside += front not in slow.vocabulary
                    wanted = slow.scores(state, front).float()
                    torch.testing.assert_close(found[row, i, j], wanted, rtol=1e-4, atol=2e-4)
    assert outside


@pytest.mark.parametrize("soft", [0.0, 0.5])
def test_the_loss_is_that_of_the_definition(
    few: None, soft: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, rows = made(cover=0.8, soft=soft, decay=0.7), texts().take(torch.tensor([3, 7]))
    taken: list[Matrix] = []
    blocks = drafter._blocks

    def noted(rows: TrainingRows, anchors: Matrix) -> DraftBlocks:
        taken.append(anchors)
        return blocks(rows, anchors)

    monkeypatch.setattr(drafter, "_blocks", noted)
    loss = drafter.loss(rows, torch.Generator().manual_seed(5))
    [anchors] = taken
    assert anchors.shape == (2, 6)
    total = weights = 0.0
    for row in range(2):
        slow = Slow(drafter, rows.tokens[row])
        for anchor in anchors[row].tolist():
            assert 3 <= anchor <= int(rows.stops[row]) - 2
            one, weight = slow.loss(anchor, int(rows.stops[row]), 0.7, soft)
            total, weights = total + one, weights + weight
    assert loss.item() == pytest.approx(total / weights, rel=1e-4)


def test_anchors_reach_every_position_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, rows = made(), texts().take(slice(0, 2))
    seen: list[set[int]] = [set(), set()]
    blocks = drafter._blocks

    def noted(rows: TrainingRows, anchors: Matrix) -> DraftBlocks:
        for row in range(2):
            seen[row].update(anchors[row].tolist())
        return blocks(rows, anchors)

    monkeypatch.setattr(drafter, "_blocks", noted)
    numbers = torch.Generator().manual_seed(0)
    for _ in range(40):
        drafter.loss(rows, numbers)
    assert seen == [set(range(3, 28)), set(range(3, 39))]


def test_padding_has_no_loss() -> None:
    drafter, rows = made(), texts().take(slice(0, 1))
    assert int(rows.stops[0]) == 29
    other = rows.tokens.clone()
    other[:, 29:] = 7
    one, two, three = (
        drafter.loss(replace(rows, tokens=tokens), torch.Generator().manual_seed(1)).item()
        for tokens in (rows.tokens, other, rows.tokens.roll(1, 1))
    )
    assert one == two != three


def test_many_scores_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, rows, found = made(soft=0.3), texts().take(slice(0, 4)), []
    for at_once in (1 << 28, 64 * 23):
        monkeypatch.setattr(module, "_AT_ONCE", at_once)
        for value in drafter.weights.values():
            value.requires_grad_().grad = None
        loss = drafter.loss(rows, torch.Generator().manual_seed(1))
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.item(), {name: v.grad for name, v in drafter.weights.items()}))
    (one, slopes), (two, others) = found
    assert one == pytest.approx(two, rel=1e-5)
    for name, slope in slopes.items():
        assert slope is not None, f"{name} is not trained"
        assert slope.abs().max() > 0, f"{name} is not trained"
        torch.testing.assert_close(slope, others[name], rtol=1e-3, atol=1e-6)


def test_training_raises_the_acceptance_rate() -> None:
    train, held = texts().take(slice(0, 112)), texts().take(slice(112, 128))
    drafter = made(shaken=False, layers=1, anchors=8)
    before = drafter.measure(held)
    losses = trained(drafter, train, 110)
    after = drafter.measure(held)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert before.tokens_per_pass < 1.2
    assert after.tokens_per_pass > 1.8
    assert list(after.by_depth) == sorted(after.by_depth, reverse=True)
    assert after.by_depth[0] > 0.4
    # What was measured is what a chain of guesses does along a decode, its own guesses in front.
    passes = emitted = 0
    for row in range(2):
        slow, stop = Slow(drafter, held.tokens[row]), int(held.stops[row])
        at = 3
        while at < stop - 1:
            hits = [
                a == b for a, b in zip(slow.chain(at), slow.tokens[at + 1 : stop], strict=False)
            ]
            at += [*hits, False].index(False) + 1
            passes += 1
        emitted += stop - 4
    two = drafter.measure(held.take(slice(0, 2)))
    assert two.tokens_per_pass == pytest.approx(emitted / passes)


def test_training_starts_from_a_trained_drafter(tmp_path: Path) -> None:
    train, held = texts().take(slice(0, 112)), texts().take(slice(112, 128))
    first = made(shaken=False, layers=1, anchors=8)
    trained(first, train, 60)
    about = {"outstride": "block-drafter", "version": 1, "target": dict(target().about())}
    first.write(tmp_path / "part", about, int8=False)
    options: dict[str, Any] = {
        "shaken": False,
        "layers": 1,
        "anchors": 8,
        "begin": str(tmp_path / "part"),
    }
    second = made(**options)
    second.prepare(train.take(slice(20)))  # other answers, which do not change the vocabulary
    assert torch.equal(second.vocabulary, first.vocabulary)
    close = pytest.approx(first.measure(held).tokens_per_pass, rel=0.05)  # stored in 16 bits
    assert second.measure(held).tokens_per_pass == close
    assert trained(second, train, 1)[0] < 0.7 * trained(made(shaken=False, layers=1), train, 1)[0]
    with pytest.raises(ValueError, match="has layers 1 where this training has 2"):
        made(**{**options, "layers": 2})


def test_greedy_texts_are_preferred() -> None:
    drafter = made()
    rows = texts().take(slice(0, 6))
    mixed = replace(rows, sampled=torch.tensor([True, True, False, True, False, True]))
    kept = rows.take(torch.tensor([2, 4]))
    assert drafter.measure(mixed) == drafter.measure(kept)
    assert drafter.measure(replace(rows, sampled=torch.ones(6).bool())) == drafter.measure(rows)


def test_the_draft_vocabulary_covers_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.tensor([5] * 50 + [3] * 30 + [9] * 15 + [1] * 5)
    monkeypatch.setattr(draft_vocabulary, "ROUND", 1)
    assert frequent_tokens(tokens, 12, 0.80).tolist() == [3, 5]
    assert frequent_tokens(tokens, 12, 0.81).tolist() == [3, 5, 9]
    assert frequent_tokens(tokens, 12, 1.0).tolist() == [1, 3, 5, 9]
    monkeypatch.setattr(draft_vocabulary, "ROUND", 3)
    assert frequent_tokens(tokens, 12, 0.96).tolist() == [0, 1, 2, 3, 5, 9]
    monkeypatch.setattr(draft_vocabulary, "ROUND", 256)
    assert frequent_tokens(tokens, 12, 0.5).tolist() == list(range(12))


def test_what_is_stored() -> None:
    drafter = made(layers=1, taps="2,0")
    length = texts().tokens.shape[1]
    assert drafter.config() == {
        "layers": 1,
        "block": 5,
        "taps": [2, 0],
        "rank": 8,
        "window": length,  # it sees no further back than its texts were long
    }
    state = drafter.state()
    assert state["vocabulary"].dtype == torch.int32
    assert state["taps.scale"].shape == (96,)
    assert {name: tuple(value.shape) for name, value in drafter.weights.items()} == {
        "fc.weight": (48, 96),
        "hidden_norm.weight": (48,),
        "mask.weight": (1, 48),
        "norm.weight": (48,),
        "layers.0.input_layernorm.weight": (48,),
        "layers.0.post_attention_layernorm.weight": (48,),
        "layers.0.self_attn.q_proj.weight": (96, 48),
        "layers.0.self_attn.k_proj.weight": (32, 48),
        "layers.0.self_attn.v_proj.weight": (32, 48),
        "layers.0.self_attn.o_proj.weight": (48, 96),
        "layers.0.mlp.gate_proj.weight": (80, 48),
        "layers.0.mlp.up_proj.weight": (80, 48),
        "layers.0.mlp.down_proj.weight": (48, 80),
        "follow.before.weight": (65, 8),
        "follow.after.weight": (64, 8),
    }
    again = made(layers=1, taps="2,0")
    assert all(torch.equal(value, again.weights[name]) for name, value in drafter.weights.items())
    # Scaled, all features are of one size.
    rows = texts().take(slice(0, 64))
    features = drafter._features(target().hidden_states(rows.tokens, (2, 0)))
    features = features * features.square().mean(-1, keepdim=True).rsqrt() * state["taps.scale"]
    said = features[acceptance_length.answer_mask(rows)]
    torch.testing.assert_close(said.square().mean(0), torch.ones(96), rtol=1e-3, atol=1e-3)


def test_options_are_checked() -> None:
    entry = recipe.entry("block-drafter")
    values = recipe.options(entry, "taps=0,2,layers=1,compiled=false")
    found = recipe.build(entry, target(), values, 1)
    assert isinstance(found, BlockDrafterRecipe)
    assert found.taps == (0, 2)
    assert BlockDrafterRecipe(target()).taps == (0, 1, 2)  # four depths of two layers, each once
    for text, about in [
        ("block=1", "blocks of 2"),
        ("rank=0", "1 or more"),
        ("cover=1.5", "up to 1"),
        ("decay=0", "above 0"),
        ("soft=-1", "0 or more"),
        ("taps=1,1", "different layers"),
        ("taps=3", "from 0 to 2"),
        ("taps=one", "from 0 to 2"),
    ]:
        with pytest.raises(UnknownMethod, match=about):
            recipe.build(entry, target(), recipe.options(entry, text), 1)
    masked = Target(replace(target().config, diffusion=Diffusion()), dict(target().weights), "cpu")
    with pytest.raises(ValueError, match="not for masked ones"):
        BlockDrafterRecipe(masked)


def test_the_engine_drafts_with_it(few: None, tmp_path: Path) -> None:
    """What is trained here and what decodes are two programs: they must be the same function."""
    drafter, rows = made(cover=0.8, taps="0,2"), texts().take(slice(0, 1))
    config = {"outstride": drafter.name, "target": target().about(), **drafter.config()}
    write_model(tmp_path, config, {**drafter.weights, **drafter.state()}, int8=False)
    weights = {name: value.clone() for name, value in target().weights.items()}
    model = Decoder.from_tensors(target().config, weights, pages=8, page_size=16)
    attach(model, "part", tmp_path)
    tokens, hand = rows.tokens[0].tolist(), Hand(model, [2, 0, 1])
    hand.read(tokens[:20])
    head = head_of_kind(model.draft_heads["part"], BlockDraftHead)
    masks = [head.mask] * (head.block - 1)
    wants = Wants(nodes=tuple(range(1, head.block)), best=6)
    scores = hand.run(block([tokens[20], *masks], 20), wants, draft_head="part", offset=0)
    blocks = drafter._blocks(rows, torch.tensor([[20]]))
    states = drafter._draft_hidden(target().hidden_states(rows.tokens, drafter.taps), blocks)[0, 0]
    values, best = (states @ drafter._head.T).topk(6)
    assert scores.values is not None
    torch.testing.assert_close(torch.from_numpy(scores.values), values, rtol=2e-2, atol=2e-2)
    assert scores.best.tolist() == drafter.vocabulary[best].tolist()
    assert torch.equal(torch.from_numpy(head.bigram.rows), drafter._index)


def test_torch_can_compile_it() -> None:
    """As on a GPU, except for the generated code: nothing in it falls back to Python."""
    rows = texts().take(slice(0, 4))
    usual = made(layers=1).loss(rows, torch.Generator().manual_seed(1))
    drafter = made(Target(target().config, dict(target().weights), "cpu"), layers=1)
    drafter.compile(backend="aot_eager", fullgraph=True)
    calls = torch._dynamo.utils.counters["stats"]
    before = calls["unique_graphs"]
    assert drafter.loss(rows, torch.Generator().manual_seed(1)).item() == pytest.approx(
        usual.item()
    )
    assert calls["unique_graphs"] == before + 3  # a layer, the blocks, and the losses
    drafter.measure(rows)
    assert calls["unique_graphs"] == before + 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_learns_the_same() -> None:
    rows, losses = texts().take(slice(0, 16)), []
    for device, compiled in (("cpu", False), ("cuda", False), ("cuda", True)):
        own = Target(target().config, dict(target().weights), device)
        drafter = made(own, compiled=compiled)
        anchors = torch.Generator(device).manual_seed(1)
        with own.autocast():
            losses.append(sum(drafter.loss(rows.to(device), anchors).item() for _ in range(8)) / 8)
        assert drafter.measure(rows).tokens_per_pass >= 1
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.05)
