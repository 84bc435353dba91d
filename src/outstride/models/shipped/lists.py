"""List tasks: small questions whose answers hang together loosely, or tightly, or not at all.

Given the prompt, each letter of a copy is certain, whatever the others are: all may be written in
one pass. Each letter of a shuffle depends on all the others: two that are written in the same pass
may be the same. Between the two lie sentences, where one word decides on the rest. A method that
writes several tokens per pass is good if it can tell these cases apart.

After the idea of ParallelBench (Kang et al., 2025); tasks, words and sizes are our own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

LETTERS = tuple(ascii_lowercase)
GAP = "_"
END, MASK, UNKNOWN = "<end>", "<mask>", "<unknown>"
ANIMALS = ("fox", "owl", "hare", "crow", "wolf", "mole", "swan", "toad")
PLACES = ("barn", "wood", "field", "yard", "cave", "marsh")
TIMES = ("dawn", "noon", "dusk", "night")
TEMPLATES = (
    "at {time} the {one} met the {other} in the {place} and both were glad .",
    "the {one} and the {other} were glad to meet in the {place} at {time} .",
    "in the {place} the {other} saw the {one} at {time} and was very glad .",
)
"""Of equal length, and different nearly everywhere."""

LONG = (8, 12)
"""Letters in a list whose answer is certain."""
SHORT = (4, 5)
"""Letters in a list of which each depends on the others."""
TEST_SEED = 1_000_003
"""The first seed of test cases; smaller ones are for training."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question; `answer` is a right one, and `accepts` knows all of them."""

    task: str
    prompt: str
    answer: str
    accepts: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Task:
    """A kind of question."""

    name: str
    dependence: str
    """What a token of the answer depends on, apart from the prompt."""
    make: Callable[[Random], Case]


def _case(task: str, question: Sequence[str], *answers: Sequence[str]) -> Case:
    """A case with some right answers, of which the first is shown."""
    right = {" ".join(answer) for answer in answers}
    return Case(task, " ".join([task, *question, "="]), " ".join(answers[0]), right.__contains__)


def _letters(random: Random, sizes: tuple[int, int] = LONG) -> list[str]:
    return random.sample(LETTERS, random.randint(*sizes))


def _copy(random: Random) -> Case:
    letters = _letters(random)
    return _case("copy", letters, letters)


def _reverse(random: Random) -> Case:
    letters = _letters(random)
    return _case("reverse", letters, letters[::-1])


def _sort(random: Random) -> Case:
    letters = _letters(random)
    return _case("sort", letters, sorted(letters))


def _insert(random: Random) -> Case:
    new, *letters = _letters(random)
    place = random.randrange(len(letters))
    question = [new, "after", letters[place], ":", *letters]
    return _case("insert", question, [*letters[: place + 1], new, *letters[place + 1 :]])


def _remove(random: Random) -> Case:
    letters = _letters(random)
    gone = random.choice(letters)
    return _case("remove", [gone, ":", *letters], [c for c in letters if c != gone])


def _interleave(random: Random) -> Case:
    size = random.randint(LONG[0] // 2, LONG[1] // 2)
    letters = random.sample(LETTERS, 2 * size)
    one, other = letters[:size], letters[size:]
    mixed = [c for pair in zip(one, other, strict=True) for c in pair]
    return _case("interleave", [*one, ":", *other], mixed)


def _fill(random: Random) -> Case:
    """A run through the alphabet, some of whose letters are gone; those left tell its stride."""
    size = random.randint(*LONG)
    stride = random.choice([s for s in (-2, -1, 1, 2) if abs(s) * (size - 1) < len(LETTERS)])
    start = random.randrange(len(LETTERS) - abs(stride) * (size - 1))
    letters = [LETTERS[start + abs(stride) * i] for i in range(size)]
    if stride < 0:
        letters.reverse()
    gone = set(random.sample(range(size), random.randint(size // 2, size - 3)))
    shown = [GAP if i in gone else c for i, c in enumerate(letters)]
    return _case("fill", shown, letters)


def _sentence(random: Random) -> Case:
    one, other = random.sample(ANIMALS, 2)
    words = {
        "one": one,
        "other": other,
        "place": random.choice(PLACES),
        "time": random.choice(TIMES),
    }
    answers = [template.format(**words).split() for template in TEMPLATES]
    random.shuffle(answers)
    return _case("sentence", list(words.values()), *answers)


def _replace(random: Random) -> Case:
    """One letter, whichever, gives way to one that is not in the list."""
    letters = _letters(random, SHORT)
    answer = list(letters)
    others = [c for c in LETTERS if c not in letters]
    answer[random.randrange(len(letters))] = random.choice(others)

    def accepts(text: str) -> bool:
        said = text.split()
        changed = [new for old, new in zip(letters, said, strict=False) if old != new]
        return len(said) == len(letters) and len(changed) == 1 and changed[0] in others

    return Case("replace", f"replace one : {' '.join(letters)} =", " ".join(answer), accepts)


def _shuffle(random: Random) -> Case:
    letters = _letters(random, SHORT)
    answer = random.sample(letters, len(letters))

    def accepts(text: str) -> bool:
        return sorted(text.split()) == sorted(letters)

    return Case("shuffle", f"shuffle {' '.join(letters)} =", " ".join(answer), accepts)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("copy", "nothing", _copy),
        Task("reverse", "nothing", _reverse),
        Task("insert", "nothing", _insert),
        Task("remove", "nothing", _remove),
        Task("interleave", "nothing", _interleave),
        Task("fill", "nothing", _fill),
        Task("sort", "nothing, but the rank is work", _sort),
        Task("sentence", "the template, which any word gives away", _sentence),
        Task("replace", "whether another was replaced", _replace),
        Task("shuffle", "all the others", _shuffle),
    )
}
"""From no dependence between the tokens of an answer to total dependence."""

_WORDS = sorted({w for t in TEMPLATES for w in t.split() if "{" not in w})
VOCABULARY = (
    UNKNOWN,
    END,
    *TASKS,
    *("=", ":", GAP, "after", "one"),
    *LETTERS,
    *(*ANIMALS, *PLACES, *TIMES),
    *(w for w in _WORDS if w not in LETTERS),
    MASK,
)
"""Every word of the vocabulary; its index is its token id."""


def cases(name: str, count: int, seed: int = TEST_SEED) -> list[Case]:
    """Some cases of a task, each question once."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; tasks are {', '.join(TASKS)}")
    found: dict[str, Case] = {}
    random = Random(f"{name} {seed}")
    for _ in range(20 * count):
        case = TASKS[name].make(random)
        found.setdefault(case.prompt, case)
        if len(found) == count:
            break
    return list(found.values())
