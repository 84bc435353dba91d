"""Run-ahead of decode steps on a GPU: no token depends on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from outstride.core.contracts import PassInput
from outstride.core.graph import chain
from outstride.core.proposal import Proposal, Wants
from outstride.core.sampling import SamplingSpec, best
from outstride.core.sequence import BlockTable
from outstride.models.decoder import Decoder
from tests.models.drive import Hand, tiny, tokens
from tests.ops import test_cuda
from tests.ops.test_cuda import CONFIGS, on_gpu
from tests.ops.test_cuda_sampling import SPECS

pytestmark = test_cuda.pytestmark


class Walk:
    """Sequences that go on step by step in block tables of their own, as an engine moves them."""

    def __init__(self, model: Decoder, pages: list[int]) -> None:
        self.model, self.free = model, list(pages)
        self.ahead = 0
        """How many passes were under way when they were asked for."""
        ops: Any = model.ops
        take = ops._run_ahead._take_step

        def counted(*arguments: Any) -> Any:
            self.ahead += 1
            return take(*arguments)

        ops._run_ahead._take_step = counted

    def step(self, walkers: list[Walker], wants: Wants | None = None) -> None:
        works = []
        for walker in walkers:
            table, new = walker.table, walker.tokens[len(walker.table) :]
            while len(table.pages) * 16 < len(walker.tokens):
                table.pages.append(self.free.pop())
            places = np.arange(len(table), len(walker.tokens))
            slots = np.asarray(table.pages)[places // 16] * 16 + places % 16
            proposal = Proposal(
                chain(new, len(table)),
                given=len(new),
                sampling=walker.sampling,
                wants=wants or Wants(nodes=(len(new) - 1,), best=walker.best),
            )
            works.append(PassInput(proposal, table, slots))
        for walker, scores in zip(walkers, self.model.forward(works).wait(), strict=True):
            walker.table.positions = list(range(len(walker.tokens)))
            walker.tokens.append(int(scores.best[-1, 0]))


@dataclass
class Walker:
    tokens: list[int]
    sampling: SamplingSpec
    best: int = 1
    table: BlockTable = field(default_factory=BlockTable)


def walkers(count: int) -> list[Walker]:
    kinds = list(SPECS.values())
    return [Walker(tokens(3 + 7 * i, seed=i), kinds[i % len(kinds)]) for i in range(count)]


@pytest.mark.parametrize("several", [1, 3])
@pytest.mark.parametrize("name", ["grouped", "all windows"])
def test_run_ahead_changes_no_token(name: str, several: int) -> None:
    """Some end, some join, rows change places, pages come in any order: the text stays the same."""
    found = []
    for graphs in (True, False):
        model = on_gpu(CONFIGS[name], pages=160, features=(1,), options={"graphs": graphs})
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


def test_a_pass_that_is_not_asked_for_does_no_harm() -> None:
    """Another token, a table with other pages, or a move: what was launched is not used."""
    model = on_gpu(tiny(), pages=64)
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
    one.table.renew()
    walk.step([one])
    Hand(model, [old]).read(tokens(16, seed=3))  # another sequence has the old page now
    for _ in range(4):
        walk.step([one, other])
    alone = Hand(model, list(range(40, 52)))
    for walker in (one, other):
        alone.positions = []
        rows = alone.read(walker.tokens[:-1])
        right = int(best(rows[-1], walker.sampling, len(walker.tokens) - 1)[0])
        assert walker.tokens[-1] == right
    model.close()
