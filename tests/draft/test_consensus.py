"""`consensus`: siblings' votes decide, agreement counts, a single sample drafts nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outstride import registry
from outstride.core.graph import NodeId
from outstride.core.proposal import Proposal, Scores, Verdict
from outstride.draft.consensus import Consensus
from outstride.errors import UnknownMethod
from tests.conformance.harness import PLAIN, SAMPLINGS, Bench, some_prompts
from tests.draft.script import Script, paths

PROMPT = [1, 2, 3]


def family(drafter: Consensus, own: list[int], *others: list[int]) -> Script:
    """A request with the output `own`, and its siblings, all indexed."""
    scripts = [Script(drafter, PROMPT, [0] * 40) for _ in range(1 + len(others))]
    group = [script.sequence for script in scripts]
    for index, (sequence, output) in enumerate(zip(group, [own, *others], strict=True)):
        sequence.index = index
        sequence.tokens += output
        sequence.group = group
    hear(scripts[0])
    return scripts[0]


def hear(script: Script) -> None:
    view = script.view
    proposal = Proposal(view.given(), 1)
    nothing = Scores(proposal.wanted, proposal.wanted[:, None])
    script.observe(view, proposal, nothing, Verdict(keep=(NodeId(0),)))


def test_the_majority_comes_first() -> None:
    output = [[10, 11, 50, 51], [10, 11, 60, 61, 62], [10, 11, 60, 61, 63]]
    draft = family(Consensus(), [10, 11], *output).draft()
    assert draft.tokens[:2] == [60, 61]
    assert [50, 51] in paths(draft)
    rates = dict(zip(draft.tokens, draft.rates, strict=True))
    assert rates[60] == pytest.approx(2 * rates[50])
    keys = dict(zip(draft.tokens, draft.keys, strict=True))
    assert keys[60] != keys[50]


def test_agreement_further_back_weighs_more() -> None:
    far, near = [7, 8, 9, 10, 11, 70], [4, 5, 6, 10, 11, 80]
    draft = family(Consensus(), [7, 8, 9, 10, 11], near, near, far).draft()
    assert draft.tokens[0] == 70


def test_the_prompt_is_a_place_to_agree_on() -> None:
    """After the prompt's last token all samples are at the same place, even if some are ahead."""
    assert family(Consensus(), [], [20, 21, 22]).draft().tokens == [20, 21, 22]


def test_siblings_are_heard_as_they_go_on_and_nothing_twice() -> None:
    script = family(Consensus(), [10, 11], [10, 11])
    assert len(script.draft()) == 0
    sibling = script.sequence.group[1]
    sibling.tokens += [12, 13]
    hear(script)
    hear(script)
    assert script.draft().tokens == [12, 13]
    assert all(len(set(p)) == len(p) for p in script.sequence.state.places.values())


def test_alone_it_asks_for_nothing() -> None:
    script = family(Consensus(), [10, 11])
    assert script.drafter.demand(script.view).max_nodes == 0
    assert family(Consensus(), [10, 11], [10]).drafter.demand(script.view).max_nodes == 0
    both = family(Consensus(size=5), [10, 11], [10])
    assert both.drafter.demand(both.view).max_nodes == 5


def test_room_and_length_are_kept() -> None:
    output = [[10, 11, *range(20 + 10 * i, 29 + 10 * i)] for i in range(6)]
    for size, length in ((4, 2), (30, 3)):
        draft = family(Consensus(size=size, length=length), [10, 11], *output).draft(12)
        assert len(draft) == min(size, 12)
        assert max(map(len, paths(draft))) <= length


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_samples_that_run_together_save_passes(sampling: str) -> None:
    params = replace(SAMPLINGS[sampling], n=5, ignore_eos=True)
    if sampling == "sampled":
        params = replace(params, temperature=0.3)
    [prompt] = some_prompts(12, 1)
    plain = Bench(pages=300).run([prompt], PLAIN, params)[0].group
    found = Bench(pages=300).run([prompt], registry.build("consensus"), params)[0].group
    assert [s.output for s in found] == [s.output for s in plain]
    assert sum(s.counts.passes for s in found) < sum(s.counts.passes for s in plain)


@pytest.mark.parametrize("spec", ["consensus:size=0", "consensus:length=0"])
def test_senseless_options_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod, match="needs"):
        registry.build(spec)
