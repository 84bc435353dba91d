"""List tasks: their own answers are right, others are not, and tests are apart from training."""

from __future__ import annotations

from random import Random

import pytest

from outstride.models.shipped.lists import END, LETTERS, MASK, TASKS, VOCABULARY, cases


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_right_and_in_known_words(name: str) -> None:
    for case in cases(name, 200):
        assert case.accepts(case.answer)
        assert set(f"{case.prompt} {case.answer}".split()) <= {*VOCABULARY} - {END, MASK}
        assert case.task == name
        assert case.prompt.startswith(name)


@pytest.mark.parametrize("name", TASKS)
def test_a_word_too_many_or_too_few_is_wrong(name: str) -> None:
    for case in cases(name, 50):
        words = case.answer.split()
        assert not case.accepts(" ".join(words[:-1]))
        assert not case.accepts(" ".join([*words, words[-1]]))


@pytest.mark.parametrize("name", TASKS)
def test_a_repeated_word_is_wrong(name: str) -> None:
    """What parallel writing gets wrong first: the same word twice."""
    for case in cases(name, 50):
        words = case.answer.split()
        words[0] = words[1]
        assert not case.accepts(" ".join(words))


def test_what_leaves_a_choice_accepts_every_choice() -> None:
    [shuffle] = cases("shuffle", 1)
    letters = shuffle.prompt.split()[1:-1]
    assert shuffle.accepts(" ".join(letters[::-1]))
    [replace] = cases("replace", 1)
    letters = replace.prompt.split()[3:-1]
    new = next(c for c in LETTERS if c not in letters)
    for i in range(len(letters)):
        assert replace.accepts(" ".join([*letters[:i], new, *letters[i + 1 :]]))
    assert not replace.accepts(" ".join(letters))
    assert not replace.accepts(" ".join([new, new, *letters[2:]]))
    assert not replace.accepts(" ".join([letters[1], *letters[1:]]))
    [sentence] = cases("sentence", 1)
    one, other, place, time = sentence.prompt.split()[1:-1]
    text = f"the {one} and the {other} were glad to meet in the {place} at {time} ."
    assert sentence.accepts(text)
    assert not sentence.accepts(text.replace("meet", "met"))


def test_cases_are_a_function_of_the_seed() -> None:
    assert [c.prompt for c in cases("sort", 9)] == [c.prompt for c in cases("sort", 9)]
    assert cases("sort", 9)[0].prompt != cases("sort", 9, seed=1)[0].prompt
    assert len({c.prompt for c in cases("sentence", 300)}) == 300
    with pytest.raises(ValueError, match="tasks are copy"):
        cases("sing", 1)


def test_questions_of_tests_are_not_those_of_training() -> None:
    """Lists of eight to twelve letters hardly ever come twice."""
    random = Random("train 1 0")
    learnt = {TASKS["copy"].make(random).prompt for _ in range(2000)}
    assert not learnt & {case.prompt for case in cases("copy", 500)}
