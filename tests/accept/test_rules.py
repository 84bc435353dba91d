"""Rejection rules keep the distribution; rules with planted faults do not."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from outstride.accept.rejection_sampling import Picked, Rows, block, in_turn, k_seq, threshold
from outstride.core.graph import IntArray
from outstride.draft.rsd import conditioned
from tests.accept.chi_square import p_value
from tests.accept.many import Pair, Rule, Trials, pair, perturbed, tree_of

SOUND, FAULTY = 1e-3, 1e-6
RULES: dict[str, tuple[Rule, bool]] = {
    "recursive": (partial(in_turn, again=False), False),
    "candidates": (partial(in_turn, again=True), True),
    "k-seq": (k_seq, True),
}


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", RULES)
def test_trees_keep_the_distribution(name: str, width: int, top_p: float) -> None:
    rule, again = RULES[name]
    trials = Trials(pair(top_p=top_p))
    assert trials.judge(*tree_of(trials, rule, width, again=again)) > SOUND


def too_eager(p: Rows, q: Rows, tokens: IntArray, draws: Rows) -> Picked:
    """k-seq with a factor of 1."""
    taken, _ = k_seq(p, q, tokens, draws)
    held = draws * np.take_along_axis(q, tokens, axis=1) < np.take_along_axis(p, tokens, axis=1)
    taken = np.where(held.any(axis=1), held.argmax(axis=1), tokens.shape[1])
    return taken, np.maximum(p - q, 1e-12)


FAULTS: dict[str, tuple[Rule, bool, str]] = {
    "acceptance uses the drafter's noise": (*RULES["recursive"], "the drafter's noise"),
    "a refused token is replaced from p": (*RULES["recursive"], "no residual"),
    "the same for k-seq": (*RULES["k-seq"], "no residual"),
    "q is not renormalised without replacement": (RULES["candidates"][0], False, ""),
    "independent candidates taken for distinct ones": (RULES["recursive"][0], True, ""),
    "a threshold that is too low": (too_eager, True, ""),
}


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(fault: str, top_p: float) -> None:
    rule, again, planted = FAULTS[fault]
    trials = Trials(pair(top_p=top_p))
    assert trials.judge(*tree_of(trials, rule, 3, again=again, planted=planted)) < FAULTY


# --- stochastic beams -----------------------------------------------------------------------------


def beams(trials: Trials, planted: str = "") -> tuple[IntArray, IntArray]:
    """RSD's tree: two paths stay at each level, by their perturbed values."""
    rows, n = trials.pair, trials.count
    line, rule = np.arange(n)[:, None], partial(in_turn, again=False)
    p0, q0 = np.broadcast_to(rows.p[0], (n, rows.size)), np.broadcast_to(rows.q[0], (n, rows.size))
    tokens, values = trials.without(q0, 2)
    taken, rest = rule(p0, q0, tokens, trials.uniform(n, 2))
    first = trials.settle(taken, rest, tokens)
    # The second level: each of the two has two children, and the best two of the four stay.
    q1 = rows.q[1][tokens]
    noise = trials.noise(n, 2, rows.size)
    logs = np.log(np.take_along_axis(q0, tokens, axis=1))[:, :, None]
    inner = perturbed(q1, noise) + logs
    children = np.argsort(-inner, axis=2)[:, :, :2]
    found = np.take_along_axis(inner, children, axis=2)
    tops = np.take_along_axis(values, tokens, axis=1)[:, :, None]
    scores = conditioned(tops, found, found[:, :, :1])
    if planted == "likelier tokens stay":
        scores = np.log(np.take_along_axis(q1, children, axis=2)) + logs
    kept = np.zeros((n, 4), dtype=np.bool_)
    kept[line, np.argsort(-scores.reshape(n, 4), axis=1, kind="stable")[:, :2]] = True
    second = trials.drawn(rows.p[1][first])
    for place in range(2):
        many = kept[:, 2 * place : 2 * place + 2]
        if planted == "likelier tokens stay":
            count = many.sum(axis=1)
            children[:, place] = np.where(
                many[:, :1], children[:, place], children[:, place][:, ::-1]
            )
        else:
            count = many[:, 0].astype(int) + many.all(axis=1)
            assert not (many[:, 1] & ~many[:, 0]).any(), "siblings stay in their order"
        for size in (1, 2):
            cases = np.flatnonzero((taken == place) & (count == size))
            given = first[cases]
            some = children[cases, place, :size]
            done, left = rule(
                rows.p[1][given], rows.q[1][given], some, trials.uniform(len(cases), size)
            )
            second[cases] = trials.settle(done, left, some)
    return first, second


