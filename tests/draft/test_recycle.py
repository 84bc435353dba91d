"""What `recycle` promises: every scored node teaches, trees keep their shape, tenants are apart."""

from __future__ import annotations

import numpy as np
import pytest

from outstride import registry
from outstride.core.graph import tree
from outstride.core.params import SamplingParams
from outstride.core.proposal import Proposal, Scores, Verdict, Wants
from outstride.core.sequence import View
from outstride.draft.recycle import CHANCES, WIDTH, Recycle, Successors, Template
from outstride.errors import UnknownMethod
from tests.conformance.harness import Bench, some_prompts, toy_method
from tests.draft.script import MATCH, Script, paths


def follow(path: list[int]) -> list[int]:
    """The target's candidates depend on the last token alone: 3 * t + 1, + 2, …"""
    return [(3 * path[-1] + 1 + i) % 97 for i in range(WIDTH)]


def test_it_learns_from_rejected_nodes() -> None:
    drafter = Recycle(size=2, depth=1)
    table = drafter._tables.of("")
    table.learn(np.asarray([5]), np.asarray([[20, 21, 22, 23, 24, 25, 26, 27]]))
    script = Script(drafter, [1, 5], [80, 81, 82, 83], candidates=follow)
    assert set(script.guess().tokens) == {20, 21}
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
        learnt.append(int((drafter._tables.of("").table[:, 0] >= 0).sum()))
    assert learnt[0] >= 2 * learnt[1]


def test_what_holds_has_the_last_word() -> None:
    """A token that was both accepted and rejected elsewhere in the tree keeps what truly followed."""
    drafter = Recycle()
    script = Script(drafter, [1, 5], [7, 8])
    proposal = Proposal(script.view.given().grow(tree([7, 6, 7], [-1, -1, 1], script.view.end)), 1)
    best = np.arange(4 * WIDTH).reshape(4, WIDTH)
    best[0, 0] = 7
    drafter.observe(script.view, proposal, Scores(np.arange(4), best), Verdict(keep=(0, 1)))  # type: ignore[arg-type]
    assert drafter._tables.of("").table[7].tolist() == best[1].tolist()


def test_tokens_follow_the_table_down_the_template() -> None:
    drafter = Recycle(size=30, depth=4)
    known = np.arange(97)
    best = np.asarray([follow([int(t)]) for t in known])
    drafter._tables.of("").learn(known, best)
    guess = Script(drafter, [1, 5], [0] * 9).guess()
    assert len(guess) == 30
    for token, parent, sign, chance in zip(
        guess.tokens, guess.parents, guess.signs, guess.chances, strict=True
    ):
        above = 5 if parent < 0 else guess.tokens[parent]
        rank = sign.key[0]
        assert token == follow([above])[rank]
        assert chance == CHANCES[rank]
    assert max(len(path) for path in paths(guess)) == 4


def test_gaps_cut_off_what_hangs_below_them() -> None:
    drafter = Recycle(size=40, depth=3)
    drafter._tables.of("").learn(
        np.asarray([5, 6]), np.asarray([[6, 7, -1, -1, -1, -1, -1, -1], [9, -1, *[-1] * 6]])
    )
    guess = Script(drafter, [1, 5], [0] * 9).guess()
    assert paths(guess) == [[7], [6, 9]]
    assert len(Script(drafter, [1, 2], [0] * 9).guess()) == 0
    assert len(Script(drafter, [1, 200_000], [0] * 9).guess()) == 0


@pytest.mark.parametrize("size", [1, 2, 7, 48, 200])
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_templates_are_trees_of_the_likeliest_paths(size: int, depth: int) -> None:
    template = Template.best(size, depth)
    assert len(template.parents) == min(size, sum(WIDTH**d for d in range(1, depth + 1)))
    assert all(parent < i for i, parent in enumerate(template.parents))
    assert len(template.levels) <= depth
    if size >= 7 and depth > 1:
        assert len(template.levels) > 1
    scores: list[float] = []
    for i, parent in enumerate(template.parents):
        scores.append(template.chances[i] * (scores[parent] if parent >= 0 else 1.0))
    wider = Template.best(size + 1, depth)
    if len(wider.parents) > size:
        assert min(scores) > 0
        assert sum(wider.chances) >= sum(template.chances)


def test_the_table_grows_with_the_vocabulary_and_not_further() -> None:
    table = Successors()
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
    assert len(Script(drafter, [1], [2, 3, 4], salt="a").guess()) > 0
    assert len(Script(drafter, [1], [2, 3, 4], salt="b").guess()) == 0


def test_prompt_scores_teach_too() -> None:
    """Given nodes whose logprobs were asked for are scored nodes like any other."""
    drafter = Recycle()
    method = toy_method(drafter, MATCH)
    [prompt] = some_prompts(2, 1, most=30)
    Bench().run([prompt], method, SamplingParams(max_tokens=1, prompt_logprobs=0))
    known = drafter._tables.of("").table[:, 0]
    assert all(known[token] >= 0 for token in prompt)


def test_it_takes_what_it_gets() -> None:
    """Joined with others it may be told of fewer candidates, or of more."""
    drafter = Recycle()
    for width in (1, 12):
        script = Script(drafter, [1, 5], [7, 8, 9])
        view, proposal = script.view, Proposal(script.view.given(), 1, wants=Wants(best=width))
        best = np.arange(10, 10 + width)[None]
        drafter.observe(view, proposal, Scores(np.asarray([0]), best), Verdict(keep=(0,)))  # type: ignore[arg-type]
        assert drafter._tables.of("").table[5, 0] == 10


@pytest.mark.parametrize("spec", ["recycle:size=0", "recycle:depth=0"])
def test_senseless_options_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod, match="needs"):
        registry.build(spec)
