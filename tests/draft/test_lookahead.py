"""`lookahead`: a window that refines itself next to verified runs, in one pass."""

from __future__ import annotations

import pytest

from outstride import registry
from outstride.core.graph import NodeId
from outstride.core.prefix_key import ANY, PrefixKey
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.core.sequence import View
from outstride.draft.lookahead import Lookahead, NGramPool, Rows
from outstride.errors import UnknownMethod
from tests.conformance.harness import SAMPLINGS, Bench, some_prompts
from tests.draft.script import Script, paths


def follow(path: list[int]) -> list[int]:
    """A target whose next token depends on the last one alone, with a long period."""
    return [(path[-1] * 5 + 3) % 1009]


def chain_of(start: int, count: int) -> list[int]:
    found = [start]
    for _ in range(count):
        found.append(follow(found)[0])
    return found[1:]


def test_the_window_is_one_graph_with_the_runs() -> None:
    """The front row may be kept, columns are probes, all at the positions that they stand for."""
    drafter = Lookahead(window=3, level=4, branches=2)
    answer = chain_of(7, 20)
    script = Script(drafter, [1, 2, 7], answer, candidates=follow)
    script.step()
    rows, end = script.sequence.state, script.view.end
    assert len(rows) == 3
    assert all(len(row) == 3 for row in rows)
    drafter._pools.of(ANY).add((script.sequence.tokens[-1], 501, 502, 503))
    proposal = script.step()
    graph = proposal.graph
    assert int(graph.probes.sum()) == 6
    node = proposal.root
    for i in range(3):
        node = next(n for n in graph.children(node) if graph.tokens[n] == rows[0][i])
        assert not graph.probes[node]
        assert graph.positions[node] == end + i
        below = node
        for j in (1, 2):
            below = next(
                n
                for n in graph.children(below)
                if graph.tokens[n] == rows[j][i] and graph.probes[n]
            )
            assert graph.positions[below] == end + i + j
    run = graph.follow(proposal.root, 501)
    assert run is not None
    assert [int(t) for t in graph.tokens[[run, run + 1, run + 2]]] == [501, 502, 503]


def by_place(path: list[int]) -> list[int]:
    """A target whose tokens depend on their position alone: one pass is enough to know them."""
    return [200 + len(path)]


@pytest.mark.parametrize("level", [2, 3, 5])
def test_the_window_refines_itself_to_the_answer(level: int) -> None:
    answer = [203 + i for i in range(40)]
    drafter = Lookahead(window=5, level=level)
    script = Script(drafter, [1, 2, 7], answer, candidates=by_place).run()
    assert script.passes < 0.6 * len(answer)
    front = Script(Lookahead(window=5, level=2), [1, 2, 7], answer, candidates=by_place)
    front.step()
    assert front.sequence.state[0] != tuple(answer[1:6]), "it begins with anything"
    front.step()
    assert front.sequence.state[0][:4] == tuple(answer[2:6]), "and is refined in one pass"


def test_a_window_that_is_not_refined_is_noticed() -> None:
    """The fault that the test above is for, planted: the window stays as it was."""

    class Stubborn(Lookahead):
        def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> Rows:
            return view.state or super().observe(view, proposal, scores, verdict)

    answer = [203 + i for i in range(40)]
    script = Script(Stubborn(window=5, level=2), [1, 2, 7], answer, candidates=by_place).run()
    assert script.passes > 0.8 * len(answer)


def test_every_run_in_the_pool_was_predicted_by_the_target() -> None:
    """A column is as long as the level: its last token is the target's, the others were its input."""
    drafter = Lookahead(window=4, level=3, branches=3)
    Script(drafter, [1, 2, 7], chain_of(7, 30), candidates=follow).run()
    pool = drafter._pools.of(ANY)
    assert len(pool) > 0
    for first in pool._runs:
        for run in pool.after(first, 9):
            assert len(run) == 2
            assert run[-1] == follow([run[-2]])[0]


def test_runs_along_rejected_guesses_are_drafted_last() -> None:
    for recycle in (False, True):
        drafter = Lookahead(window=4, level=3, branches=2, recycle=recycle)
        script = Script(drafter, [1, 2, 7], chain_of(7, 30), candidates=follow)
        for _ in range(4):
            script.step()
        spares = drafter._spares.of(ANY)
        assert (len(spares) > 0) == recycle
        last = script.sequence.tokens[-1]
        spares.add((last, 901, 902))
        assert ([901, 902] in paths(script.draft())) == recycle
        for second in (801, 802):
            drafter._pools.of(ANY).add((last, second, second + 50))
        assert 901 not in script.draft().tokens, "there are better ones now"


def test_retrieval_drafts_runs_of_the_text() -> None:
    text = [4, 5, 6, 7, 8, 9]
    asked = []
    for retrieve in (True, False):
        script = Script(Lookahead(retrieve=retrieve), [*text, 1, 2, 4], [5, 6, 7, 8, 9, 30])
        script.step()
        asked.append([path[:3] for path in paths(script.draft())])
        script.run()
    assert [6, 7, 8] in asked[0]
    assert [6, 7, 8] not in asked[1]


@pytest.mark.parametrize("budget", range(1, 40))
def test_any_room_is_enough(budget: int) -> None:
    drafter = Lookahead(window=4, level=4, branches=3, retrieve=True)
    script = Script(drafter, [1, 2, 7], chain_of(7, 25), candidates=follow)
    while not script.done:
        script.step(budget)
    assert script.sequence.output == script.answer


def test_no_probe_is_ever_kept() -> None:
    bench = Bench()
    method = registry.build("lookahead:window=4,level=4")
    sequences = [bench.engine.submit(p, SAMPLINGS["endless"], method) for p in some_prompts(6, 5)]
    bench.finish()  # the toy's cache is checked after every step
    assert sum(s.counts.accepted for s in sequences) > 0


def test_the_pool_is_bounded_and_forgets_the_oldest() -> None:
    pool = NGramPool(capacity=10, per_token=3)
    for first in range(50):
        for second in range(8):
            pool.add((first, second))
    assert len(pool) == 10
    assert pool.after(49, 9) == [(7,), (6,), (5,)]
    assert pool.after(0, 9) == []
    pool.add((49, 5))
    assert pool.after(49, 2) == [(5,), (7,)]


def test_tenants_are_apart() -> None:
    drafter = Lookahead(retrieve=True)
    Script(drafter, [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11], salt="a").run()
    assert len(drafter._pools.of(PrefixKey(tenant="a"))) > 0
    assert len(drafter._pools.of(PrefixKey(tenant="b"))) == 0


def test_the_root_is_no_probe() -> None:
    script = Script(Lookahead(), [1, 2, 3], [4, 5, 6, 7])
    for _ in range(3):
        proposal = script.step()
        assert not proposal.graph.probes[NodeId(0)]


@pytest.mark.parametrize(
    "spec", ["lookahead:window=0", "lookahead:level=1", "lookahead:branches=0"]
)
def test_senseless_options_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod, match="needs"):
        registry.build(spec)