def test_beams_keep_the_distribution() -> None:
    trials = Trials(pair(), 200_000)
    assert trials.judge(*beams(trials)) > SOUND


def test_beams_with_a_planted_fault() -> None:
    """How many siblings stay may depend on values, not on tokens."""
    trials = Trials(pair(), 200_000)
    assert trials.judge(*beams(trials, "likelier tokens stay")) < FAULTY


# --- blocks ---------------------------------------------------------------------------------------


def chain_of(rows: Pair, count: int, noise: list[Rows]) -> tuple[IntArray, Rows, Rows]:
    """A drafted chain, and both distributions along it."""
    n = len(noise[0])
    tokens: list[IntArray] = []
    p, q = [], []
    for depth in range(count + 1):
        at = tuple(tokens)
        p.append(np.broadcast_to(rows.p[depth][at], (n, rows.size)))
        if depth < count:
            q.append(np.broadcast_to(rows.q[depth][at], (n, rows.size)))
            tokens.append(perturbed(q[-1], noise[depth]).argmax(axis=1))
    return np.stack(tokens, axis=1), np.stack(p, axis=1), np.stack(q, axis=1)


def blocks(trials: Trials, planted: str = "") -> tuple[float, float]:
    """The p-value of three tokens, the first two drafted; and how many of those hold."""
    rows, n, size = trials.pair, trials.count, trials.pair.size
    noise = [trials.noise(n, size) for _ in range(2)]
    tokens, p, q = chain_of(rows, 2, noise)
    length, rest = block(p, q, tokens, trials.uniform(n, 2))
    if planted == "a residual of the last token alone":
        rest = np.maximum(p - np.concatenate([q, np.zeros((n, 1, size))], axis=1), 1e-12)
        rest = rest[np.arange(n), length]
    text = np.concatenate([tokens, np.zeros((n, 1), dtype=np.int64)], axis=1)
    text[np.arange(n), length] = trials.drawn(rest)
    for depth in (1, 2):  # what the next step would add
        cases = np.flatnonzero(length < depth)
        at = tuple(text[cases, i] for i in range(depth))
        if planted == "noise of the last step" and depth == 1:
            again = perturbed(rows.q[1][at], noise[1][cases]).argmax(axis=1)
            left, right = rows.p[1][at], rows.q[1][at]
            some = again[:, None]
            taken, more = in_turn(left, right, some, trials.uniform(len(cases), 1), again=True)
            text[cases, 1] = trials.settle(taken, more, some)
        else:
            text[cases, depth] = trials.drawn(rows.p[depth][at])
    places = (text[:, 0] * size + text[:, 1]) * size + text[:, 2]
    seen = np.bincount(places, minlength=size**3)
    return p_value(seen, rows.expected(3).ravel() * n), float(length.mean())


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_blocks_keep_the_distribution(top_p: float) -> None:
    for seed in range(1, 4):
        p_value, _ = blocks(Trials(pair(6, top_p=top_p, seed=seed)))
        assert p_value > SOUND


@pytest.mark.parametrize("fault", ["a residual of the last token alone", "noise of the last step"])
def test_blocks_with_planted_faults(fault: str) -> None:
    p_value, _ = blocks(Trials(pair(6, seed=3), 200_000), fault)
    assert p_value < FAULTY


def test_blocks_accept_more_than_single_tokens() -> None:
    for seed in range(1, 4):
        rows = pair(6, seed=seed)
        _, length = blocks(Trials(rows))
        one = np.minimum(rows.p[0], rows.q[0])
        two = np.minimum(rows.p[1], rows.q[1]).sum(axis=1)
        assert length > float(one.sum() + (one * two).sum()) - 0.003


def test_the_threshold_lies_between_one_and_the_number_of_candidates() -> None:
    rows = pair()
    p, q = rows.p[1], rows.q[1]
    for count in (1, 2, 5):
        factor = threshold(p, q, count)
        assert ((factor >= 1) & (factor <= count)).all()
        one = np.minimum(q, p / factor).sum(axis=1, keepdims=True)
        assert (1 - (1 - one) ** count <= factor * one + 1e-9).all()


def test_equal_distributions_take_the_first_candidate() -> None:
    """So a candidate sampled from the target's own distribution is never refused."""
    rows = pair()
    trials = Trials(rows, 2000)
    p = np.broadcast_to(rows.p[0], (2000, rows.size))
    for name, (rule, again) in RULES.items():
        tokens = trials.independent(p, 3) if again else trials.without(p, 3)[0]
        taken, _ = rule(p, p, tokens, trials.uniform(2000, 3))
        assert name == "k-seq" or (taken == 0).all()
