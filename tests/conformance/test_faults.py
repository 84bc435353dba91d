"""Planted faults: each breaks exactness in one place, and the suite must notice."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from outstride import registry
from outstride.accept.match import Match
from outstride.cache.pool import Moves, PagePool
from outstride.core.graph import NodeId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import Sequence, View
from outstride.engine import logits_processors
from outstride.errors import IntegrityError
from outstride.models.toy import Toy
from tests.conformance.harness import SAMPLINGS, Bench, alone, some_prompts, toy_method


@contextmanager
def noticed(
    errors: tuple[type[BaseException], ...] = (AssertionError, IntegrityError),
) -> Iterator[None]:
    with pytest.raises(errors):
        yield


def compare(method: Any, sampling: str = "sampled") -> None:
    prompts, params = some_prompts(1, 10), SAMPLINGS[sampling]
    expected = [alone(p, params) for p in prompts]
    assert [s.output for s in Bench().run(prompts, method, params)] == expected


def test_nothing_planted() -> None:
    compare(registry.build("draft:model=draft,width=3"))


def test_a_rejected_node_is_kept() -> None:
    class KeepsTooMuch(Match):
        def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
            verdict = super().accept(view, proposal, scores)
            wrong = [n for n in range(proposal.given, len(proposal.graph)) if n not in verdict.keep]
            end = max(verdict.settled)
            wrong = [n for n in wrong if proposal.graph.positions[n] == end][:1]
            return replace(verdict, keep=(*verdict.keep, *map(NodeId, wrong)))

    with noticed():
        compare(toy_method(registry.build("ngram").drafter, KeepsTooMuch()))


def test_kv_is_moved_to_the_wrong_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PagePool.commit

    def commit(self: PagePool, *args: Any) -> Moves:
        moves = original(self, *args)
        moves.sources.reverse()
        return moves

    monkeypatch.setattr(PagePool, "commit", commit)
    with noticed():
        compare(registry.build("draft:model=draft,length=4,width=3"))


def test_kv_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "move", lambda self, sources, targets: None)
    with noticed():
        compare(registry.build("draft:model=draft,length=4,width=3"))


def test_a_wrong_token_is_accepted() -> None:
    class Careless(Match):
        count = 0

        def accept(self, view: View, proposal: Proposal, scores: Scores) -> Verdict:
            verdict = super().accept(view, proposal, scores)
            Careless.count += 1
            if Careless.count == 20:
                position, token = max(verdict.settled.items())
                wrong = type(token)((token + 1) % 24)
                return replace(verdict, settled={**verdict.settled, position: wrong})
            return verdict

    with noticed():
        compare(toy_method(registry.build("ngram").drafter, Careless()))


def test_noise_keyed_by_pass_instead_of_position(monkeypatch: pytest.MonkeyPatch) -> None:
    original, count = logits_processors.attach, iter(range(10**9))

    def attach(sequence: Sequence, proposal: Proposal, end_tokens: Collection[int]) -> Proposal:
        proposal = original(sequence, proposal, end_tokens)
        proposal.sampling = replace(proposal.sampling, index=next(count))
        return proposal

    monkeypatch.setattr("outstride.engine.model_runner.attach", attach)
    with noticed():
        compare(registry.build("ngram"))


def test_a_fork_writes_into_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    original = PagePool.fork

    def fork(self: PagePool, table: Any, length: int) -> Any:
        child = original(self, table, length)
        for page in child.pages:  # as if no other table held them
            self._refs[page] -= 1
        return child

    monkeypatch.setattr(PagePool, "fork", fork)
    params = replace(SAMPLINGS["sampled"], n=3)
    with noticed():
        Bench().run([[1, 2, 3]], registry.build("plain"), params)


def test_salts_keep_prefixes_apart() -> None:
    bench = Bench()
    prompt = some_prompts(2, 1, max_length=60)[0] * 2
    params = SAMPLINGS["greedy"]
    for salt, expected in (("a", False), ("a", True), ("b", False), ("", False)):
        [sequence] = bench.run([prompt], registry.build("plain"), params, salt=salt)
        assert (sequence.counts.reused > 0) is expected
