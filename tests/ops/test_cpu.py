"""The native kernels: one set of bits in every build and every packing, close to the reference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from outstride.core.graph import FloatArray, NodeId, block, chain, tree
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import Purpose, SamplingSpec, best
from outstride.errors import CorruptModel
from outstride.models.decoder import Decoder
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.cpu.gemm import Gemm
from outstride.ops.cpu.hadamard import HadamardRotation, hartley
from outstride.ops.cpu.int8 import Int8Matrix, alternating
from outstride.ops.cpu.runtime import Runtime
from outstride.ops.cpu.sampler import Sampler
from outstride.ops.cpu.weights import PackedModel
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelWeights
from tests.models.drive import Hand, logits, random_decoder, tiny, tokens
from tests.ops.switched import SWITCHED

pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="the native kernels were not built"
)

SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "one key head": {"kv_heads": 1},
    "as many key heads": {"kv_heads": 6},
    "odd sizes": {"hidden_size": 40, "intermediate_size": 51, "head_dim": 12, "vocab_size": 101},
    "head norms": {"head_norms": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "window": {"windows": (5, None)},
    "untied": {"tied": False},
    "without rotation": {"rope_layers": (True, False)},
    "five in a group": {"heads": 10, "kv_heads": 2},
    "seven in a group": {"heads": 7, "kv_heads": 1},
    "whole tiles": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64, "heads": 4},
    "three in a group": {"heads": 6, "kv_heads": 2, "head_dim": 64, "windows": (40, None)},
    "five and long": {"heads": 5, "kv_heads": 1, "head_dim": 64},
    "long heads": {"hidden_size": 128, "intermediate_size": 192, "head_dim": 128, "heads": 4},
    **SWITCHED,
}


def isas() -> list[int]:
    return list(native.isas())


def decoder(ops: Callable[[ModelWeights], Ops], **changes: Any) -> Decoder:
    return random_decoder(tiny(**changes), pages=64, make_ops=ops, rounded=True)


def read(
    model: Decoder, count: int = 150, chunk: int | None = None, pages: Any = None
) -> FloatArray:
    hand = Hand(model, list(pages or range(30)))
    return hand.read(tokens(count), chunk or count)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_build_gives_the_same_bits(shape: str) -> None:
    found = [
        read(decoder(partial(Cpu.of, isa=isa, count=count), **SHAPES[shape]), 70)
        for isa in isas()
        for count in (1, 2, 3)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_the_reference(shape: str) -> None:
    ours, theirs = (read(decoder(ops, **SHAPES[shape]), 70) for ops in (Cpu.of, Reference))
    spread = theirs.std()  # weights, what they are multiplied with, and entries have eight bits
    assert np.abs(ours - theirs).max() < 0.6 * spread
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.07 * spread


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_ignore_their_neighbours(shape: str) -> None:
    """Chunks of any size, pages in any order, other sequences in the same pass."""
    model = decoder(Cpu.of, **SHAPES[shape])
    whole = read(model)
    for chunk, pages in ((1, range(30)), (7, range(40, 10, -1)), (64, range(5, 35)), (130, None)):
        np.testing.assert_array_equal(read(model, chunk=chunk, pages=pages), whole)
    hands = [Hand(model, list(range(i * 10, i * 10 + 10))) for i in range(6)]
    lengths = [1 + 27 * i for i in range(6)]
    work = [hand.work(chain(tokens(150)[:n])) for hand, n in zip(hands, lengths, strict=True)]
    for scores, n in zip(model.forward(work).wait(), lengths, strict=True):
        np.testing.assert_array_equal(logits(scores), whole[:n])


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_are_their_paths(shape: str) -> None:
    model = decoder(Cpu.of, **SHAPES[shape])
    for context in (1, 15, 16, 17, 33):
        hand = Hand(model, list(range(9, 20)))
        hand.read(tokens(context))
        parents = [-1, *((i - 1) // 3 for i in range(1, 40))]
        graph = tree([int(t) for t in tokens(40, seed=5)], parents, context)
        scored = logits(hand.run(graph))
        for node in range(0, 40, 3):
            path = [int(graph.tokens[n]) for n in graph.path(NodeId(node))]
            alone = logits(hand.run(chain(path, context)))
            np.testing.assert_array_equal(alone[-1], scored[node])


def test_kept_paths_are_as_if_read_in_order() -> None:
    """After an accepted path was moved together, the next pass cannot tell."""
    model = decoder(Cpu.of)
    hand = Hand(model, list(range(9, 20)))
    hand.read(tokens(13))
    graph = tree([int(t) for t in tokens(9, seed=2)], [-1, -1, 0, 0, 2, 3, 4, 4, 7], 13)
    hand.run(graph)
    hand.keep(graph, graph.path(NodeId(8)))
    path = [int(graph.tokens[n]) for n in graph.path(NodeId(8))]
    after = logits(hand.run(chain([5], 13 + len(path))))
    other = Hand(model, list(range(30, 40)))
    whole = other.read([*tokens(13), *path, 5])
    np.testing.assert_array_equal(after[-1], whole[-1])


def test_blocks_against_the_reference() -> None:
    found = []
    for ops in (Cpu.of, Reference):
        hand = Hand(decoder(ops), list(range(9, 20)))
        hand.read(tokens(21))
        graph = block([int(t) for t in tokens(6, seed=3)], 21)
        found.append(logits(hand.run(graph)))
    assert np.abs(found[0] - found[1]).max() < 0.4 * found[1].std()


def test_greedy_rows_never_become_rows_of_the_vocabulary() -> None:
    """The fused choice is the argmax of the rows, ties to the lowest id."""
    model = decoder(Cpu.of)
    hand = Hand(model, list(range(30)))
    graph = chain(tokens(60))
    rows = logits(hand.run(graph))
    chosen = hand.run(graph, Wants(nodes=tuple(range(60)))).best[:, 0]
    np.testing.assert_array_equal(chosen, rows.argmax(axis=1))


@pytest.mark.parametrize("isa", isas() if native.library_path() else [])
@pytest.mark.parametrize("count", [1, 3])
def test_the_best_of_greedy_rows_are_those_of_the_core(isa: int, count: int) -> None:
    """Kept per thread while the rows are made; half of the vocabulary ties with the other half."""

    def doubled(model: ModelWeights) -> Ops:
        model.embedding[60:120] = model.embedding[:60].clone()
        return Cpu.of(model, isa=isa, count=count)

    model = decoder(doubled, vocab_size=133)
    hand = Hand(model, list(range(30)))
    graph = chain([int(t) % 133 for t in tokens(40)])
    rows = logits(hand.run(graph))
    for k in (1, 2, 7, native.MAX_FUSED, native.MAX_FUSED + 1):
        found = hand.run(graph, Wants(nodes=tuple(range(40)), best=k)).best
        for i, row in enumerate(rows):
            assert found[i].tolist() == best(row, SamplingSpec(), i + 1, k).tolist()


def rotation_matrix(width: int) -> npt.NDArray[Any]:
    """The matrix that rotates a row of this width."""
    rotation = HadamardRotation.of(width)
    table: npt.NDArray[Any] = np.ones((1, 1))
    while len(table) < rotation.run:
        table = np.kron([[1.0, 1.0], [1.0, -1.0]], table)
    for factor in rotation.factors[:-1]:
        table = np.kron(hartley(int(factor)), table)
    return np.kron(np.eye(width // len(table)), table) * rotation.signs


WIDTHS = (16, 48, 64, 96, 576, 43 * 16, 67 * 16, 1536, 9008)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_rotation_is_orthogonal(width: int) -> None:
    """Up to a factor; none of its entries stands out, where the width has no large prime factor."""
    table, run = rotation_matrix(width), HadamardRotation.of(width).run
    np.testing.assert_allclose(table @ table.T, run * np.eye(width), atol=1e-9 * run)
    if width in (64, 96, 576, 1536):
        assert np.abs(table).max() < 2.01 * np.sqrt(run / width)


@pytest.mark.parametrize("width", WIDTHS)
def test_packing_is_rounding(width: int) -> None:
    """Half a step of a grid from the least to the largest of the rotated row, or around 0."""
    rng = np.random.default_rng(0)
    rotation, k = HadamardRotation.of(width), width - width % 3
    weight = rng.standard_normal((37, k)).astype(np.float32)
    weight[0] = 0.0
    weight[1] = np.abs(weight[1])
    weight[:, 1] *= 30
    packed = Int8Matrix.of(weight, None, width)
    back = packed.rows(np.arange(37), k)
    rotated = weight @ rotation_matrix(width)[:, :k].T / rotation.run
    low, high = (np.minimum(rotated.min(axis=1), 0), np.maximum(rotated.max(axis=1), 0))
    step = np.maximum(np.maximum(high, -low) / 127, (high - low) / 255)
    whole = np.zeros((37, width))
    whole[:, :k] = back
    off = np.sqrt(np.square(whole - np.pad(weight, ((0, 0), (0, width - k)))).sum(axis=1))
    assert np.all(
        off <= 0.5001 * step * np.sqrt(width * rotation.run) + 1e-5 * np.abs(weight).max()
    )
    assert np.abs(back[0]).max() == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_products_are_those_of_rounded_rows(width: int) -> None:
    """In every build, for any number of rows: both sides rotated, then eight bits for each row."""
    rng = np.random.default_rng(width)
    weight = rng.standard_normal((50, width)).astype(np.float32)
    x = rng.standard_normal((45, width)).astype(np.float32)
    x[:, 3] *= 40
    packed, rotation = Int8Matrix.of(weight, None, width), rotation_matrix(width)
    rotated_x = x @ rotation.T
    step = np.abs(rotated_x).max(axis=1, keepdims=True) / 127
    codes = np.rint(rotated_x / step)
    expected = (
        codes
        * step
        @ (packed.rows(np.arange(50), width) @ rotation.T).T
        / HadamardRotation.of(width).run
    )
    exact = x @ weight.T
    for isa in isas():
        model = random_decoder(tiny(), pages=4, make_ops=partial(Cpu.of, isa=isa))
        ops = model.ops
        assert isinstance(ops, Cpu)
        ops.runtime.reserve_depth(width)
        for count in (1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 45):
            found = ops.gemm.times(x[:count], packed)
            off = np.abs(found - expected[:count]).max()
            assert off < 2 * step.max() * np.abs(weight).max()  # codes on an edge fall either way
            assert np.sqrt(np.mean((found - expected[:count]) ** 2)) < 0.003 * exact.std()
        assert np.sqrt(np.mean((found - exact) ** 2)) < 0.03 * exact.std()


@pytest.mark.parametrize("sign", [1, -1])
def test_long_sums_do_not_overflow(sign: int) -> None:
    """Beyond 4,096 terms the sum is cut: all weights and activations at their largest."""

    def full(make_ops: Callable[[ModelWeights], Ops], model: ModelWeights) -> Ops:
        model.layers[0].gate_up.fill_(0.01)
        model.layers[0].down.fill_(sign * 0.001)
        return make_ops(model)

    changes = {"hidden_size": 32, "intermediate_size": 20_000, "layers": 1}
    theirs = read(decoder(partial(full, Reference), **changes), 5)
    for isa in isas():
        ours = read(decoder(partial(full, partial(Cpu.of, isa=isa)), **changes), 5)
        assert np.abs(ours - theirs).max() < 0.1 * theirs.std()


def test_gate_and_up_take_turns() -> None:
    weight = np.arange(40, dtype=np.float32).reshape(40, 1)
    turns = alternating(weight)[:, 0]
    assert turns[:16].tolist() == list(range(16))
    assert turns[16:32].tolist() == list(range(20, 36))
    assert turns[32:36].tolist() == list(range(16, 20))
    assert turns[36:48].tolist() == [0.0] * 12


@pytest.mark.parametrize(
    "spoil",
    [
        lambda: Int8Matrix.of(np.zeros((4, 8), dtype=np.float32), None, 15),
        lambda: Int8Matrix.of(np.zeros((4, 32), dtype=np.float32), None, 16),
        lambda: Int8Matrix.of(np.zeros((4, 8), dtype=np.float32), None, 16).rows(
            np.asarray([4]), 8
        ),
    ],
)
def test_wrong_shapes_are_exceptions(spoil: Callable[[], Any]) -> None:
    with pytest.raises(ValueError):
        spoil()


def test_an_instruction_set_that_is_not_there() -> None:
    assert native.library().outstride_open(1, 99, 1, 16, 64) is None
    assert native.library().outstride_open(0, 0, 1, 16, 64) is None


DRAWS = [
    SamplingSpec(temperature=1.0),
    SamplingSpec(temperature=0.7, seed=3),
    SamplingSpec(temperature=0.8, top_p=0.95, seed=4, index=2),
    SamplingSpec(temperature=0.8, top_p=0.3, seed=2**63),
    SamplingSpec(temperature=1.3, top_k=7, seed=5),
    SamplingSpec(temperature=1.3, top_k=500, top_p=0.5, seed=5),
    SamplingSpec(temperature=1.0, min_p=0.05, seed=6),
    SamplingSpec(temperature=1.1, top_k=40, top_p=0.9, min_p=0.02, seed=7, purpose=Purpose.DRAFT),
    SamplingSpec(temperature=5.0, top_p=0.999, seed=8),
    SamplingSpec(),
]


@pytest.mark.parametrize("isa", isas() if native.library_path() else [])
@pytest.mark.parametrize("k", [1, 5])
def test_tokens_are_chosen_by_the_rule_of_the_core(isa: int, k: int) -> None:
    """Bit for bit: native noise, filters and ties against core.sampling."""
    config = tiny(vocab_size=1013)
    runtime = Runtime.__new__(Runtime)
    runtime.lib, runtime.shape, runtime.threads = native.library(), config, 2
    runtime.engine = runtime.lib.outstride_open(2, isa, 4, 64, 2048)
    sampler = Sampler(runtime, Gemm(runtime))
    rng = np.random.default_rng(1)
    rows = np.zeros((40, 1024), dtype=np.float32)
    rows[:, :1013] = rng.standard_normal((40, 1013)) * rng.uniform(0.1, 8, (40, 1))
    rows[::3, :1013] = np.round(rows[::3, :1013])  # ties
    for draw in DRAWS:
        asked = []
        for i in range(40):
            graph = chain([1], 17 * i)
            asked.append((Proposal(graph, 1, sampling=draw, wants=Wants(best=k)), 0))
        found = sampler.sample(asked, rows)
        for i, row in enumerate(rows):
            right = best(row[:1013], draw, 17 * i + 1, k)
            assert found[i][: len(right)].tolist() == right.tolist()
            assert (found[i][len(right) :] == -1).all()


# --- kept weights -----------------------------------------------------------------------------------


def test_kept_weights_are_the_same(tmp_path: Path) -> None:
    """Written and read back they give the same bits; damaged or foreign ones are refused."""
    for shape in ("usual", "untied", "biases", "head norms", "odd sizes"):
        config, about = tiny(**SHAPES[shape]), {"source": shape}
        first = decoder(Cpu.of, **SHAPES[shape])
        assert isinstance(first.ops, Cpu)
        path = tmp_path / f"{shape}.safetensors"
        first.ops.runtime.weights.write(path, {**about, "digest": "d"})
        weights, known = PackedModel.read(path, config, about)
        assert known["digest"] == "d"
        ops = Cpu(config, weights, slots=64 * 16, page_size=16)
        second = Decoder(config, ops, "d", pages=64)
        np.testing.assert_array_equal(read(second, 70), read(first, 70))
        with pytest.raises(CorruptModel, match="other weights"):
            PackedModel.read(path, config, {"source": "elsewhere"})
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptModel, match="damaged"):
            PackedModel.read(path, config, about)
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(CorruptModel, match="cannot be read"):
            PackedModel.read(path, config, about)
