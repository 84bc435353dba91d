"""Weights of four bits: rounding, and kernels that give one set of bits in every build and packing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outstride import LLM, SamplingParams
from outstride.bench.prompts import built_in
from outstride.bench.prove import prove
from outstride.core.graph import FloatArray, NodeId, chain, tree
from outstride.errors import CorruptModel
from outstride.models import load as loading
from outstride.models.choose_weights import place, placements
from outstride.models.decoder import Decoder
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.cpu.int4 import GROUP, Int4Matrix
from outstride.ops.cpu.weights import PackedModel
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelWeights
from tests.models.drive import Hand, logits, random_decoder, tiny, tokens
from tests.ops.switched import SWITCHED

needs_kernels = pytest.mark.skipif(
    native.library_path() is None, reason="the native kernels were not built"
)

SHAPES: dict[str, dict[str, Any]] = {
    "usual": {},
    "odd sizes": {"hidden_size": 40, "intermediate_size": 51, "head_dim": 12, "vocab_size": 101},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "untied": {"tied": False},
    "whole tiles": {"hidden_size": 64, "intermediate_size": 128, "head_dim": 64, "heads": 4},
    "many groups": {"hidden_size": 288, "intermediate_size": 400, "layers": 1},
    **SWITCHED,
}
int4 = partial(Cpu.of, bits=4)
spread_out = loading.rounded_reference


def decoder(ops: Callable[[ModelWeights], Ops], **changes: Any) -> Decoder:
    return random_decoder(tiny(**changes), pages=64, make_ops=ops, rounded=True)


def isas() -> list[int]:
    return list(native.isas())


def read(model: Decoder, count: int = 130, chunk: int | None = None) -> FloatArray:
    return Hand(model, list(range(30))).read(tokens(count), chunk or count)


def rounded(weight: FloatArray) -> FloatArray:
    depth = -(-weight.shape[1] // GROUP) * GROUP
    return Int4Matrix.of(weight, None, depth).dense()


# --- rounding ---------------------------------------------------------------------------------------


def test_groups_of_a_file_come_out_as_they_went_in() -> None:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    rng = np.random.default_rng(0)
    weight = rng.standard_normal((40, 320)).astype(np.float32) * rng.uniform(0.01, 3, (40, 1))
    weight[3] = 0.0
    weight[4, :32] = 0.25
    stored = quantize(weight.astype(np.float32), GGMLQuantizationType.Q4_1)
    plain = dequantize(stored, GGMLQuantizationType.Q4_1).astype(np.float32)
    np.testing.assert_array_equal(rounded(plain), plain)


@pytest.mark.parametrize("span", [15, 12, 9, 7])
def test_grids_that_were_not_used_to_their_ends_are_found(span: int) -> None:
    rng = np.random.default_rng(span)
    codes = rng.integers(0, span + 1, (20, 4, GROUP))
    codes[..., 0], codes[..., 1] = 0, span
    scale = rng.uniform(0.1, 2, (20, 4, 1)).astype(np.float16).astype(np.float32)
    minimum = rng.uniform(-9, 1, (20, 4, 1)).astype(np.float16).astype(np.float32)
    weight = (scale * codes.astype(np.float32) + minimum).reshape(20, -1)
    np.testing.assert_array_equal(rounded(weight), weight)


def test_other_weights_are_rounded_to_the_best_grid_of_some() -> None:
    """Never worse than from end to end of a group, and better on the whole."""
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((64, 256)).astype(np.float32)
    weight[:, ::50] *= 4
    groups = weight.reshape(-1, GROUP)
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    step = (high - low) / 15
    simple = np.square(np.rint((groups - low) / step) * step + low - groups).sum(axis=1)
    ours = np.square(rounded(weight).reshape(-1, GROUP) - groups).sum(axis=1)
    assert np.all(ours <= 1.02 * simple + 1e-9)  # scales have 11 bits here
    assert ours.sum() < 0.92 * simple.sum()


@pytest.mark.parametrize("shape", [(5, 3), (33, 70), (16, 32), (1, 4096)])
def test_any_size_is_rounded(shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    back = rounded(weight)
    assert back.shape == shape
    assert np.abs(back - weight).max() <= (weight.max() - weight.min()) / 15


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda: Int4Matrix.of(np.zeros((4, 8), dtype=np.float32), None, 16), "depth of 16"),
        (lambda: Int4Matrix.of(np.zeros((4, 40), dtype=np.float32), None, 32), "40 columns"),
        (lambda: Int4Matrix.of(np.full((4, 8), 1e6, dtype=np.float32), None, 32), "65,504"),
        (lambda: Int4Matrix(np.zeros(320, dtype=np.uint8), None, 4, 8, 2, 32), "wrong size"),
        (lambda: Int4Matrix(np.zeros(640, dtype=np.uint8), None, 4, 8, 2, 33), "wrong size"),
    ],
)
def test_wrong_shapes_are_exceptions(spoil: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        spoil()


# --- without kernels --------------------------------------------------------------------------------


def test_without_kernels_weights_are_rounded_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "library_path", lambda: None)
    place(tiny(), placements("auto", "int4"))
    assert "no native kernels" in capsys.readouterr().err
    model, exact = decoder(spread_out), decoder(Reference)
    assert model.fingerprint != exact.fingerprint
    off = np.abs(read(model, 20) - read(exact, 20)).max()
    assert off > 1e-3
    again = decoder(lambda m: spread_out(_rounded_twice(m)))
    np.testing.assert_array_equal(read(again, 20), read(model, 20))


def _rounded_twice(model: ModelWeights) -> ModelWeights:
    spread_out(model)
    return model


# --- the kernels ------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_every_build_gives_the_same_bits(shape: str) -> None:
    found = [
        read(decoder(partial(int4, isa=isa, count=count), **SHAPES[shape]), 70)
        for isa in isas()
        for count in (1, 3)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_close_to_the_reference_with_the_same_weights(shape: str) -> None:
    ours, theirs = (read(decoder(ops, **SHAPES[shape])) for ops in (int4, spread_out))
    spread = theirs.std()
    assert np.abs(ours - theirs).max() < 0.6 * spread  # KV and activations have eight bits
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.08 * spread


@needs_kernels
@pytest.mark.parametrize("seed", range(6))
def test_random_shapes_and_numbers_of_rows(seed: int) -> None:
    """One layer, so that what is off is what one pass through the matrices is off."""
    rng = np.random.default_rng(seed)
    changes = {
        "hidden_size": int(rng.integers(8, 300)),
        "intermediate_size": int(rng.integers(8, 500)),
        "head_dim": 2 * int(rng.integers(4, 40)),
        "layers": 1,
    }
    rows = int(rng.integers(1, 131))
    isa = int(rng.choice(isas()))
    ours, theirs = (
        read(decoder(ops, **changes), rows) for ops in (partial(int4, isa=isa), spread_out)
    )
    assert np.abs(ours - theirs).max() < 0.25 * theirs.std()  # the head has eight bits
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < 0.04 * theirs.std()


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_ignore_their_neighbours(shape: str) -> None:
    """Chunks of any size, and other sequences in the same pass."""
    model = decoder(int4, **SHAPES[shape])
    whole = read(model)
    for chunk in (1, 2, 3, 4, 5, 8, 9, 17, 64):
        np.testing.assert_array_equal(read(model, chunk=chunk), whole)
    hands = [Hand(model, list(range(i * 9, i * 9 + 9))) for i in range(6)]
    lengths = [1 + 25 * i for i in range(6)]
    work = [hand.work(chain(tokens(130)[:n])) for hand, n in zip(hands, lengths, strict=True)]
    for scores, n in zip(model.forward(work).wait(), lengths, strict=True):
        np.testing.assert_array_equal(logits(scores), whole[:n])


@needs_kernels
def test_trees_are_their_paths() -> None:
    model = decoder(int4)
    hand = Hand(model, list(range(9, 20)))
    hand.read(tokens(17))
    parents = [-1, *((i - 1) // 3 for i in range(1, 20))]
    graph = tree([int(t) for t in tokens(20, seed=5)], parents, 17)
    scored = logits(hand.run(graph))
    for node in range(20):
        path = [int(graph.tokens[n]) for n in graph.path(NodeId(node))]
        np.testing.assert_array_equal(logits(hand.run(chain(path, 17)))[-1], scored[node])


@needs_kernels
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_do_not_overflow(sign: int) -> None:
    """All activations at one end, all codes but one of a group at the other."""

    def full(make_ops: Callable[[ModelWeights], Ops], model: ModelWeights) -> Ops:
        model.embedding.fill_(sign)
        model.embedding[::2] *= 2
        layer = model.layers[0]
        layer.attention_norm.fill_(1)
        layer.mlp_norm.fill_(1)
        for matrix in (layer.qkv, layer.gate_up, layer.down):
            matrix.fill_(1 / 64)
            matrix[:, ::GROUP] = 0
        return make_ops(model)

    changes = {"hidden_size": 96, "intermediate_size": 5000, "layers": 1}
    theirs = read(decoder(partial(full, spread_out), **changes), 6)
    for isa in isas():
        ours = read(decoder(partial(full, partial(int4, isa=isa)), **changes), 6)
        assert np.abs(ours - theirs).max() < 0.05 * theirs.std()


@needs_kernels
@pytest.mark.parametrize("shape", ["usual", "untied", "biases", "odd sizes"])
def test_kept_weights_are_the_same(shape: str, tmp_path: Path) -> None:
    config, about = tiny(**SHAPES[shape]), {"source": shape}
    first = decoder(int4, **SHAPES[shape])
    assert isinstance(first.ops, Cpu)
    path = tmp_path / "kept.safetensors"
    first.ops.runtime.weights.write(path, {**about, "digest": "d"})
    weights, _ = PackedModel.read(path, config, about, 4)
    second = Decoder(config, Cpu(config, weights, slots=1024, page_size=16), "d", pages=64)
    assert second.ops.name == first.ops.name != decoder(Cpu.of, **SHAPES[shape]).ops.name
    np.testing.assert_array_equal(read(second, 70), read(first, 70))
    with pytest.raises(CorruptModel, match="other weights"):
        PackedModel.read(path, config, about)
    with pytest.raises(CorruptModel, match="does not fit"):
        PackedModel.read(path, tiny(**{**SHAPES[shape], "intermediate_size": 200}), about, 4)


@needs_kernels
@pytest.mark.model
def test_ngram_on_the_default_model() -> None:
    with LLM("smollm2", weights="int4") as llm:
        assert "int4" in llm.model.ops.name
        for params in (
            SamplingParams(max_tokens=12),
            SamplingParams(max_tokens=12, temperature=0.8, seed=3),
        ):
            report = prove(llm, "ngram", built_in()[3:5], params, batch=2, alone=1)
            assert report.equal
