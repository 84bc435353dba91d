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
from outstride.core.params import SamplingParams
from outstride.core.prefix_key import PrefixKey
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import Sequence, View
from outstride.engine import logits_processors
from outstride.engine.model_runner import ModelRunner
from outstride.errors import IntegrityError, UnknownAdapter
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


ADAPTERS = ("french", "legal")


def with_adapters() -> list[SamplingParams]:
    """The same request without an adapter and with each."""
    return [replace(SAMPLINGS["sampled"], adapter=name) for name in ("", *ADAPTERS)]


def shared_under_each_key() -> list[list[int]]:
    """One prompt, one after the other: with each adapter, by two tenants, twice each."""
    bench, found = Bench(adapters=ADAPTERS), []
    prompt = some_prompts(2, 1, max_length=60)[0] * 2
    suffix = registry.build("suffix")
    for tenant in ("a", "b"):
        texts: set[tuple[int, ...]] = set()
        for params in with_adapters():
            for again in (False, True):
                [sequence] = bench.run([prompt], suffix, params, salt=tenant)
                assert (sequence.counts.reused > 0) is again, "a prefix of another key was used"
                assert (sequence.counts.accepted > 0) >= again
                found.append(sequence.output)
            texts.add(tuple(sequence.output))
        assert len(texts) == 3, "an adapter changes the text"
    return found


def test_requests_share_prefixes_under_equal_keys_only() -> None:
    texts = shared_under_each_key()
    prompt = some_prompts(2, 1, max_length=60)[0] * 2
    expected = [alone(prompt, params, adapters=ADAPTERS) for params in with_adapters()]
    assert texts == [text for text in expected for _ in range(2)] * 2


@pytest.mark.parametrize("field", ["adapter", "tenant"])
def test_a_field_is_left_out_of_the_prefix_key(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ModelRunner.target_key

    def target_key(self: ModelRunner, *args: Any) -> PrefixKey:
        without: dict[str, Any] = {field: ""}
        return replace(original(self, *args), **without)

    monkeypatch.setattr(ModelRunner, "target_key", target_key)
    with noticed():
        shared_under_each_key()


def test_memories_are_kept_apart_by_the_whole_key() -> None:
    """What a drafter learns with one adapter, or for one tenant, drafts for no other."""
    bench, prompt = Bench(adapters=ADAPTERS), [1, 2, 3]
    recycle = registry.build("recycle")
    for tenant in ("a", "b"):
        for params in with_adapters():
            [first] = bench.run([prompt], recycle, replace(params, max_tokens=2), salt=tenant)
            assert first.counts.proposed == 0, "it drafts from what another key has learned"
            [again] = bench.run([prompt], recycle, replace(params, max_tokens=2), salt=tenant)
            assert again.counts.proposed > 0


def test_an_unknown_adapter_is_refused_by_name() -> None:
    params = replace(SAMPLINGS["greedy"], adapter="frehcn")
    with pytest.raises(UnknownAdapter, match=r"no adapter 'frehcn'; loaded are french, legal"):
        Bench(adapters=ADAPTERS).run([[1]], registry.build("plain"), params)
    with pytest.raises(UnknownAdapter, match="load one with"):
        Bench().run([[1]], registry.build("plain"), params)
