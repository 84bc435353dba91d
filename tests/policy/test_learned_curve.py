"""The cost curve is learned from passes, on simulated machines with noise, load and other shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import cycle, islice

import pytest

from outstride.policy.config import DEFAULT_CONFIG
from outstride.policy.cost_model import CostModel
from outstride.policy.cost_prior import SHAPES, SIZES, prior_of

Machine = Callable[[int], float]
BUILDS = [
    "cpu int8 cpu avx512-vnni int8 x 8 bit",
    "cpu int4 cpu avx2 int4",
    "cpu fp32 reference fp32",
]


def machine(
    one: float = 0.005,
    node: float = 0.0004,
    noise: float = 0.06,
    spikes: float = 0.1,
    seed: int = 1,
) -> Machine:
    """Seconds of a pass: a base, each node, noise that only adds, and passes that are held up."""
    rng = random.Random(seed)

    def seconds(nodes: int) -> float:
        held_up = 8.0 if rng.random() < spikes else 1.0
        return (one + node * (nodes - 1)) * (1.0 + noise * rng.random()) * held_up

    return seconds


def run(cost: CostModel, passes: Machine, sizes: Iterable[int], steps: int) -> None:
    for nodes in islice(cycle(sizes), steps):
        cost.observe(nodes, passes(nodes))


def ratio(cost: CostModel, nodes: int) -> float:
    """The cost of a pass in plain ones: what decides whether drafts pay."""
    return cost.curve(nodes)[nodes] / cost.curve(1)[1]


def prior(build: str = BUILDS[0]) -> CostModel:
    shape = prior_of(build)
    assert shape is not None
    return shape.cost_model(DEFAULT_CONFIG)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("node", [0.0001, 0.0004, 0.002])
def test_from_any_prior_the_curve_converges(build: str, node: float) -> None:
    """Within 15 passes of each size that occurs, whatever the prior was."""
    cost, true = prior(build), machine(node=node, noise=0.0, spikes=0.0)
    run(cost, machine(node=node), (1, 4, 8), 45)
    for nodes in (1, 4, 8):
        assert cost.curve(8)[nodes] == pytest.approx(true(nodes), rel=0.12)
    for nodes in (4, 8):
        assert ratio(cost, nodes) == pytest.approx(true(nodes) / true(1), rel=0.12)


def test_the_first_pass_gives_the_prior_its_scale() -> None:
    cost = prior()
    shape = ratio(cost, 8)
    cost.observe(1, 0.005)
    assert cost.curve(1)[1] == pytest.approx(0.005)
    assert ratio(cost, 8) == pytest.approx(shape)
    assert cost.prefill.per_node == pytest.approx(0.005 * SHAPES["avx512"].prefill[0])


def test_a_first_pass_with_prefill_gives_both_their_scale() -> None:
    cost = prior()
    expected = cost.decode_seconds([(1, 128)]) + cost.prefill.seconds(16, 128)
    cost.observe(17, 0.010, [(16, 128)], [(1, 128)])
    assert cost.curve(1)[1] == pytest.approx(0.010 / expected)
    assert cost.prefill.seconds(16, 128) + cost.curve(1)[1] == pytest.approx(0.010)


def test_noise_does_not_move_a_learned_curve() -> None:
    """One pass in ten takes eight times as long: no estimate of the ratio moves by a tenth."""
    cost, passes = prior(), machine()
    run(cost, passes, (1, 6), 60)
    found = []
    for _ in range(200):
        run(cost, passes, (1, 6), 2)
        found.append(ratio(cost, 6))
    assert max(found) / min(found) < 1.1


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_stored_curve_is_scaled_to_the_speed_of_this_process(factor: float) -> None:
    """Ten plain passes say it for all sizes; the shape stays."""
    first = prior()
    run(first, machine(), (1, 4, 8), 90)
    shape = prior_of(BUILDS[0])
    assert shape is not None
    second = shape.cost_model(DEFAULT_CONFIG, first.known_knots())
    assert second.knots[8] == pytest.approx(first.knots[8], rel=0.1)
    run(second, machine(0.005 * factor, 0.0004 * factor), (1,), 10)
    for nodes in (1, 4, 8):
        expected = factor * (0.005 + 0.0004 * (nodes - 1))
        assert second.curve(8)[nodes] == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("sizes", [(1,), (1, 6)])
def test_a_curve_that_was_stored_under_load_is_corrected(sizes: tuple[int, ...]) -> None:
    """Passes over several nodes took long while it was learned.

    Without drafts, nothing shows that they do so no more. Yet they come to look worth a trial.
    """
    loaded = prior()
    run(loaded, machine(node=0.004), (1, 6, 8), 120)
    assert ratio(loaded, 6) > 4.0
    shape = prior_of(BUILDS[0])
    assert shape is not None
    cost = shape.cost_model(DEFAULT_CONFIG, loaded.known_knots())
    run(cost, machine(), sizes, 400)
    assert ratio(cost, 6) < 1.7


def test_a_curve_under_load_is_corrected_by_many_short_processes() -> None:
    """Each of them takes 60 plain passes and stores what it has then."""
    cost = prior()
    run(cost, machine(node=0.004), (1, 6, 8), 120)
    shape = prior_of(BUILDS[0])
    assert shape is not None
    for seed in range(6):
        cost = shape.cost_model(DEFAULT_CONFIG, cost.known_knots())
        run(cost, machine(seed=seed), (1,), 60)
    assert ratio(cost, 6) < 1.7


def test_a_trial_restores_what_was_forgotten() -> None:
    """Passes over eight nodes are slow for good: after a long time without them, one says so again."""
    cost, passes = prior(), machine(node=0.003, spikes=0.0)
    run(cost, passes, (1, 8), 60)
    learned = ratio(cost, 8)
    run(cost, passes, (1,), 600)
    assert ratio(cost, 8) < 0.5 * learned
    run(cost, passes, (8,), 3)
    assert ratio(cost, 8) > 0.7 * learned


def test_load_on_drafts_does_not_make_plain_passes_look_slow() -> None:
    """A sequence that drafts in each step sees no plain pass that would say otherwise."""
    cost = prior()
    run(cost, machine(spikes=0.0), (1, 6), 60)
    plain = cost.curve(1)[1]
    run(cost, machine(node=0.002, spikes=0.0), (6,), 600)
    assert cost.curve(1)[1] == pytest.approx(plain, rel=0.02)


def test_a_machine_that_gets_twice_as_slow_is_followed_within_a_window() -> None:
    cost = prior()
    run(cost, machine(), (1, 4, 8), 90)
    run(cost, machine(0.010, 0.0008), (1, 4, 8), 3 * DEFAULT_CONFIG.short_window)
    for nodes in (1, 4, 8):
        assert cost.curve(8)[nodes] == pytest.approx(0.010 + 0.0008 * (nodes - 1), rel=0.15)


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        ("cpu int8 cpu amx int8 x 8 bit, cache int8", "amx"),
        ("cpu int8 cpu avx512-vnni int8 x 8 bit, cache int8", "avx512"),
        ("cpu int4 cpu avx512-vnni int4 x 8 bit, cache int8", "avx512 int4"),
        ("cpu int4 cpu avx2 int4 x 8 bit, cache int8", "avx2"),
        ("cpu int8 cpu avx-vnni int8 x 8 bit", "avx-vnni"),
        ("cpu int8 cpu avxvnni int8 x 8 bit", "avx-vnni"),
        ("cpu int8 cpu neon-i8mm int8 x 8 bit", "neon"),
        ("cpu fp32 reference fp32 threads 2", "reference"),
        ("toy", "avx2"),
    ],
)
def test_every_build_has_a_prior(build: str, kind: str) -> None:
    assert prior_of(build) is SHAPES[kind]


def test_gpus_have_none() -> None:
    assert prior_of("cuda bf16 cuda bf16 triton 3.4.0 NVIDIA H200 torch 2.13.0") is None


def test_shapes_begin_with_one_and_never_fall() -> None:
    for shape in SHAPES.values():
        assert len(shape.nodes) == len(SIZES)
        assert shape.nodes[0] == 1
        assert list(shape.nodes) == sorted(shape.nodes)
        assert shape.prefill[0] < shape.nodes[-1] / SIZES[-1]  # chunks are scored at one node only
