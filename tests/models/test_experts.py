"""Mixtures of experts: routing, order of additions, native kernels, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outstride import LLM, SamplingParams
from outstride.core.graph import FloatArray, NodeId, chain, tree
from outstride.errors import CorruptModel
from outstride.models.converted import load_native
from outstride.models.decoder import Decoder
from outstride.models.experts import Experts
from outstride.models.load import load, opened, rounded_reference
from outstride.ops.arithmetic import TILE, pad, route, through_experts
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.reference import Reference
from outstride.ops.routing import Routing
from outstride.ops.weights import ExpertWeights, ModelWeights
from tests.models import checkpoints, published
from tests.models.drive import Hand, logits, random_decoder, tiny, tokens

COUNT, HIDDEN, SIZE = 12, 32, 20
ROUTINGS = {
    "softmax": Routing(3),
    "normalized": Routing(3, normalized=True),
    "biased": Routing(4, biased=True),
    "sigmoid": Routing(2, sigmoid=True, normalized=True, scale=2.5),
    "groups": Routing(3, sigmoid=True, normalized=True, scale=2.5, groups=4, groups_kept=2),
    "one": Routing(1),
}


def expected(
    scores: FloatArray, bias: FloatArray, routing: Routing
) -> tuple[list[int], list[float]]:
    """One row's experts and weights, written down the long way, in double precision."""
    wide = scores.astype(np.float64)
    if routing.sigmoid:
        wide = 1 / (1 + np.exp(-wide))
    else:
        wide = np.exp(wide - wide.max()) / np.exp(wide - wide.max()).sum()
    rated = wide + bias
    group = len(rated) // routing.groups
    groups = [sorted(rated[i : i + group])[-2:] for i in range(0, len(rated), group)]
    best = sorted(range(routing.groups), key=lambda g: (-sum(groups[g]), g))
    open_to = [i for i in range(len(rated)) if i // group in best[: routing.groups_kept]]
    chosen = sorted(open_to, key=lambda i: (-rated[i], i))[: routing.per_token]
    shares = [(rated if routing.biased else wide)[i] for i in chosen]
    total = sum(shares) if routing.normalized else 1
    return chosen, [share / total * routing.scale for share in shares]


@pytest.mark.parametrize("name", ROUTINGS)
def test_routes(name: str) -> None:
    routing, rng = ROUTINGS[name], np.random.default_rng(3)
    scores = rng.standard_normal((2 * TILE, COUNT)).astype(np.float32)
    bias = rng.standard_normal(COUNT).astype(np.float32) * 0.1
    chosen, weights = route(torch.from_numpy(scores), torch.from_numpy(bias), routing)
    for row in range(len(scores)):
        experts, shares = expected(scores[row], bias, routing)
        assert chosen[row].tolist() == experts
        np.testing.assert_allclose(weights[row], shares, rtol=1e-5)


@pytest.mark.parametrize("name", ROUTINGS)
def test_ties_go_to_the_lowest_expert(name: str) -> None:
    routing, rng = ROUTINGS[name], np.random.default_rng(4)
    scores = rng.integers(0, 2, (4 * TILE, COUNT)).astype(np.float32)
    scores[0] = 0
    chosen, _ = route(torch.from_numpy(scores), None, routing)
    assert chosen[0].tolist() == list(range(routing.per_token))
    for row in range(len(scores)):
        assert chosen[row].tolist() == expected(scores[row], np.zeros(COUNT, "f"), routing)[0]


def experts(routing: Routing, seed: int = 0) -> ExpertWeights:
    source = torch.Generator().manual_seed(seed)
    return ExpertWeights(
        routing=routing,
        router=torch.randn(COUNT, HIDDEN, generator=source) * 0.3,
        bias=None,
        gate_up=torch.randn(COUNT, 2 * SIZE, HIDDEN, generator=source) * 0.2,
        down=torch.randn(COUNT, HIDDEN, SIZE, generator=source) * 0.2,
    )


@pytest.mark.parametrize("name", ROUTINGS)
def test_nothing_is_dropped(name: str) -> None:
    """Even if all rows choose the same experts, each gets the weighted sum of its own."""
    weights = experts(ROUTINGS[name])
    x = torch.randn(1, HIDDEN).expand(3 * TILE, HIDDEN) + 0.01 * torch.randn(3 * TILE, HIDDEN)
    found = through_experts(x.contiguous(), weights).double()
    for row in range(0, len(x), 7):
        scores = (x[row] @ weights.router.T).numpy()
        chosen, shares = expected(scores, np.zeros(COUNT, "f"), weights.routing)
        total = torch.zeros(HIDDEN, dtype=torch.float64)
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (weights.gate_up[expert].double() @ x[row].double()).chunk(2)
            total += share * (weights.down[expert].double() @ (torch.nn.functional.silu(gate) * up))
        torch.testing.assert_close(found[row], total, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_row_alone_and_among_63_others(name: str) -> None:
    weights = experts(ROUTINGS[name])
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(1))
    together = through_experts(x, weights)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(through_experts(x[order], weights), together[order])
    for row in (0, 17, 40, 63):
        assert torch.equal(through_experts(pad(x[row : row + 1]), weights)[0], together[row])


def test_equal_routers_use_the_lower_expert() -> None:
    """Twins in the router: what the higher one knows never shows."""
    weights = experts(Routing(1))
    router = weights.router.clone()
    router[7] = router[2]
    twins = replace(weights, router=router)
    down = weights.down.clone()
    down[7] += 100.0
    x = torch.randn(4 * TILE, HIDDEN)
    chosen, _ = route(x @ router.T, None, twins.routing)
    assert (chosen == 2).any()
    assert torch.equal(through_experts(x, twins), through_experts(x, replace(twins, down=down)))


@pytest.mark.parametrize(
    ("routing", "match"),
    [
        (Routing(9), "9 of 8 experts"),
        (Routing(0), "0 of 8 experts"),
        (Routing(2, groups=3), "3 groups"),
        (Routing(3, groups=4, groups_kept=1), "1 of 4 groups"),
        (Routing(3, groups=4, groups_kept=5), "5 of 4 groups"),
    ],
)
def test_nonsense_is_refused(routing: Routing, match: str) -> None:
    with pytest.raises(CorruptModel, match=match):
        Experts(layers=(True,), count=8, size=4, routing=routing)


@pytest.mark.skipif(native.library_path() is None, reason="no native kernels were built")
def test_partly_turned_heads_on_native_kernels() -> None:
    """Dimensions that rest need nothing of an implementation: their angles are zero."""
    config = tiny(rotary=8, head_norms=True)
    reference = random_decoder(config, rounded=True)
    fast = random_decoder(config, rounded=True, make_ops=Cpu.of)
    graph = chain(tokens(50))
    one, two = (logits(Hand(model, [0, 1, 2, 3]).run(graph)) for model in (reference, fast))
    assert np.abs(one - two).mean() < 0.04 * one.std()
    turned = logits(Hand(random_decoder(tiny(head_norms=True)), [0, 1, 2, 3]).run(graph))
    assert np.abs(one - turned).mean() > 0.1 * one.std()


needs_native = pytest.mark.skipif(
    native.library_path() is None, reason="the native kernels were not built"
)
MIXTURES: dict[str, dict[str, Any]] = {
    "softmax": {"experts": Experts((True, True), 12, 40, Routing(3))},
    "shared with a gate": {
        "experts": Experts((True, True), 9, 20, Routing(2), shared=36, shared_gate=True),
        "hidden_size": 40,
    },
    "first layer dense": {
        "experts": Experts((False, True), 7, 24, Routing(2, normalized=True), shared=16, bias=True),
        "head_norms": True,
        "wide_norms": True,
        "clip": 1.5,
        "rotary": 8,
    },
    "clipped head norms": {
        "experts": Experts((True, False), 5, 32, Routing(4, biased=True), bias=True),
        "head_norms": True,
        "clip": 0.8,
        "hidden_size": 64,
    },
    "groups": {
        "experts": Experts((True, True), 12, 48, ROUTINGS["groups"], shared=20, bias=True),
        "qkv_bias": True,
    },
    "biases": {
        "experts": Experts(
            (True, True), 18, 16, Routing(4), router_bias=True, projection_bias=True
        ),
    },
    "long rows": {
        "experts": Experts((True,), 3, 4500, Routing(2)),
        "layers": 1,
        "hidden_size": 64,
    },
}


def mixture(name: str, ops: Callable[[ModelWeights], Ops], bits: int = 8) -> Decoder:
    make: Callable[..., Ops] = partial(ops, bits=bits) if bits == 4 else ops  # type: ignore[call-arg]
    return random_decoder(tiny(**MIXTURES[name]), make_ops=make, rounded=True)


@needs_native
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_every_build_gives_the_same_bits(name: str, bits: int) -> None:
    found = [
        Hand(mixture(name, partial(Cpu.of, isa=isa, count=count), bits), list(range(9))).read(
            tokens(60)
        )
        for isa in native.isas()
        for count in (1, 3)
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@needs_native
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", MIXTURES)
def test_rows_ignore_each_other(name: str, bits: int) -> None:
    """Chunks of any size, draft trees, other sequences in the same pass."""
    model = mixture(name, Cpu.of, bits)
    whole = Hand(model, list(range(10))).read(tokens(90))
    for chunk in (1, 2, 7, 40):
        np.testing.assert_array_equal(
            Hand(model, list(range(12, 22))).read(tokens(90), chunk), whole
        )
    hands = [Hand(model, list(range(i * 7, i * 7 + 7))) for i in range(4)]
    lengths = [1, 17, 64, 90]
    work = [hand.work(chain(tokens(90)[:n])) for hand, n in zip(hands, lengths, strict=True)]
    for scores, n in zip(model.forward(work).wait(), lengths, strict=True):
        np.testing.assert_array_equal(logits(scores), whole[:n])
    hand = Hand(model, list(range(9, 20)))
    hand.read(tokens(33))
    graph = tree(tokens(20, seed=5), [-1, *((i - 1) // 3 for i in range(1, 20))], 33)
    scored = logits(hand.run(graph))
    for node in (0, 4, 13, 19):
        path = [int(graph.tokens[n]) for n in graph.path(NodeId(node))]
        np.testing.assert_array_equal(logits(hand.run(chain(path, 33)))[-1], scored[node])


def off(ours: FloatArray, theirs: FloatArray) -> float:
    """Relative RMS error."""
    return float(np.sqrt(np.mean((ours - theirs) ** 2)) / theirs.std())


@needs_native
@pytest.mark.parametrize("name", MIXTURES)
def test_native_mixtures_compute_what_the_reference_does(name: str) -> None:
    """Weights of eight or four bits exactly; the median row, because a near tie of two experts may go
    either way."""
    for bits, theirs in ((8, Reference), (4, rounded_reference)):
        ours = Hand(mixture(name, Cpu.of, bits), list(range(9))).read(tokens(60))
        right = Hand(mixture(name, theirs), list(range(9))).read(tokens(60))
        assert np.median([off(a, b) for a, b in zip(ours, right, strict=True)]) < 0.1


MEASURED = (
    "qwen3 moe",
    "qwen3 moe mixed",
    "qwen2 moe",
    "qwen2 moe mixed",
    "mixtral",
    "olmoe",
    "olmoe clipped",
)
TRAINED: dict[str, Any] = {
    "initializer_range": 0.03,
    "hidden_size": 192,
    "moe_intermediate_size": 96,
    "head_dim": 32,
}
"""Layers add a part to hidden states, as trained ones do, and do not replace them."""


def trained_checkpoint(variant: str, folder: Path) -> Path:
    """A checkpoint whose routers are sure of their choice: near ties of experts are rare."""
    model = checkpoints.make(variant, **TRAINED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.mul_(10)
    return checkpoints.save(model, folder)


@needs_native
@pytest.mark.parametrize("variant", MEASURED)
def test_errors_of_checkpoints(variant: str, tmp_path: Path) -> None:
    """Relative RMS error of logits: int8 against fp32, int4 against the dequantized weights."""
    folder = trained_checkpoint(variant, tmp_path)
    config, open_model, _ = opened(folder)
    rounded = Decoder.from_tensors(
        config, open_model().read(), pages=16, make_ops=rounded_reference
    )
    right = {8: load(str(folder), weights="fp32", pages=16).model, 4: rounded}
    for bits, limit in ((8, 0.03), (4, 0.08)):
        model = load(str(folder), weights=f"int{bits}", pages=16).model
        assert isinstance(model.ops, Cpu)
        found, wanted = (Hand(m, list(range(9))).read(tokens(100)) for m in (model, right[bits]))
        assert off(found, wanted) < limit


@needs_native
@pytest.mark.parametrize("family", ["lladamoe", "llada2_moe"])
def test_masked_mixtures_on_native_kernels(family: str, tmp_path: Path) -> None:
    """The text of the golden logits; of most rows, because near ties of experts go either way."""
    folder = published.save(family, tmp_path)
    config, open_model, _ = opened(folder)
    text = published.text(family)
    for weights, ops in (("int8", Reference), ("int4", rounded_reference)):
        right = Decoder.from_tensors(config, open_model().read(), pages=16, make_ops=ops)
        model = load(str(folder), weights=weights, pages=16).model
        assert isinstance(model.ops, Cpu)
        ours, theirs = (Hand(m, list(range(9))).read(text) for m in (model, right))
        assert np.median([off(a, b) for a, b in zip(ours, theirs, strict=True)]) < 0.1


@needs_native
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("variant", ["qwen3 moe mixed", "qwen2 moe", "mixtral", "olmoe"])
def test_rows_of_a_file_are_packed_as_tensors_in_memory_are(
    variant: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are those of the kept file, which the second start reads."""
    monkeypatch.setenv("OUTSTRIDE_CACHE", str(tmp_path / "cache"))
    folder = checkpoints.save(checkpoints.make(variant), tmp_path / "model")
    config, open_model, _ = opened(folder)
    options: dict[str, Any] = {"pages": 16, "page_size": 16, "features": (), "masking": None}
    starts = [load_native(folder, config, open_model, **options, bits=bits) for _ in range(2)]
    assert list((tmp_path / "cache" / "converted").glob("*.safetensors"))
    in_memory = Decoder.from_tensors(
        config, open_model().read(), pages=16, make_ops=partial(Cpu.of, bits=bits)
    )
    one, *others = (Hand(m, list(range(9))).read(tokens(40)) for m in (in_memory, *starts))
    for other in others:
        np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize("weights", ["fp32", pytest.param("int4", marks=needs_native)])
@pytest.mark.parametrize("variant", ["qwen3 moe", "olmoe", "qwen2 moe", "mixtral"])
def test_speculation_is_exact(variant: str, weights: str, tmp_path: Path) -> None:
    """Mixtures serve autoregressive models: drafts change the passes, not the text."""
    folder = checkpoints.save(checkpoints.make(variant), tmp_path)
    prompts = [tokens(9, seed=i) for i in range(3)]
    params = [SamplingParams(max_tokens=24, temperature=t, seed=5) for t in (0.0, 0.7, 1.2)]
    with LLM(str(folder), weights=weights) as llm:
        plain = [result.token_ids for result in llm.generate(prompts, params, method="plain")]
        drafted = [result.token_ids for result in llm.generate(prompts, params, method="ngram")]
        [alone] = llm.generate([prompts[1]], params[1], method="ngram")
    assert drafted == plain
    assert alone.token_ids == plain[1]


def test_pairs_that_cannot_be_turned() -> None:
    with pytest.raises(CorruptModel, match="7 of 16 dimensions"):
        tiny(rotary=7)
