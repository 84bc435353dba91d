"""`suffix`: right counts, frequencies that decide, bounded memory, tenants share nothing."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from outstride import registry
from outstride.core.prefix_key import ANY
from outstride.draft.suffix import MATCH_PRIOR, Suffix, SuffixAutomaton
from outstride.errors import UnknownMethod
from tests.draft.script import Script, paths


def read(automaton: SuffixAutomaton, text: list[int]) -> int:
    at = 0
    for token in text:
        at = automaton.extend(at, token)
    return at


def find(automaton: SuffixAutomaton, run: list[int]) -> int | None:
    at: int | None = 0
    for token in run:
        at = automaton.after[at].get(token) if at is not None else None
    return at


@pytest.mark.parametrize("seed", range(40))
def test_every_run_is_known_and_counted(seed: int) -> None:
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 16))] for _ in range(4)]
    automaton, runs = SuffixAutomaton(), Counter[tuple[int, ...]]()
    for text in texts:
        at = read(automaton, text)
        assert automaton.length[at] == len(text)
        runs.update(tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, len(text) + 1))
    for run, count in runs.items():
        place = find(automaton, list(run))
        assert place is not None
        assert automaton.count[place] == count
    strange = [rng.randrange(3) for _ in range(6)]
    assert (find(automaton, strange) is not None) == (tuple(strange) in runs)
    assert len(automaton.after) <= 2 * automaton.size + 1
    assert len(automaton.after) == len(automaton.length) == len(automaton.link)


@pytest.mark.parametrize("seed", range(20))
def test_follow_finds_the_longest_known_suffix(seed: int) -> None:
    rng = random.Random(seed)
    known = [rng.randrange(4) for _ in range(30)]
    automaton = SuffixAutomaton()
    read(automaton, known)
    output: list[int] = []
    at = matched = 0
    for _ in range(40):
        output.append(rng.randrange(5))
        at, matched = automaton.follow(at, matched, output[-1])
        endings = [
            n
            for n in range(len(output) + 1)
            if find(automaton, output[len(output) - n :]) is not None
        ]
        assert matched == max(endings)


def script(prompt: list[int], answer: list[int], **options: float) -> Script:
    return Script(Suffix(**options), prompt, answer)  # type: ignore[arg-type]


def test_frequencies_decide_order_and_depth() -> None:
    often, seldom = [1, 2, 3, 4, 5, 6], [1, 2, 8, 9, 10, 11]
    prompt = [*often, 20, *often, 21, *often, 22, *seldom, 23, 1]
    asked = script(prompt, [2, 3, 4, 5, 6, 7, 7, 7], min_prob=0.0, branch=2, size=8)
    asked.step()
    draft = asked.draft()
    assert draft.tokens[0] == 3
    assert [3, 4, 5, 6] in [path[:4] for path in paths(draft)]
    rare = draft.tokens.index(8)
    assert draft.rates[rare] == pytest.approx(draft.rates[0] / 3)
    assert draft.keys[rare] != draft.keys[0]


def test_unlikely_paths_are_left_out() -> None:
    prompt = [*([1, 2, 3] * 1), *([1, 2, 4] * 9), 7, 1]
    for min_prob, known in ((0.2, {4}), (0.0, {3, 4})):
        asked = script(prompt, [2, 4, 1, 2], min_prob=min_prob)
        asked.step()
        draft = asked.draft()
        assert {draft.tokens[i] for i, parent in enumerate(draft.parents) if parent < 0} == known


def test_longer_matches_have_higher_rates() -> None:
    drafts = []
    for before in ([5, 6], [5, 60], [50, 60]):
        asked = script([5, 6, 7, 8, 9, 1, *before], [7, 8, 9, 1])
        asked.step()
        drafts.append(asked.draft())
    assert [draft.tokens[0] for draft in drafts] == [8, 8, 8]
    assert drafts[0].rates[0] > drafts[1].rates[0] == drafts[2].rates[0]
    assert drafts[0].keys[0] != drafts[1].keys[0] == drafts[2].keys[0]
    assert list(MATCH_PRIOR) == sorted(MATCH_PRIOR)


def test_it_learns_from_earlier_requests_of_the_same_tenant_only() -> None:
    drafter, answer = Suffix(), list(range(100, 130))
    first = Script(drafter, [1, 2, 3], answer, salt="a").run()
    again = Script(drafter, [4, 5, 3], answer, salt="a").run()
    other = Script(drafter, [4, 5, 3], answer, salt="b").run()
    assert first.passes == other.passes == len(answer)
    assert again.passes < len(answer) / 3


def test_memory_is_bounded_and_forgets_the_oldest() -> None:
    drafter = Suffix(memory=200)
    rng = random.Random(1)
    answers = [[rng.randrange(1000) for _ in range(60)] for _ in range(12)]
    for answer in answers:
        Script(drafter, [1, 2, 3], answer).run()
    memory = drafter._memories.of(ANY)
    assert memory.young.size + memory.old.size <= 200 + 60 + 8
    assert Script(drafter, [1, 2, 3], answers[-1]).run().passes < 20
    assert Script(drafter, [1, 2, 3], answers[0]).run().passes == 60


def test_no_memory_at_all() -> None:
    drafter, answer = Suffix(memory=0), list(range(100, 130))
    for _ in range(2):
        assert Script(drafter, [1, 2, 3], answer).run().passes == len(answer)


def test_a_long_prompt_is_added_in_portions() -> None:
    drafter = Suffix(memory=0)
    drafter.PORTION = 16
    prompt = [t for i in range(20) for t in (i, 50, 51)]
    asked = Script(drafter, prompt, [50, 51] * 12)
    asked.step()
    assert asked.sequence.state.done == 16
    assert len(asked.draft()) == 0
    assert asked.run().accepted > 0
    assert asked.sequence.state.done == len(asked.sequence.tokens)


def test_sequences_side_by_side_do_not_disturb_each_other() -> None:
    """Texts that grow in turns in one memory, with halves that change in between."""
    drafter, rng = Suffix(memory=120), random.Random(4)
    scripts = [
        Script(drafter, [1, 2], [rng.randrange(6) for _ in range(80)], salt="x") for _ in range(5)
    ]
    while any(not s.done for s in scripts):
        waiting = rng.choice([s for s in scripts if not s.done])
        waiting.step()
    for asked in scripts:
        assert asked.sequence.output == asked.answer
        state = asked.sequence.state
        assert state.own.length[state.at] == len(asked.sequence.tokens)


@pytest.mark.parametrize("spec", ["suffix:size=0", "suffix:branch=0", "suffix:min_prob=1"])
def test_senseless_options_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod, match="needs"):
        registry.build(spec)
