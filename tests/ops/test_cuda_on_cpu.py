"""The CUDA backend on a CPU, where Triton is installed: its kernels, metadata and run-ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.core.graph import chain
from outstride.core.proposal import Wants
from outstride.core.sampling import best
from outstride.models.decoder import Decoder
from outstride.models.draft_heads import attach
from tests.models import test_overlapped_drafting as drafting
from tests.models.drive import Hand, logits, random_decoder, tiny, tokens
from tests.models.test_draft_heads import part_tensors, write_part
from tests.ops import cuda_on_cpu, test_cuda
from tests.ops.test_cuda_run_ahead import Walk, walkers
from tests.ops.test_cuda_sampling import SPECS

pytestmark = pytest.mark.skipif(
    not cuda_on_cpu.RUNNABLE, reason="needs Triton, and no GPU: `pip install triton`"
)


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    cuda_on_cpu.patch_triton()


def decoder(layers: int = 1, *, graphs: bool = True, **options: Any) -> Decoder:
    def make(model: Any) -> Any:
        return cuda_on_cpu.make_ops(model, graphs=graphs)

    return random_decoder(tiny(layers=layers, tied=True), make_ops=make, **options)


def test_logits_are_near_the_reference() -> None:
    """Found through pages and listed, at first and from a captured pass."""
    model, exact = decoder(), random_decoder(tiny(layers=1, tied=True))
    hands = Hand(exact, test_cuda.PAGES), Hand(model, test_cuda.PAGES)
    for hand in hands:
        hand.read(tokens(20))
    for name in ("chain", "tree", "siblings"):
        graph = test_cuda.GRAPHS[name](20)
        right, got, again = (logits(hand.run(graph)) for hand in (*hands, hands[1]))
        assert np.linalg.norm(got - right) / np.linalg.norm(right) < 8 * test_cuda.BF16, name
        assert np.array_equal(got, again)
    model.close()


@pytest.mark.parametrize("count", [1, 3])
def test_tokens_are_sampled_by_the_rule(count: int) -> None:
    model = decoder()
    hand, graph, every = Hand(model, test_cuda.PAGES), chain(tokens(4)), (0, 1, 2, 3)
    rows = logits(hand.run(graph, Wants(nodes=every, logits=True)))
    for name in ("greedy", "hot", "all"):
        spec = SPECS[name]
        got = hand.run(graph, Wants(nodes=every, best=count), sampling=spec).best
        for i, row in enumerate(rows):
            right = best(row, spec, i + 1, count).tolist()
            assert got[i].tolist() == right + [-1] * (count - len(right)), name
    model.close()


def test_run_ahead_of_decode_steps_changes_no_token() -> None:
    """With new pages, with sequences that end, and in another order."""
    found = []
    for graphs in (True, False):
        model = decoder(graphs=graphs, features=(1,))
        walk, both = Walk(model, [5, 40, 3, 21, 9]), walkers(2)
        both[1].tokens = tokens(13, seed=1)
        for step in range(9):
            walk.step(both if step < 5 else both[::-1] if step < 7 else both[1:])
        kept = [model.feature(w.table, p) for w in both for p in range(len(w.table))]
        found.append(([w.tokens for w in both], np.concatenate(kept)))
        assert (walk.ahead > 4) == graphs
        model.close()
    assert found[0][0] == found[1][0]
    assert np.array_equal(found[0][1], found[1][1])


def test_run_ahead_of_drafts_changes_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.discover()
    monkeypatch.setattr(drafting, "LENGTH", 8)
    config, prompt = tiny(layers=3, tied=True), tokens(12)
    model = decoder(3, rounded=True)
    plain = drafting.generate(model, registry.build("plain"), prompt)
    tensors = part_tensors(config)
    drafting.bigrams(tensors, plain)
    attach(model, "head", write_part(tmp_path / "head", config, tensors), "abc")
    run_ahead: Any = model.ops._run_ahead  # type: ignore[attr-defined]
    match, hits = run_ahead._match_draft, []

    def counted(*arguments: Any) -> Any:
        scores = match(*arguments)
        hits.append(scores is not None)
        return scores

    run_ahead._match_draft = counted
    assert drafting.generate(model, drafting.drafting("head"), prompt) == plain
    assert sum(hits) > 1
    model.close()
