"""`recycle`: it learns from every scored node, trees keep their shape, tenants share nothing."""

from __future__ import annotations

import numpy as np
import pytest

from outstride import registry
from outstride.core.graph import tree
from outstride.core.params import SamplingParams
from outstride.core.prefix_key import ANY
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.recycle import RANK_PRIOR, WIDTH, Recycle, SuccessorTable, TreeTemplate
from outstride.errors import UnknownMethod
from tests.conformance.harness import Bench, some_prompts, toy_method
from tests.draft.script import MATCH, Script, paths


def follow(path: list[int]) -> list[int]:
    """The target's candidates depend on the last token alone: 3 * t + 1, + 2, …"""
    return [(3 * path[-1] + 1 + i) % 97 for i in range(WIDTH)]


def test_it_learns_from_rejected_nodes() -> None:
    drafter = Recycle(size=2, depth=1)
    table = drafter._tables.of(ANY)
    table.learn(np.asarray([5]), np.asarray([[20, 21, 22, 23, 24, 25, 26, 27]]))
    script = Script(drafter, [1, 5], [80, 81, 82, 83], candidates=follow)
    assert set(script.draft().tokens) == {20, 21}
    script.step()
    assert script.accepted == 0
    assert table.table[20].tolist() == follow([20]), "20 was drafted, rejected and scored"
    assert table.table[5, 0] == 80
    assert table.table[5, 1:].tolist() == follow([5])[:7]


def test_a_drafter_that_ignores_rejected_nodes_is_noticed() -> None:
    """The fault that the test above is for, planted."""

    class OnlyKept(Recycle):
        def observe(self, view: View, proposal: Proposal, scores: Scores, verdict: Verdict) -> None:
            kept = np.asarray(verdict.keep)
            rows = Scores(kept, scores.best[[scores.row(n) for n in verdict.keep]])
            super().observe(view, proposal, rows, verdict)

    learnt = []
    for drafter in (Recycle(size=8), OnlyKept(size=8)):
        Script(drafter, [1, 5], [40, 41, 42, 43] * 5, candidates=follow).run()
        learnt.append(int((drafter._tables.of(ANY).table[:, 0] >= 0).sum()))
    assert learnt[0] >= 2 * learnt[1]


def test_the_accepted_path_is_entered_last() -> None:
    """A token that was both accepted and rejected elsewhere keeps what followed in the text."""
    drafter = Recycle()
    script = Script(drafter, [1, 5], [7, 8])
    proposal = Proposal(script.view.given().grow(tree([7, 6, 7], [-1, -1, 1], script.view.end)), 1)
    best = np.arange(4 * WIDTH).reshape(4, WIDTH)
    best[0, 0] = 7
    drafter.observe(script.view, proposal, Scores(np.arange(4), best), Verdict(keep=(0, 1)))  # type: ignore[arg-type]
    assert drafter._tables.of(ANY).table[7].tolist() == best[1].tolist()


def test_tokens_follow_the_table_down_the_template() -> None:
    drafter = Recycle(size=30, depth=4)
    known = np.arange(97)
    best = np.asarray([follow([int(t)]) for t in known])
    drafter._tables.of(ANY).learn(known, best)
    draft = Script(drafter, [1, 5], [0] * 9).draft()
    assert len(draft) == 30
    for token, parent, key, rate in zip(
        draft.tokens, draft.parents, draft.keys, draft.rates, strict=True
    ):
        above = 5 if parent < 0 else draft.tokens[parent]
        rank = key.key[0]
        assert token == follow([above])[rank]
        assert rate == RANK_PRIOR[rank]
    assert max(len(path) for path in paths(draft)) == 4


def test_unknown_tokens_end_their_subtree() -> None:
    drafter = Recycle(size=40, depth=3)
    drafter._tables.of(ANY).learn(
        np.asarray([5, 6]), np.asarray([[6, 7, -1, -1, -1, -1, -1, -1], [9, -1, *[-1] * 6]])
    )
    draft = Script(drafter, [1, 5], [0] * 9).draft()
    assert paths(draft) == [[7], [6, 9]]
    assert len(Script(drafter, [1, 2], [0] * 9).draft()) == 0
    assert len(Script(drafter, [1, 200_000], [0] * 9).draft()) == 0


@pytest.mark.parametrize("size", [1, 2, 7, 48, 200])
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_templates_are_trees_of_the_likeliest_paths(size: int, depth: int) -> None:
    template = TreeTemplate.best(size, depth)
    assert len(template.parents) == min(size, sum(WIDTH**d for d in range(1, depth + 1)))
    assert all(parent < i for i, parent in enumerate(template.parents))
    assert len(template.levels) <= depth
    if size >= 7 and depth > 1:
        assert len(template.levels) > 1
    scores: list[float] = []
    for i, parent in enumerate(template.parents):
        scores.append(template.rates[i] * (scores[parent] if parent >= 0 else 1.0))
    wider = TreeTemplate.best(size + 1, depth)
    if len(wider.parents) > size:
        assert min(scores) > 0
        assert sum(wider.rates) >= sum(template.rates)


def test_the_table_grows_with_the_vocabulary_and_not_further() -> None:
    table = SuccessorTable()
    table.learn(np.asarray([3]), np.asarray([[9] * WIDTH]))
    assert len(table.table) < 4096
    table.learn(np.asarray([49_151]), np.asarray([[5] * WIDTH]))
    assert table.table[3, 0] == 9
    assert table.table[49_151, 0] == 5
    assert table.table.nbytes < 4_000_000
    assert (table.table[-1] == -1).all()


def test_tenants_are_apart() -> None:
    drafter = Recycle()
    Script(drafter, [1], [2, 3, 4, 5], salt="a").run()
    assert len(Script(drafter, [1], [2, 3, 4], salt="a").draft()) > 0
    assert len(Script(drafter, [1], [2, 3, 4], salt="b").draft()) == 0


def test_it_learns_from_prompt_logprobs() -> None:
    """Given nodes whose logprobs were asked for are scored nodes like any other."""
    drafter = Recycle()
    method = toy_method(drafter, MATCH)
    [prompt] = some_prompts(2, 1, max_length=30)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [sequence] = Bench().run([prompt], method, params)
    known = drafter._tables.of(sequence.key).table[:, 0]
    assert all(known[token] >= 0 for token in prompt)


def test_it_learns_from_any_number_of_candidates() -> None:
    """Joined with other drafters it may get fewer candidates, or more."""
    drafter = Recycle()
    for width in (1, 12):
        script = Script(drafter, [1, 5], [7, 8, 9])
        view, proposal = script.view, Proposal(script.view.given(), 1, wants=Wants(best=width))
        best = np.arange(10, 10 + width)[None]
        drafter.observe(view, proposal, Scores(np.asarray([0]), best), Verdict(keep=(0,)))  # type: ignore[arg-type]
        assert drafter._tables.of(ANY).table[5, 0] == 10


@pytest.mark.parametrize("spec", ["recycle:size=0", "recycle:depth=0"])
def test_senseless_options_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod, match="needs"):
        registry.build(spec)
