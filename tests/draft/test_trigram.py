"""`trigram`: estimates that follow the target, exploration, bounded memory."""

from __future__ import annotations

import random

import pytest

from outstride import registry
from outstride.core.prefix_key import ANY
from outstride.draft.trigram import Trigram, TrigramEstimates
from outstride.errors import UnknownMethod
from tests.draft.script import Script, paths


def rates(estimates: TrigramEstimates, before: int, last: int) -> dict[int, float]:
    _, found = estimates.find(before, last)
    assert found is not None
    return {token: weight / found.seen for token, weight in found.weights.items()}


def test_estimates_approach_frequencies_and_follow_changes() -> None:
    estimates, rng = TrigramEstimates(100), random.Random(3)
    for _ in range(400):
        estimates.learn([((1, 2), [3 if rng.random() < 0.75 else 4])])
    assert rates(estimates, 1, 2)[3] == pytest.approx(0.75, abs=0.2)
    for _ in range(40):
        estimates.learn([((1, 2), [5])])
    assert rates(estimates, 1, 2)[5] > 0.8


def test_longer_contexts_come_first() -> None:
    estimates = TrigramEstimates(100)
    estimates.learn([((1, 2), [3]), ((7, 2), [8])])
    assert estimates.find(1, 2)[0] == 2
    assert rates(estimates, 1, 2) == {3: 1.0}
    size, found = estimates.find(55, 2)
    assert size == 1
    assert found is not None
    assert set(found.weights) == {3, 8}
    assert estimates.find(1, 99)[1] is None


def test_it_learns_from_rejected_nodes() -> None:
    drafter = Trigram()
    script = Script(drafter, [9], [1, 2, 1, 2], candidates=lambda path: [60 + path[-1]])
    drafter._estimates.of(ANY).learn([((8, 9), [3]), ((9, 3), [4])])
    assert 4 in script.step(2).graph.tokens
    assert script.accepted == 0
    assert 64 in rates(drafter._estimates.of(ANY), 3, 4), "a candidate of the target after 3, 4"


def test_exploration_widens_where_little_is_known() -> None:
    """A sure path goes deep; the bonus gives nodes to the candidates of new contexts."""
    widths = []
    for explore in (0.0, 2.0):
        drafter = Trigram(size=10, explore=explore)
        estimates = drafter._estimates.of(ANY)
        for _ in range(12):
            estimates.learn([((i, i + 1), [i + 2]) for i in range(1, 20)])
        estimates.learn([((1, 2), [3, 40, 41])], (0.7, 0.2, 0.1))
        estimates.learn([((50, 2), [60, 61, 62])], (0.7, 0.2, 0.1))
        draft = Script(drafter, [50, 2], [0] * 30).draft()
        widths.append(sum(parent < 0 for parent in draft.parents))
        assert len(draft) <= 10
    assert widths[1] >= widths[0]
    bold, timid = Trigram(size=3, explore=3.0), Trigram(size=3, explore=0.0)
    for drafter in (bold, timid):
        estimates = drafter._estimates.of(ANY)
        estimates.learn([((50, 2), [60, 61, 62])], (0.7, 0.2, 0.1))
        for _ in range(12):
            estimates.learn([((2, 60), [70]), ((60, 70), [71])])
    assert Script(timid, [50, 2], [0] * 30).draft().tokens == [60, 70, 71]
    assert 61 in Script(bold, [50, 2], [0] * 30).draft().tokens


def test_the_prompt_is_learned_once_for_all_samples() -> None:
    drafter = Trigram()
    script = Script(drafter, [1, 2, 3, 4, 1, 2], [3, 4, 5])
    script.step()
    assert paths(script.draft())[0][0] == 4
    seen = drafter._estimates.of(ANY).find(1, 2)[1]
    assert seen is not None
    count = seen.seen
    sample = Script(drafter, [1, 2, 3, 4, 1, 2], [9, 9, 9])
    sample.sequence.index = 1
    sample.step()
    assert seen.seen == count + 1, "its own first token, not the prompt"


def test_memory_is_bounded() -> None:
    drafter, rng = Trigram(contexts=50, size=8), random.Random(2)
    for _ in range(10):
        answer = [rng.randrange(5000) for _ in range(40)]
        Script(drafter, [rng.randrange(5000) for _ in range(300)], answer).run()
        assert len(drafter._estimates.of(ANY)) <= 2 * 50 + 8
    estimates = TrigramEstimates(1000)
    for token in range(10_000):
        estimates.learn([((1, 2), [token])])
    assert len(rates(estimates, 1, 2)) <= 8


def test_tenants_are_apart() -> None:
    drafter, answer = Trigram(), list(range(100, 130))
    first = Script(drafter, [1, 2, 3], answer, salt="a").run()
    again = Script(drafter, [4, 5, 3], answer, salt="a").run()
    other = Script(drafter, [4, 5, 3], answer, salt="b").run()
    assert first.passes == other.passes == len(answer)
    assert again.passes < len(answer) / 3


@pytest.mark.parametrize("spec", ["trigram:size=0", "trigram:explore=-1", "trigram:contexts=1"])
def test_senseless_options_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod, match="needs"):
        registry.build(spec)
