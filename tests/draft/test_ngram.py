"""`ngram`: the longest and latest match, and copying that survives an edit."""

from __future__ import annotations

import pytest

from outstride import registry
from outstride.draft.ngram import NGram
from outstride.errors import UnknownMethod
from tests.draft.script import Script, paths


def test_the_longest_match_wins_over_a_later_one() -> None:
    script = Script(NGram(length=2), [1, 2, 3, 50, 51, 9, 3, 60, 61, 1, 2, 3], [50, 51, 9])
    assert paths(script.draft()) == [[50, 51]]
    script = Script(NGram(length=2, longest=1), [1, 2, 3, 50, 51, 9, 3, 60, 61, 1, 2, 3], [50])
    assert script.draft(2).tokens == [60, 61]


def test_repetitions_are_drafted_to_full_length() -> None:
    script = Script(NGram(length=7), [4, 5, 6, 4, 5, 6], [4] * 9)
    assert script.draft().tokens == [4, 5, 6, 4, 5, 6, 4]


def test_without_a_match_nothing_is_drafted() -> None:
    assert len(Script(NGram(), [1, 2, 3], [4]).draft()) == 0
    assert len(Script(NGram(shortest=2), [1, 3, 2, 3], [4]).draft()) == 0


TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25]
EDITS = {
    "replaced": ([*TEXT[:6], 99], TEXT[7:]),
    "two for two": ([*TEXT[:6], 99, 98], TEXT[8:]),
    "put in": ([*TEXT[:6], 99], TEXT[6:]),
    "left out": ([*TEXT[:6], TEXT[8]], TEXT[9:]),
}


@pytest.mark.parametrize("edit", EDITS)
def test_guided_copying_goes_on_after_an_edit(edit: str) -> None:
    """Plain lookup copies what followed the new tokens elsewhere, or finds nothing."""
    prompt = [1, 2, *TEXT, 3, 99, 98, 60, 99, 61, TEXT[8], 62, 5]
    output, following = EDITS[edit]
    for guided in (True, False):
        script = Script(NGram(guided=guided), prompt, [*output, *following])
        script.sequence.tokens += output
        found = paths(script.draft())
        assert any(path[:4] == following[:4] for path in found) == guided
    guided_run = Script(NGram(guided=True), prompt, [*output, *following]).run()
    assert guided_run.passes <= Script(NGram(), prompt, [*output, *following]).run().passes


def test_guided_prefers_the_input() -> None:
    """The prompt is searched before the output."""
    prompt, output = [*TEXT, 3], [12, 13, 14, 70, 71, 12, 13, 14]
    for guided, expected in ((True, [15, 16]), (False, [70, 71])):
        script = Script(NGram(guided=guided, length=2), prompt, [*output, 15])
        script.sequence.tokens += output
        script.sequence.limit += 10
        assert script.draft().tokens == expected


def test_guided_falls_back_to_lookup() -> None:
    assert Script(NGram(guided=True, length=2), [7, 8, 9, 7], [8, 9, 1]).draft().tokens == [8, 9]


@pytest.mark.parametrize("spec", ["ngram:length=0", "ngram:longest=1,shortest=2"])
def test_senseless_options_are_refused(spec: str) -> None:
    with pytest.raises(UnknownMethod, match="needs"):
        registry.build(spec)
