"""Mixtures of experts: who goes where, in which order results are added, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outstride import LLM, SamplingParams
from outstride.core.graph import FloatArray, chain
from outstride.errors import CorruptModel
from outstride.models.experts import Experts
from outstride.ops.arithmetic import TILE, pad, route, through_experts
from outstride.ops.cpu import Cpu, native
from outstride.ops.routing import Routing
from outstride.ops.weights import ExpertWeights
from tests.models import checkpoints
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


@pytest.mark.parametrize("variant", ["qwen3 moe", "olmoe"])
def test_speculation_is_exact(variant: str, tmp_path: Path) -> None:
    """Mixtures serve autoregressive models: drafts change the passes, not the text."""
    folder = checkpoints.save(checkpoints.make(variant), tmp_path)
    prompts = [tokens(9, seed=i) for i in range(3)]
    params = [SamplingParams(max_tokens=24, temperature=t, seed=5) for t in (0.0, 0.7, 1.2)]
    with LLM(str(folder), weights="fp32") as llm:
        plain = [result.token_ids for result in llm.generate(prompts, params, method="plain")]
        drafted = [result.token_ids for result in llm.generate(prompts, params, method="ngram")]
        [alone] = llm.generate([prompts[1]], params[1], method="ngram")
    assert drafted == plain
    assert alone.token_ids == plain[1]


def test_pairs_that_cannot_be_turned() -> None:
    with pytest.raises(CorruptModel, match="7 of 16 dimensions"):
        tiny(rotary=7)
