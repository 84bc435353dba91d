"""A node's logits have the same bits alone and in any together, in any packing of the cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outstride.core.graph import (
    Mixture,
    NodeId,
    TokenGraph,
    alternatives,
    block,
    chain,
    tree,
    union,
)
from outstride.core.proposal import Wants
from outstride.models.config import RopeConfig
from outstride.models.decoder import Decoder
from outstride.models.experts import Experts
from outstride.ops.routing import Routing
from tests.models.drive import Hand, logits, random_decoder, tiny, tokens

CONFIGS = {
    "grouped": tiny(),
    "head norms": tiny(head_norms=True, qkv_bias=True, tied=True),
    "windows": tiny(windows=(20, None), qkv_bias=True, output_bias=True, mlp_bias=True),
    "all windows": tiny(windows=(70, 5), rope_layers=(True, False)),
    "odd group": tiny(heads=5, kv_heads=1, head_dim=24, hidden_size=40),
    "wide": tiny(heads=40, kv_heads=1, head_dim=8, rope=RopeConfig(kind="linear", factor=2.0)),
}
MIXTURE = Experts(
    layers=(False, True),
    count=7,
    size=24,
    routing=Routing(2, normalized=True),
    shared=16,
    bias=True,
)
CONFIGS["experts"] = tiny(experts=MIXTURE, head_norms=True, wide_norms=True, clip=1.5, rotary=8)
PAGES = [27, 23, 40, 22, 25, 61, 33, 32, 38, 50, 42, 29]


@pytest.fixture(params=CONFIGS, scope="module")
def model(request: pytest.FixtureRequest) -> Decoder:
    return random_decoder(CONFIGS[request.param])


def test_chunks_of_a_prompt_do_not_matter(model: Decoder) -> None:
    prompt = tokens(150)
    whole = Hand(model, PAGES).read(prompt)
    for chunk in (1, 7, 16, 33, 64, 100):
        pages = PAGES[chunk % 3 :] + PAGES[: chunk % 3]
        assert np.array_equal(Hand(model, pages).read(prompt, chunk), whole), chunk


def test_the_batch_does_not_matter(model: Decoder) -> None:
    prompts = [tokens(n, seed=n) for n in (5, 64, 1, 90, 17)]
    alone = [Hand(model, list(range(12))).read(prompt) for prompt in prompts]
    hands = [Hand(model, list(range(i * 12, i * 12 + 12))) for i in range(5)]
    work = [hand.work(chain(prompt)) for hand, prompt in zip(hands, prompts, strict=True)]
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 2, 1], [2, 2]):
        for got, i in zip(model.forward([work[i] for i in order]).wait(), order, strict=True):
            assert np.array_equal(logits(got), alone[i])


def test_decoding_in_a_batch_is_decoding_alone(model: Decoder) -> None:
    prompts = [tokens(n, seed=n) for n in (63, 64, 65, 15, 31)]
    hands = [Hand(model, list(range(i * 12, i * 12 + 12))) for i in range(5)]
    for hand, prompt in zip(hands, prompts, strict=True):
        hand.read(prompt)
    for step in range(4):
        nodes = [chain([step + i], len(hand.positions)) for i, hand in enumerate(hands)]
        together = model.forward(
            [hand.work(node) for hand, node in zip(hands, nodes, strict=True)]
        ).wait()
        for hand, node, got in zip(hands, nodes, together, strict=True):
            assert np.array_equal(logits(hand.run(node)), logits(got))
            hand.keep(node, [0])


def paths(graph: TokenGraph) -> list[list[int]]:
    return [[int(n) for n in graph.path(NodeId(i))] for i in range(len(graph))]


@pytest.mark.parametrize("context", [0, 1, 40, 62, 64, 130])
def test_each_path_of_a_tree_is_a_chain(model: Decoder, context: int) -> None:
    prompt = tokens(context)
    shape = [-1, 0, 0, 1, 1, 2, 3, 3, 4, 6, 9, 9, 0, 12, 13]
    graph = tree(tokens(15, seed=3), shape, context)
    hand = Hand(model, PAGES)
    if prompt:
        hand.read(prompt)
    scored = logits(hand.run(graph))
    plain = Hand(model, list(range(12)))
    if prompt:
        plain.read(prompt, 13)
    for path in paths(graph):
        alone = logits(plain.run(chain([int(graph.tokens[n]) for n in path], context)))
        assert np.array_equal(alone[-1], scored[path[-1]])


def test_wide_trees_and_forests_in_batches(model: Decoder) -> None:
    rng = np.random.default_rng(5)
    shape = [-1, -1] + [int(rng.integers(-1, i)) for i in range(2, 70)]
    graph = tree(tokens(70, seed=9), shape, 61)
    hand, other = Hand(model, PAGES), Hand(model, [1, 2, 3, 4])
    hand.read(tokens(61))
    work = [other.work(chain(tokens(20, seed=2))), hand.work(graph)]
    scored = logits(model.forward(work).wait()[1])
    for path in paths(graph)[::6]:
        alone = logits(hand.run(chain([int(graph.tokens[n]) for n in path], 61)))
        assert np.array_equal(alone[-1], scored[path[-1]])


def test_accepted_paths_can_be_kept(model: Decoder) -> None:
    """Scattered entries of a tree, once moved, are as good as those of a chain."""
    prompt = tokens(60)
    graph = tree(tokens(10, seed=4), [-1, 0, 0, 2, 2, 4, 5, 5, 7, 8], 60)
    path = paths(graph)[9]
    hand, plain = Hand(model, PAGES), Hand(model, list(range(12)))
    hand.read(prompt)
    hand.run(graph)
    hand.keep(graph, path)
    plain.read(prompt + [int(graph.tokens[n]) for n in path], 1)
    after = tokens(9, seed=5)
    assert np.array_equal(hand.read(after), plain.read(after, 2))


def test_entries_out_of_order(model: Decoder) -> None:
    """Where an entry lies does not matter, only its logical position."""
    prompt = tokens(80)
    hand, odd = Hand(model, PAGES), Hand(model, list(range(12)))
    hand.read(prompt)
    odd.read(prompt)
    order = np.random.default_rng(0).permutation(80)
    sources = np.asarray([odd.slot(int(i)) for i in order])
    model.move(sources, np.asarray([odd.slot(i) for i in range(80)]))
    odd.positions = [int(i) for i in order]
    graph = chain(tokens(5, seed=1), 80)
    assert np.array_equal(logits(hand.run(graph)), logits(odd.run(graph)))


def test_only_new_nodes_are_computed_in_later_rounds(model: Decoder) -> None:
    hand = Hand(model, PAGES)
    hand.read(tokens(50))
    graph = chain(tokens(6, seed=1), 50)
    grown = graph.grow(tree([1, 2, 3], [-1, -1, 0], 56))
    whole = logits(hand.run(grown))
    hand.run(graph)
    late = hand.run(grown, first=6)
    assert late.nodes.tolist() == [6, 7, 8]
    assert np.array_equal(logits(late), whole[6:])


def test_blocks_and_siblings(model: Decoder) -> None:
    """Nodes of a block see each other; rivals at the same positions do not."""
    hand = Hand(model, PAGES)
    hand.read(tokens(58))
    one, two = block(tokens(12, seed=1), 58), block(tokens(12, seed=2), 58)
    both = logits(hand.run(alternatives(one, two)))
    assert np.array_equal(both[:12], logits(hand.run(one)))
    assert np.array_equal(both[12:], logits(hand.run(two)))
    assert not np.array_equal(both[0], logits(hand.run(chain(tokens(12, seed=1), 58)))[0])


def test_probes_at_positions_that_are_taken(model: Decoder) -> None:
    """A node may see two entries at one position; the answer depends only on what it sees."""
    hand = Hand(model, PAGES)
    hand.read(tokens(70))
    probe = chain([5, 6, 7], positions=[40, 69, 70])
    alone = logits(hand.run(probe))
    together = union(tree([1, 2, 3], [-1, 0, 0], 70), probe, chain([8, 9], 70))
    assert np.array_equal(logits(hand.run(together))[3:6], alone)
    split = Hand(model, list(range(12)))
    split.read(tokens(70), 9)
    first = chain([5], positions=[40])
    split.run(first)
    split.keep(first, [0])
    assert np.array_equal(logits(split.run(chain([6, 7], positions=[69, 70]))), alone[1:])


def test_more_repeated_positions_than_a_block_holds(model: Decoder) -> None:
    hand = Hand(model, PAGES)
    hand.read(tokens(80))
    again = chain(tokens(75, seed=8), 0)
    whole = logits(hand.run(again))
    assert np.isfinite(whole).all()
    beside = union(chain([3, 4], 80), again)
    assert np.array_equal(logits(hand.run(beside))[2:], whole)


def test_stale_entries_give_way_to_nodes_at_their_positions(model: Decoder) -> None:
    hand = Hand(model, PAGES)
    hand.read(tokens(30))
    stale = chain([1, 2, 3, 4], 30)
    hand.run(stale)
    hand.keep(stale, range(4))
    hand.stale = 4
    fresh = chain([9, 8], positions=[31, 33])
    scored = logits(hand.run(fresh, gap=4))
    other = Hand(model, list(range(12)))
    other.read(tokens(30))
    other.run(stale)
    other.keep(stale, [0, 2])
    assert np.array_equal(logits(other.run(fresh)), scored)


def test_garbage_in_free_slots_is_not_seen(model: Decoder) -> None:
    hand = Hand(model, [0, 1, 2, 3])
    clean = hand.read(tokens(20))
    Hand(model, [2, 3, 1, 0]).read(tokens(60, seed=7))
    assert np.array_equal(Hand(model, [0, 1, 2, 3]).read(tokens(20)), clean)


def test_a_tree_over_a_long_context() -> None:
    """Large enough that the work is cut into several pieces."""
    model = random_decoder(replace(CONFIGS["grouped"], context=2048), pages=140)
    hand = Hand(model, list(range(139, -1, -1)))
    prompt = tokens(1500)
    hand.read(prompt, 512)
    graph = tree(tokens(64, seed=1), [-1] + [(i - 1) // 2 for i in range(1, 64)], 1500)
    scored = logits(hand.run(graph))
    for path in paths(graph)[5::13]:
        alone = logits(hand.run(chain([int(graph.tokens[n]) for n in path], 1500)))
        assert np.array_equal(alone[-1], scored[path[-1]])


def test_layers_one_after_the_other(model: Decoder) -> None:
    """Early exit: the first layers draft, the others go on from the states they left."""
    hand = Hand(model, PAGES)
    hand.read(tokens(33))
    graph = tree(tokens(5, seed=1), [-1, 0, 0, 1, 2], 33)
    every = tuple(range(5))
    whole = hand.run(graph, Wants(nodes=every, logits=True, hidden=(0, 1, 2)))
    early = hand.run(graph, Wants(nodes=every, logits=True, hidden=(1,)), layers=(0, 1))
    assert np.array_equal(early.hidden[1], whole.hidden[1])
    assert not np.array_equal(logits(early), logits(whole))
    late = hand.run(
        graph,
        Wants(nodes=every, logits=True, hidden=(2,)),
        layers=(1, 2),
        hidden=early.hidden[1],
    )
    assert np.array_equal(logits(late), logits(whole))
    assert np.array_equal(late.hidden[2], whole.hidden[2])


def test_different_layers_in_one_pass(model: Decoder) -> None:
    hands = [Hand(model, list(range(i * 12, i * 12 + 12))) for i in range(3)]
    for hand in hands:
        hand.read(tokens(33))
    graph = chain(tokens(5, seed=1), 33)
    wants = Wants(nodes=tuple(range(5)), logits=True, hidden=(1,))
    whole = hands[0].run(graph, wants)
    early = hands[1].run(graph, wants, layers=(0, 1))
    works = [
        hands[1].work(graph, wants, layers=(0, 1)),
        hands[0].work(graph, wants),
        hands[2].work(graph, wants, layers=(1, 2), hidden=whole.hidden[1]),
    ]
    hands[2].run(graph, wants, layers=(0, 1))
    got = model.forward(works).wait()
    assert np.array_equal(logits(got[0]), logits(early))
    assert np.array_equal(logits(got[1]), logits(whole))
    assert np.array_equal(logits(got[2]), logits(whole))


def test_mixtures_are_sums_of_rows(model: Decoder) -> None:
    hand = Hand(model, PAGES)
    hand.read(tokens(10))
    sure = Mixture(tokens=(5, 9), weights=(1.0, 0.0))
    mixed = logits(hand.run(block([sure, 4], 10)))
    assert np.array_equal(mixed, logits(hand.run(block([5, 4], 10))))
    halves = Mixture(tokens=(5, 9), weights=(0.5, 0.5))
    assert not np.array_equal(mixed, logits(hand.run(block([halves, 4], 10))))
