"""The optimum against brute force, and rules against the optimum."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from outstride.accept.rejection_sampling import in_turn
from outstride.bench import acceptance
from outstride.bench.acceptance import Row
from outstride.errors import InvalidParams
from tests.cli.shell import Shell


def draw_probabilities(q: Row, count: int, again: bool) -> dict[tuple[int, ...], float]:
    """Of every ordered draw of candidates."""
    found = {}
    for tokens in itertools.product(range(len(q)), repeat=count):
        probability, left = 1.0, 1.0
        for i, token in enumerate(tokens):
            if not again and token in tokens[:i]:
                probability = 0.0
                break
            probability *= q[token] / left
            left -= 0.0 if again else q[token]
        found[tokens] = probability
    return found


def by_brute_force(p: Row, q: Row, count: int, again: bool) -> float:
    """The smallest cut over all sets of tokens."""
    drawn, lowest = draw_probabilities(q, count, again), 0.0
    for size in range(len(p) + 1):
        for chosen in itertools.combinations(range(len(p)), size):
            held = set(chosen)
            inside = sum(
                probability for tokens, probability in drawn.items() if set(tokens) <= held
            )
            lowest = min(lowest, sum(p[list(chosen)]) - inside)
    return float(1.0 + lowest)


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_optimum_is_that_of_all_cuts(count: int, again: bool) -> None:
    rng = np.random.default_rng(count)
    for noise in (0.5, 1.5, 3.0):
        p, q = acceptance.distributions(6, 2.0, noise, rng)
        expected = by_brute_force(p, q, count, again)
        assert acceptance.optimum(p, q, count, again=again) == pytest.approx(expected, abs=1e-6)


def test_the_optimum_with_tokens_that_one_side_excludes() -> None:
    p, q = np.asarray([0.5, 0.5, 0.0, 0.0]), np.asarray([0.0, 0.4, 0.6, 0.0])
    for count, again in itertools.product((1, 2), (True, False)):
        expected = by_brute_force(p, q, count, again)
        assert acceptance.optimum(p, q, count, again=again) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rates_of_single_rules(count: int) -> None:
    """Closed forms agree with the rules, run many times; nobody beats the optimum."""
    rng = np.random.default_rng(7)
    p, q = acceptance.distributions(12, 2.0, 1.0, rng)
    trials = 100_000
    many_p, many_q = np.broadcast_to(p, (trials, 12)), np.broadcast_to(q, (trials, 12))
    tokens = rng.choice(12, size=(trials, count), p=q)
    draws = rng.random((trials, count))
    taken, _ = in_turn(many_p, many_q, tokens, draws, again=True)
    turn = acceptance.one_by_one(p, q, count)
    assert turn == pytest.approx((taken < count).mean(), abs=0.006)
    best = acceptance.optimum(p, q, count, again=True)
    assert acceptance.single(p, q) <= turn + 1e-9
    assert max(turn, acceptance.selected(p, q, count)) <= best + 1e-9
    without = acceptance.optimum(p, q, count, again=False)
    assert without >= best - 1e-9
    assert acceptance.recursive(p, q, count, trials, rng) <= without + 0.006
    assert acceptance.shared(p, q, 1, trials, rng) < acceptance.single(p, q)


def test_spectr_reaches_its_guaranteed_rate() -> None:
    """At lowest 1 - 1/e of the optimum."""
    rng = np.random.default_rng(3)
    for count in (2, 4, 8):
        p, q = acceptance.distributions(64, 3.0, 2.0, rng)
        best = acceptance.optimum(p, q, count, again=True)
        assert acceptance.selected(p, q, count) >= (1 - np.exp(-1)) * best


def test_equal_distributions() -> None:
    p, _ = acceptance.distributions(32, 2.0, 1.0, np.random.default_rng(0))
    for again in (True, False):
        assert acceptance.optimum(p, p, 3, again=again) == pytest.approx(1.0)
    assert acceptance.one_by_one(p, p, 3) == pytest.approx(1.0)


def test_measuring() -> None:
    ticks: list[tuple[int, int]] = []
    report = acceptance.measure(
        [0.5, 2.0], [1, 3], size=16, pairs=2, trials=500, progress=lambda *now: ticks.append(now)
    )
    assert ticks[-1] == (8, 8)
    easy, hard = report.cases[1], report.cases[3]
    assert easy.overlap > hard.overlap
    for case in report.cases:
        assert set(case.rates) == set(acceptance.RULES)
        bound = case.rates["optimum without replacement"]
        assert all(rate <= bound + 0.03 for rate in case.rates.values())
    with pytest.raises(InvalidParams):
        acceptance.measure([1.0], [0])


def test_the_command(shell: Shell) -> None:
    options = ("--vocabulary", "24", "--pairs", "2", "--candidates", "1,2")
    ran = shell("bench", "acceptance", *options)
    assert ran.code == 0
    values = json.loads(ran.last)
    assert values["kind"] == "acceptance"
    assert len(values["samples"]) == 8
    assert "recursive (rsd)" in values["summary"]["falls short by at most"]
    assert "overlap" in ran.out
    alone = shell("bench", "acceptance", *options, "--json")
    assert len(alone.out.splitlines()) == 1
