"""Streamed text has whole characters only, and no beginning of a possible stop string."""

from __future__ import annotations

import pytest

from outstride.core.params import SamplingParams
from outstride.engine.stopping import IncrementalText, Stopper


def token_to_bytes(token: int) -> bytes:
    return bytes([token])


def feed(text: IncrementalText, data: str) -> list[str]:
    pieces = []
    for token in data.encode():
        text.append(token)
        pieces.append(text.take_new(final=False))
    return pieces


def test_characters_arrive_whole() -> None:
    text = IncrementalText(token_to_bytes)
    pieces = feed(text, "héllo 🙂!")
    assert "".join(pieces) == "héllo 🙂!"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    text = IncrementalText(token_to_bytes)
    for token in "é".encode()[:1]:
        text.append(token)
    assert text.take_new(final=False) == ""
    text.finish()
    assert text.take_new(final=True) == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("stop", ["STOP", "ST", "\n\n", "é!"])
def test_the_beginning_of_a_stop_string_is_held_back(stop: str) -> None:
    text = IncrementalText(token_to_bytes, (stop,))
    stopper = Stopper(SamplingParams(stop=(stop,)), (), 0, 1000, text)
    shown, reason = "", None
    for i, token in enumerate(f"ab{stop[:-1]}c{stop}tail".encode(), start=1):
        reason = stopper.push(token, i)
        shown += text.take_new(final=reason is not None)
        assert stop not in shown
        if reason:
            break
    assert reason == "stop"
    assert shown == f"ab{stop[:-1]}c"


@pytest.mark.parametrize("stop", ["STOP", "\n\n", "é!"])
def test_a_stop_string_may_stay_in_the_text(stop: str) -> None:
    text = IncrementalText(token_to_bytes, (stop,))
    params = SamplingParams(stop=(stop,), include_stop_str_in_output=True)
    stopper = Stopper(params, (), 0, 1000, text)
    shown = ""
    for i, token in enumerate(f"ab{stop}tail".encode(), start=1):
        reason = stopper.push(token, i)
        shown += text.take_new(final=reason is not None)
        if reason:
            break
    assert shown == f"ab{stop}"


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_token_may_stay_in_the_text(included: bool) -> None:
    text = IncrementalText(token_to_bytes)
    params = SamplingParams(stop_token_ids=(ord("!"),), include_stop_str_in_output=included)
    stopper = Stopper(params, (), 0, 1000, text)
    assert [stopper.push(token, i) for i, token in enumerate(b"ab!", start=1)][-1] == "stop"
    text.finish()
    assert text.take_new(final=True) == ("ab!" if included else "ab")


def test_text_that_is_no_stop_string_after_all_is_released() -> None:
    text = IncrementalText(token_to_bytes, ("END",))
    assert "".join(feed(text, "the EN")) == "the "
    text.finish()
    assert text.take_new(final=True) == "EN"


def test_finish_reasons() -> None:
    params = SamplingParams(stop_token_ids=(5,), min_tokens=2, max_tokens=9)
    stopper = Stopper(params, {7}, prompt_length=10, limit=19, text=None)
    assert stopper.push(1, 11) is None
    assert stopper.push(7, 12) == "stop"
    assert stopper.push(5, 13) == "stop"
    assert stopper.push(1, 19) == "length"
    ignoring = Stopper(SamplingParams(ignore_eos=True), {7}, 10, 19, None)
    assert ignoring.push(7, 12) is None
