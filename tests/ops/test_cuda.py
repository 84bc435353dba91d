"""The operations on a GPU: near the reference, and a row's bits depend on that row alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outstride.core.graph import NodeId, TokenGraph, block, chain, tree, union
from outstride.core.proposal import Wants
from outstride.models.config import DecoderConfig, RopeConfig
from outstride.models.decoder import Decoder
from outstride.ops.contract import Ops, Span
from outstride.ops.cuda import available
from outstride.ops.weights import ModelWeights, unusual_layers
from tests.models import test_invariance as invariance
from tests.models.drive import Hand, logits, random_decoder, tiny, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not available(), reason="needs an NVIDIA GPU and Triton"),
]

BF16 = 2.0**-9
"""The largest relative error of one rounding. A layer rounds about eight times in a row
(hidden states and inner values twice each, queries, keys, values, weights of attention), besides its
weights.
"""
PAGES = invariance.PAGES
CONFIGS = {
    name: config for name, config in invariance.CONFIGS.items() if not unusual_layers(config)
}


def on_gpu(config: DecoderConfig, *, options: dict[str, Any] | None = None, **more: Any) -> Decoder:
    def make(model: ModelWeights) -> Ops:
        from outstride.ops.cuda import Cuda

        return Cuda(model, **(options or {}))

    return random_decoder(config, make_ops=make, **more)


@pytest.fixture(params=CONFIGS, scope="module")
def model(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    made = on_gpu(CONFIGS[request.param])
    yield made
    made.close()


# Every test of the reference's invariance, on the GPU: they take a `model`, which is ours here.
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
    "siblings": lambda at: union(chain([3, 4], at), block([5, 6], at), chain([7], at)),
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
    made = on_gpu(SHAPES[request.param], pages=512)
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
    """The same nodes in a pass of any size, from a CUDA graph or not, get the same bits."""
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
    batch = [hand.work(node), *(other.work(node) for other in others)]
    assert np.array_equal(logits(large.forward(batch * 8).wait()[0]), alone)


def test_large_tiles_give_the_bits_of_small_ones() -> None:
    """A chain after a long context: in tiles of 64 queries, folded by a kernel of its own, and in
    chunks whose tiles are small; from a CUDA graph or not."""
    model = on_gpu(SHAPES["split"], pages=512)
    hand, prompt = Hand(model, list(range(90))), tokens(1164, vocab=5000)
    hand.read(prompt[:1100], 128)
    chunk = chain(prompt[1100:], 1100)
    ops: Any = model.ops
    work = hand.work(chunk)
    span = Span(chunk, work.slots, work.table, 0, 0)
    assert ops._build_metadata([span], (None,), 64).tile == 64
    whole = [logits(hand.run(chunk)) for _ in range(4)]
    assert all(np.array_equal(one, whole[0]) for one in whole)
    for size in (1, 5, 17):
        assert np.array_equal(hand.read(prompt[1100:], size), whole[0]), size
        del hand.positions[1100:]
    model.close()


@pytest.mark.parametrize("count", [1, 40, 64, 200])
def test_given_hidden_states_have_the_same_sums(large: Decoder, count: int) -> None:
    """Products store the sums that the next norm needs; given hidden states have them computed."""
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
    """Nodes that share their tiles, two sequences in a batch: the bits of each path by itself."""
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


# --- what lasts longer than a pass ------------------------------------------------------------------


def test_features_follow_their_kv() -> None:
    model = on_gpu(tiny(), features=(0, 2))
    hand = Hand(model, PAGES)
    graph = tree(tokens(6, seed=1), [-1, 0, 0, 2, 2, 4], 0)
    wants = Wants(nodes=(), hidden=(0, 2))
    for _ in range(3):  # captured or not
        states = hand.run(graph, wants).hidden
        hand.run(graph)
    kept = [0, 2, 4, 5]
    hand.keep(graph, kept)
    for place, node in enumerate(kept):
        both = np.concatenate([states[0][node], states[2][node]])
        assert np.array_equal(model.feature(hand.table, place), both)
    model.close()


def test_moves_read_before_they_write() -> None:
    model = on_gpu(tiny())
    hand = Hand(model, PAGES)
    prompt = tokens(20)
    before = hand.read(prompt)
    slots = np.asarray([hand.slot(i) for i in range(20)])
    model.move(slots, np.roll(slots, 1))
    model.move(np.roll(slots, 1), slots)
    assert np.array_equal(hand.read(tokens(3)), Hand(model, PAGES).read(prompt + tokens(3))[20:])
    assert np.isfinite(before).all()
    model.close()


def test_kv_is_moved_with_the_next_pass() -> None:
    """Steps that keep a scattered path, captured or not, equal a plain prefill of what was kept."""
    model = on_gpu(tiny(), features=(1,))
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
    model = on_gpu(tiny())
    hand = Hand(model, PAGES)
    plain = logits(hand.run(block([1, 2], 0)))
    rows = torch.zeros(2, 48)
    first = model.add_rows(rows)
    assert (first, model.add_rows(rows)) == (97, 99)
    for _ in range(3):
        assert np.array_equal(logits(hand.run(block([1, 2], 0))), plain)
        assert not np.array_equal(logits(hand.run(block([1, first], 0))), plain)
    model.close()


def test_captured_passes_are_ordinary_ones() -> None:
    switches = itertools.product((True, False), (True, False))
    models = [
        on_gpu(SHAPES["135M"], options={"graphs": graphs, "pdl": pdl}) for graphs, pdl in switches
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
    model = on_gpu(replace(tiny(), context=2048), pages=160)
    prompt = tokens(1300)
    whole = Hand(model, list(range(90))).read(prompt)
    assert np.array_equal(Hand(model, list(range(90))).read(prompt, 500), whole)
    model.close()


@pytest.mark.parametrize("cut", [False, True])
def test_metadata_that_needs_a_larger_buffer(monkeypatch: pytest.MonkeyPatch, cut: bool) -> None:
    from outstride.ops.cuda import launch

    graph, found = chain(tokens(40, seed=1)), []
    wants = Wants(nodes=tuple(range(40)), logits=True, hidden=(1,))
    for size in (launch.METADATA_SIZE, 64):
        monkeypatch.setattr(launch, "METADATA_SIZE", size)
        model = on_gpu(tiny())
        hand = Hand(model, PAGES)
        if cut:
            first = hand.run(graph, wants, layers=(0, 1))
            found.append(hand.run(graph, wants, layers=(1, 2), hidden=first.hidden[1]))
        else:
            found.append(hand.run(graph, wants))
        model.close()
    assert np.array_equal(logits(found[0]), logits(found[1]))
