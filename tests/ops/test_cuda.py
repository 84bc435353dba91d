"""The operations on a card: near the reference, and a row's bits depend on that row alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from outstride.core.contracts import Work
from outstride.core.graph import NodeId, TokenGraph, block, chain, tree, union
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import Draw, Purpose, Rules, best
from outstride.core.sequence import Table
from outstride.models.config import DecoderConfig, RopeConfig
from outstride.models.decoder import Decoder
from outstride.ops.contract import Model, Ops, Span
from outstride.ops.cuda import available
from tests.models import test_invariance as invariance
from tests.models.drive import Hand, logits, random_decoder, tiny, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not available(), reason="needs an NVIDIA card and Triton"),
]

BF16 = 2.0**-9
"""The largest relative error of one rounding. A layer rounds about eight times one behind the other
(states and inner values twice each, queries, keys, values, weights of attention), besides its weights.
"""
PAGES = invariance.PAGES
CONFIGS = {name: config for name, config in invariance.CONFIGS.items() if config.plain}


def on_card(
    config: DecoderConfig, *, options: dict[str, Any] | None = None, **more: Any
) -> Decoder:
    def make(model: Model) -> Ops:
        from outstride.ops.cuda import Cuda

        return Cuda(model, **(options or {}))

    return random_decoder(config, make_ops=make, **more)


@pytest.fixture(params=CONFIGS, scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    made = on_card(CONFIGS[request.param])
    yield made
    made.close()


# Every test of the reference's invariance, on the card: they ask for a `model`, which is ours here.
globals().update(
    {
        name: test
        for name, test in vars(invariance).items()
        if name.startswith("test_") and "model" in test.__annotations__
    }
)

# --- against the reference --------------------------------------------------------------------------

GRAPHS: dict[str, Callable[[int], TokenGraph]] = {
    "chain": lambda at: chain(tokens(9, seed=1), at),
    "tree": lambda at: tree(tokens(9, seed=1), [-1, 0, 0, 1, 1, 2, -1, 6, 7], at),
    "block": lambda at: block(tokens(20, seed=1), at),
    "rivals": lambda at: union(chain([3, 4], at), block([5, 6], at), chain([7], at)),
    "probes": lambda at: chain([5, 6, 7], positions=[max(at - 30, 0), max(at - 1, 0), at]),
    "long chain": lambda at: chain(tokens(130, seed=1), at),
}


@pytest.mark.parametrize("context", [0, 1, 63, 64, 130])
def test_logits_are_near_the_reference(model: Decoder, context: int) -> None:
    exact = random_decoder(model.config, pages=64)
    hands = Hand(exact, PAGES * 2), Hand(model, PAGES * 2)
    if context:
        for hand in hands:
            hand.read(tokens(context))
    for name, build in GRAPHS.items():
        right, got = (logits(hand.run(build(context))) for hand in hands)
        assert np.isfinite(got).all(), name
        error = np.linalg.norm(got - right) / np.linalg.norm(right)
        assert error < 16 * BF16, (name, error)  # two layers
    exact.close()


SHAPES = {
    "135M": tiny(
        vocab_size=5000, hidden_size=576, intermediate_size=1536, heads=9, kv_heads=3, head_dim=64
    ),
    "split": tiny(
        vocab_size=5000, hidden_size=2048, intermediate_size=4096, heads=16, kv_heads=4,
        head_dim=128, context=2048,
    ),
    "split norms": tiny(
        vocab_size=5000, hidden_size=2048, intermediate_size=4096, heads=32, kv_heads=2,
        head_dim=64, head_norms=True, qkv_bias=True, rope=RopeConfig(theta=1e6),
    ),
}  # fmt: skip


@pytest.fixture(params=SHAPES, scope="module")
def large(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    made = on_card(SHAPES[request.param], pages=512)
    yield made
    made.close()


def test_large_matrices_are_near_the_reference(large: Decoder) -> None:
    exact = random_decoder(large.config, pages=64)
    prompt = tokens(150, vocab=5000)
    right, got = Hand(exact, PAGES).read(prompt), Hand(large, PAGES).read(prompt)
    assert np.linalg.norm(got - right) / np.linalg.norm(right) < 10 * BF16
    exact.close()


@pytest.mark.parametrize("rows", [1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 300])
def test_rows_in_any_number(large: Decoder, rows: int) -> None:
    """The same nodes in a pass of any size, recorded or not, get the same bits."""
    prompt = tokens(300, vocab=5000)
    whole = Hand(large, list(range(20))).read(prompt)
    hand = Hand(large, list(range(100, 120)))
    assert np.array_equal(hand.read(prompt, rows), whole)


def test_one_row_among_63_others(large: Decoder) -> None:
    hands = [Hand(large, list(range(i * 7, i * 7 + 7))) for i in range(64)]
    for i, hand in enumerate(hands):
        hand.read(tokens(1 + 97 * i % 90, seed=i, vocab=5000))
    nodes = [chain([i], len(hand.positions)) for i, hand in enumerate(hands)]
    for _ in range(3):
        works = [hand.work(node) for hand, node in zip(hands, nodes, strict=True)]
        together = [logits(s) for s in large.forward(works).wait()]
        for i in range(0, 64, 5):
            assert np.array_equal(logits(hands[i].run(nodes[i])), together[i])


def test_a_long_context_is_shared_out(large: Decoder) -> None:
    """Blocks of one sequence over many programs, and of many sequences over one each."""
    hand = Hand(large, list(range(40, 70)))
    prompt = tokens(400, vocab=5000)
    hand.read(prompt, 128)
    node = chain([7], 400)
    alone = logits(hand.run(node))
    others = [Hand(large, list(range(70 + i * 27, 97 + i * 27))) for i in range(15)]
    for i, other in enumerate(others):
        other.read(tokens(400, seed=i, vocab=5000), 128)
    crowd = [hand.work(node), *(other.work(node) for other in others)]
    assert np.array_equal(logits(large.forward(crowd * 8).wait()[0]), alone)


def test_large_tiles_give_the_bits_of_small_ones() -> None:
    """A chain behind a long context: in tiles of 64 queries, folded by a kernel of its own, and in
    pieces whose tiles are small; recorded or not."""
    model = on_card(SHAPES["split"], pages=512)
    hand, prompt = Hand(model, list(range(90))), tokens(1164, vocab=5000)
    hand.read(prompt[:1100], 128)
    chunk = chain(prompt[1100:], 1100)
    ops: Any = model.ops
    work = hand.work(chunk)
    span = Span(chunk, work.slots, work.table, 0, 0)
    assert ops._describe([span], (None,), 64).tile == 64
    whole = [logits(hand.run(chunk)) for _ in range(4)]
    assert all(np.array_equal(one, whole[0]) for one in whole)
    for size in (1, 5, 17):
        assert np.array_equal(hand.read(prompt[1100:], size), whole[0]), size
        del hand.positions[1100:]
    model.close()


@pytest.mark.parametrize("count", [1, 40, 64, 200])
def test_states_from_outside_are_summed_alike(large: Decoder, count: int) -> None:
    """Products leave the sums behind that the next norm needs; states that enter have them made."""
    graph, every = chain(tokens(count, seed=3, vocab=5000)), tuple(range(count))
    wants = Wants(nodes=every, logits=True, hidden=(1,))
    whole = Hand(large, list(range(20))).run(graph, wants)
    other = Hand(large, list(range(20, 40)))
    first = other.run(graph, wants, layers=(0, 1))
    assert np.array_equal(first.hidden[1], whole.hidden[1])
    rest = other.run(graph, wants, layers=(1, 2), hidden=first.hidden[1])
    assert np.array_equal(logits(rest), logits(whole))


def test_the_same_pass_again_and_again(large: Decoder) -> None:
    """A race would show as bits that change from run to run."""
    hand = Hand(large, list(range(40, 70)))
    hand.read(tokens(200, vocab=5000))
    for count in (1, 16, 40, 64, 128):
        graph = chain(tokens(count, seed=count, vocab=5000), 200)
        first = logits(hand.run(graph))
        for _ in range(12):
            assert np.array_equal(logits(hand.run(graph)), first)


@pytest.mark.parametrize("context", [5, 120, 300])
def test_a_large_tree_is_its_paths(large: Decoder, context: int) -> None:
    """Nodes that share their tiles, some sequences side by side: the bits of each path by itself."""
    source = np.random.default_rng(context)
    hands = [Hand(large, list(range(i * 30, i * 30 + 30))) for i in range(2)]
    graphs = []
    for i, hand in enumerate(hands):
        hand.read(tokens(context + 7 * i, seed=i, vocab=5000))
        parents = [-1] + [int(source.integers(max(0, n - 6), n)) for n in range(1, 45)]
        graphs.append(tree(tokens(45, seed=9 + i, vocab=5000), parents, context + 7 * i))
    alone = [logits(hand.run(graph)) for hand, graph in zip(hands, graphs, strict=True)]
    for _ in range(3):
        works = [hand.work(graph) for hand, graph in zip(hands, graphs, strict=True)]
        for scores, right in zip(large.forward(works).wait(), alone, strict=True):
            assert np.array_equal(logits(scores), right)
    for hand, graph, right in zip(hands, graphs, alone, strict=True):
        for leaf in (44, 30, 17, 3):
            path = graph.path(NodeId(leaf))
            line = chain(graph.tokens[path], int(graph.positions[0]))
            assert np.array_equal(logits(hand.run(line)), right[path])


# --- the choice of tokens ---------------------------------------------------------------------------

DRAWS = {
    "greedy": Draw(),
    "sampled": Draw(temperature=0.8, seed=7),
    "hot": Draw(temperature=1.0, seed=2**63 + 12345, index=3),
    "drafted": Draw(temperature=1.3, seed=7, purpose=Purpose.DRAFT),
    "top k": Draw(temperature=0.8, top_k=5, seed=7),
    "top p": Draw(temperature=1.0, top_p=0.9, seed=7),
    "min p": Draw(temperature=1.0, min_p=0.1, seed=7),
    "all": Draw(temperature=1.2, top_k=40, top_p=0.8, min_p=0.01, seed=9),
}


@pytest.mark.parametrize("name", DRAWS)
def test_tokens_are_chosen_by_the_rule(large: Decoder, name: str) -> None:
    draw, hand = DRAWS[name], Hand(large, list(range(40)))
    graph = chain(tokens(100, seed=5, vocab=5000))
    every = tuple(range(100))
    rows = logits(hand.run(graph, Wants(nodes=every, logits=True)))
    got = hand.run(graph, Wants(nodes=every), draw=draw)
    right = [int(best(row, draw, i + 1)[0]) for i, row in enumerate(rows)]
    assert got.best[:, 0].tolist() == right


@pytest.mark.parametrize("count", [2, 8, 16, 20])
@pytest.mark.parametrize("name", DRAWS)
def test_several_tokens_are_chosen_by_the_rule(large: Decoder, name: str, count: int) -> None:
    """Up to sixteen on the card, more on the host: the same tokens, -1 where filters let in fewer."""
    draw, hand = DRAWS[name], Hand(large, list(range(40)))
    graph, every = chain(tokens(40, seed=5, vocab=5000)), tuple(range(40))
    rows = logits(hand.run(graph, Wants(nodes=every, logits=True)))
    got = hand.run(graph, Wants(nodes=every, best=count), draw=draw).best
    assert got.shape == (40, count)
    for i, row in enumerate(rows):
        right = best(row, draw, i + 1, count).tolist()
        assert got[i].tolist() == right + [-1] * (count - len(right))


def test_equal_logits_go_by_id() -> None:
    from outstride.ops.cuda.choose import COUNT, Chooser
    from outstride.ops.cuda.layout import BEST, HEAD_ROWS, PLACES

    source, device, vocab = np.random.default_rng(0), torch.device("cuda"), 9001
    rows = source.integers(-3, 4, size=(16, vocab)).astype(np.float32)
    rows[1] = 0.0
    rows[2, ::2] *= -0.0
    raw = torch.zeros(HEAD_ROWS, 9216, device=device)
    raw[:16, :vocab] = torch.from_numpy(rows).to(device)
    words = torch.zeros(1 + 16 * PLACES, dtype=torch.int32, device=device)
    words[1:].view(16, PLACES)[:, COUNT] = torch.arange(1, 17, device=device)
    replies = torch.zeros(4, HEAD_ROWS, BEST, dtype=torch.int32, pin_memory=True)
    chooser = Chooser(device, HEAD_ROWS, vocab)
    for _ in range(3):
        chooser.choose(raw, words[1:], 16, replies, words[:1], filtered=False, several=True)
    torch.cuda.synchronize()
    for i, row in enumerate(rows):
        right = best(row, Draw(), 0, i + 1).tolist()
        assert replies[0, i, : i + 1].tolist() == right
        assert int(chooser.best[i]) == right[0]


def test_requests_of_all_kinds_share_a_pass(large: Decoder) -> None:
    hands = [Hand(large, list(range(i * 4, i * 4 + 4))) for i in range(7)]
    graph, every = chain(tokens(9, seed=5, vocab=5000)), tuple(range(9))
    kinds: list[dict[str, Any]] = [
        {"wants": Wants(nodes=every)},
        {"wants": Wants(nodes=every), "draw": DRAWS["all"]},
        {"wants": Wants(nodes=every, logprobs=2)},
        {"wants": Wants(nodes=every, rows=True, best=3), "draw": DRAWS["sampled"]},
        {"wants": Wants(nodes=every), "rules": {i: Rules(added={1: 50.0}) for i in range(9)}},
        {"wants": Wants(nodes=())},
        {"wants": Wants(nodes=every, best=8), "draw": DRAWS["top p"]},
    ]
    alone = [hand.run(graph, **kind) for hand, kind in zip(hands, kinds, strict=True)]
    works = [hand.work(graph, **kind) for hand, kind in zip(hands, kinds, strict=True)]
    for one, other in zip(alone, large.forward(works).wait(), strict=True):
        assert np.array_equal(one.best, other.best)
        assert one.logprobs == other.logprobs
    assert (alone[4].best == 1).all()
    assert alone[5].best.shape == (0, 1)


# --- what lasts longer than a pass ------------------------------------------------------------------


def test_features_follow_their_entries() -> None:
    model = on_card(tiny(), features=(0, 2))
    hand = Hand(model, PAGES)
    graph = tree(tokens(6, seed=1), [-1, 0, 0, 2, 2, 4], 0)
    wants = Wants(nodes=(), hidden=(0, 2))
    for _ in range(3):  # recorded or not
        states = hand.run(graph, wants).hidden
        hand.run(graph)
    kept = [0, 2, 4, 5]
    hand.keep(graph, kept)
    for place, node in enumerate(kept):
        both = np.concatenate([states[0][node], states[2][node]])
        assert np.array_equal(model.feature(hand.table, place), both)
    model.close()


def test_moves_read_before_they_write() -> None:
    model = on_card(tiny())
    hand = Hand(model, PAGES)
    prompt = tokens(20)
    before = hand.read(prompt)
    slots = np.asarray([hand.slot(i) for i in range(20)])
    model.move(slots, np.roll(slots, 1))
    model.move(np.roll(slots, 1), slots)
    assert np.array_equal(hand.read(tokens(3)), Hand(model, PAGES).read(prompt + tokens(3))[20:])
    assert np.isfinite(before).all()
    model.close()


def test_entries_are_moved_with_the_next_pass() -> None:
    """Steps that keep a scattered path, recorded or not, are a plain reading of what was kept."""
    model = on_card(tiny(), features=(1,))
    hand, text = Hand(model, PAGES), tokens(20)
    hand.read(text)
    parents = [-1, 0, 0, 1, 2, 4, 4]
    for step in range(8):
        drafted = tokens(7, seed=step)
        graph = tree(drafted, parents, len(text))
        hand.run(graph, Wants(best=3))
        kept = [0, 2, 4, 6] if step % 3 else [0, 2]
        hand.keep(graph, kept)
        text += [drafted[node] for node in kept]
    other = Hand(model, list(range(20)))
    right = other.read([*text, 5])
    for place in range(len(text)):
        states = model.feature(hand.table, place)
        assert np.array_equal(states, model.feature(other.table, place)), place
    assert np.array_equal(logits(hand.run(chain([5], len(text))))[0], right[-1])
    model.close()


def test_extra_rows() -> None:
    model = on_card(tiny())
    hand = Hand(model, PAGES)
    plain = logits(hand.run(block([1, 2], 0)))
    rows = torch.zeros(2, 48)
    first = model.add_rows(rows)
    assert (first, model.add_rows(rows)) == (97, 99)
    for _ in range(3):
        assert np.array_equal(logits(hand.run(block([1, 2], 0))), plain)
        assert not np.array_equal(logits(hand.run(block([1, first], 0))), plain)
    model.close()


def test_recorded_passes_are_ordinary_ones() -> None:
    switches = itertools.product((True, False), (True, False))
    models = [
        on_card(SHAPES["135M"], options={"graphs": graphs, "pdl": pdl}) for graphs, pdl in switches
    ]
    found = []
    for model in models:
        hand = Hand(model, PAGES)
        hand.read(tokens(50, vocab=5000))
        graph = chain(tokens(5, seed=1, vocab=5000), 50)
        found += [logits(hand.run(graph)) for _ in range(4)]
        model.close()
    assert all(np.array_equal(one, found[0]) for one in found)


def test_passes_larger_than_all_before() -> None:
    model = on_card(replace(tiny(), context=2048), pages=160)
    prompt = tokens(1300)
    whole = Hand(model, list(range(90))).read(prompt)
    assert np.array_equal(Hand(model, list(range(90))).read(prompt, 500), whole)
    model.close()


@pytest.mark.parametrize("cut", [False, True])
def test_words_that_need_more_room(monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    from outstride.ops.cuda import launch

    graph, found = chain(tokens(40, seed=1)), []
    wants = Wants(nodes=tuple(range(40)), logits=True, hidden=(1,))
    for room in (launch.WORDS, 64):
        monkeypatch.setattr(launch, "WORDS", room)
        model = on_card(tiny())
        hand = Hand(model, PAGES)
        if cut:
            first = hand.run(graph, wants, layers=(0, 1))
            found.append(hand.run(graph, wants, layers=(1, 2), hidden=first.hidden[1]))
        else:
            found.append(hand.run(graph, wants))
        model.close()
    assert np.array_equal(logits(found[0]), logits(found[1]))


# --- passes that are launched ahead ------------------------------------------------------------------


class Walk:
    """Sequences that go on step by step in tables of their own, as an engine moves them."""

    def __init__(self, model: Decoder, pages: list[int]) -> None:
        self.model, self.free = model, list(pages)
        self.ahead = 0
        """How many passes were under way when they were asked for."""
        ops: Any = model.ops
        go_on = ops._foresight._go_on

        def counted(*arguments: Any) -> Any:
            self.ahead += 1
            return go_on(*arguments)

        ops._foresight._go_on = counted

    def step(self, walkers: list[Walker], wants: Wants | None = None) -> None:
        works = []
        for walker in walkers:
            table, new = walker.table, walker.tokens[len(walker.table) :]
            while len(table.pages) * 16 < len(walker.tokens):
                table.pages.append(self.free.pop())
            entries = np.arange(len(table), len(walker.tokens))
            slots = np.asarray(table.pages)[entries // 16] * 16 + entries % 16
            proposal = Proposal(
                chain(new, len(table)),
                given=len(new),
                draw=walker.draw,
                wants=wants or Wants(nodes=(len(new) - 1,), best=walker.best),
            )
            works.append(Work(proposal, table, slots))
        for walker, scores in zip(walkers, self.model.forward(works).wait(), strict=True):
            walker.table.positions = list(range(len(walker.tokens)))
            walker.tokens.append(int(scores.best[-1, 0]))


@dataclass
class Walker:
    tokens: list[int]
    draw: Draw
    best: int = 1
    table: Table = field(default_factory=Table)


def walkers(count: int) -> list[Walker]:
    kinds = list(DRAWS.values())
    return [Walker(tokens(3 + 7 * i, seed=i), kinds[i % len(kinds)]) for i in range(count)]


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("name", ["grouped", "all windows"])
def test_passes_ahead_change_nothing(name: str, several: int) -> None:
    """Some end, some join, rows change places, pages come in any order: the text stays the same."""
    found = []
    for graphs in (True, False):
        model = on_card(CONFIGS[name], pages=160, features=(1,), options={"graphs": graphs})
        pages = np.random.default_rng(0).permutation(160).tolist()
        walk, all_of = Walk(model, pages), walkers(12)
        for walker in all_of[::2]:
            walker.best = several
        for step in range(70):
            here = all_of[: 9 if step < 20 else 12]
            if step >= 35:
                here = here[::2]
            walk.step(here[::-1] if step > 60 else here, Wants(logprobs=1) if step == 50 else None)
        states = [model.feature(w.table, p) for w in all_of for p in range(len(w.table))]
        found.append(([w.tokens for w in all_of], np.concatenate(states)))
        assert (walk.ahead > 50) == graphs
        model.close()
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])


def test_a_pass_ahead_that_nobody_asks_for_does_no_harm() -> None:
    """Another token, a table with other pages, or a move: what was launched is not what is used."""
    model = on_card(tiny(), pages=64)
    walk, (one, other) = Walk(model, list(range(64))), walkers(2)
    for _ in range(8):
        walk.step([one, other])
    before = walk.ahead
    one.tokens[-1] = (one.tokens[-1] + 1) % 97
    walk.step([one, other])
    assert walk.ahead == before
    for _ in range(4):
        walk.step([one, other])
    old = one.table.pages[0]
    new = walk.free.pop()
    model.move(old * 16 + np.arange(16), new * 16 + np.arange(16))
    one.table.pages[0] = new
    walk.step([one])
    Hand(model, [old]).read(tokens(16, seed=3))  # the old page is somebody else's now
    for _ in range(4):
        walk.step([one, other])
    alone = Hand(model, list(range(40, 52)))
    for walker in (one, other):
        alone.positions = []
        rows = alone.read(walker.tokens[:-1])
        right = int(best(rows[-1], walker.draw, len(walker.tokens) - 1)[0])
        assert walker.tokens[-1] == right
    model.close()
