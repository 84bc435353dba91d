"""Sampling on a GPU: the rule of `core.sampling`, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outstride.core.graph import chain
from outstride.core.proposal import Wants
from outstride.core.sampling import LogitsProcessors, Purpose, SamplingSpec, best
from outstride.models.decoder import Decoder
from tests.models.drive import Hand, logits, tokens
from tests.ops import test_cuda

pytestmark = test_cuda.pytestmark
large = test_cuda.large

SPECS = {
    "greedy": SamplingSpec(),
    "sampled": SamplingSpec(temperature=0.8, seed=7),
    "hot": SamplingSpec(temperature=1.0, seed=2**63 + 12345, index=3),
    "drafted": SamplingSpec(temperature=1.3, seed=7, purpose=Purpose.DRAFT),
    "top k": SamplingSpec(temperature=0.8, top_k=5, seed=7),
    "top p": SamplingSpec(temperature=1.0, top_p=0.9, seed=7),
    "min p": SamplingSpec(temperature=1.0, min_p=0.1, seed=7),
    "all": SamplingSpec(temperature=1.2, top_k=40, top_p=0.8, min_p=0.01, seed=9),
}


@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_sampled_by_the_rule(large: Decoder, name: str) -> None:
    spec, hand = SPECS[name], Hand(large, list(range(40)))
    graph = chain(tokens(100, seed=5, vocab=5000))
    every = tuple(range(100))
    rows = logits(hand.run(graph, Wants(nodes=every, logits=True)))
    got = hand.run(graph, Wants(nodes=every), sampling=spec)
    right = [int(best(row, spec, i + 1)[0]) for i, row in enumerate(rows)]
    assert got.best[:, 0].tolist() == right


@pytest.mark.parametrize("count", [2, 8, 16, 20])
@pytest.mark.parametrize("name", SPECS)
def test_several_tokens_are_sampled_by_the_rule(large: Decoder, name: str, count: int) -> None:
    """Up to sixteen on the GPU, more on the host: the same tokens, -1 where filters admit fewer."""
    spec, hand = SPECS[name], Hand(large, list(range(40)))
    graph, every = chain(tokens(40, seed=5, vocab=5000)), tuple(range(40))
    rows = logits(hand.run(graph, Wants(nodes=every, logits=True)))
    got = hand.run(graph, Wants(nodes=every, best=count), sampling=spec).best
    assert got.shape == (40, count)
    for i, row in enumerate(rows):
        right = best(row, spec, i + 1, count).tolist()
        assert got[i].tolist() == right + [-1] * (count - len(right))


def test_equal_logits_go_by_id() -> None:
    from outstride.ops.cuda.metadata import (
        MAX_CANDIDATES,
        MAX_HEAD_ROWS,
        SAMPLING_SIZE,
        SamplingField,
    )
    from outstride.ops.cuda.sampler import TokenSampler

    source, device, vocab = np.random.default_rng(0), torch.device("cuda"), 9001
    rows = source.integers(-3, 4, size=(16, vocab)).astype(np.float32)
    rows[1] = 0.0
    rows[2, ::2] *= -0.0
    raw = torch.zeros(MAX_HEAD_ROWS, 9216, device=device)
    raw[:16, :vocab] = torch.from_numpy(rows).to(device)
    words = torch.zeros(1 + 16 * SAMPLING_SIZE, dtype=torch.int32, device=device)
    words[1:].view(16, SAMPLING_SIZE)[:, SamplingField.NUM_TOKENS] = torch.arange(
        1, 17, device=device
    )
    replies = torch.zeros(4, MAX_HEAD_ROWS, MAX_CANDIDATES, dtype=torch.int32, pin_memory=True)
    sampler = TokenSampler(device, MAX_HEAD_ROWS, vocab)
    for _ in range(3):
        sampler.sample(raw, words[1:], 16, replies, words[:1], filtered=False, several=True)
    torch.cuda.synchronize()
    for i, row in enumerate(rows):
        right = best(row, SamplingSpec(), 0, i + 1).tolist()
        assert replies[0, i, : i + 1].tolist() == right
        assert int(sampler.best[i]) == right[0]


def test_requests_of_all_kinds_share_a_pass(large: Decoder) -> None:
    hands = [Hand(large, list(range(i * 4, i * 4 + 4))) for i in range(7)]
    graph, every = chain(tokens(9, seed=5, vocab=5000)), tuple(range(9))
    kinds: list[dict[str, Any]] = [
        {"wants": Wants(nodes=every)},
        {"wants": Wants(nodes=every), "sampling": SPECS["all"]},
        {"wants": Wants(nodes=every, logprobs=2)},
        {"wants": Wants(nodes=every, rows=True, best=3), "sampling": SPECS["sampled"]},
        {
            "wants": Wants(nodes=every),
            "processors": {i: LogitsProcessors(added={1: 50.0}) for i in range(9)},
        },
        {"wants": Wants(nodes=())},
        {"wants": Wants(nodes=every, best=8), "sampling": SPECS["top p"]},
    ]
    alone = [hand.run(graph, **kind) for hand, kind in zip(hands, kinds, strict=True)]
    works = [hand.work(graph, **kind) for hand, kind in zip(hands, kinds, strict=True)]
    for one, other in zip(alone, large.forward(works).wait(), strict=True):
        assert np.array_equal(one.best, other.best)
        assert one.logprobs == other.logprobs
    assert (alone[4].best == 1).all()
    assert alone[5].best.shape == (0, 1)
