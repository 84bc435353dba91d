"""Sampling: its bits are a contract, its filters follow their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outstride.core import host_library, sampling
from outstride.core.graph import IntArray
from outstride.core.sampling import (
    LogitsProcessors,
    Purpose,
    SamplingSpec,
    best,
    gumbel,
    probabilities,
)

# Known answers of Philox-4x32-10 (from the reference implementation's test vectors).
PHILOX = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# Bits of the noise at seed 7, sample 1, position 3: they may never change.
NOISE = {
    0: "3fa2f44f",
    1: "bec601ac",
    2: "3da05078",
    3: "3e302327",
    4: "3eba6692",
    100: "3f1668b8",
    49151: "bef4c752",
    151935: "4027fd3b",
}


@pytest.fixture(params=["compiled", "python"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The implementation of noise and sampling: both must give the same results."""
    if request.param == "python":
        monkeypatch.setattr(sampling, "library", lambda: None)
    elif host_library.library() is None:
        pytest.skip("nothing was compiled")
    return str(request.param)


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: int, expected: tuple[int, ...]
) -> None:
    words = sampling.philox(np.asarray(counter[:1]), *counter[1:], key)
    assert tuple(int(w[0]) for w in words) == expected


@pytest.mark.usefixtures("implementation")
def test_noise_bits_are_fixed() -> None:
    spec = SamplingSpec(temperature=1.0, seed=7, index=1)
    found = gumbel(spec, 3, np.asarray(list(NOISE)))
    assert {t: f"{g.view(np.uint32):08x}" for t, g in zip(NOISE, found, strict=True)} == NOISE


@pytest.mark.skipif(host_library.library() is None, reason="nothing was compiled")
def test_compiled_noise_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any key and shape: one position for all tokens, or one for each."""
    rng = np.random.default_rng(9)
    for trial in range(60):
        seed = int(rng.integers(2**63)) * 2 + 1 if trial else 2**64 - 1
        purpose = Purpose(trial % len(Purpose))
        spec = SamplingSpec(
            temperature=1.0, seed=seed, index=int(rng.integers(2**31)), purpose=purpose
        )
        ids = rng.integers(0, 200_000, size=(7, 16)) if trial % 2 else np.arange(trial, 4000)
        at = rng.integers(0, 2**31, size=ids.shape) if trial % 2 else int(rng.integers(2**31))
        found = gumbel(spec, at, ids)
        with monkeypatch.context() as patched:
            patched.setattr(sampling, "library", lambda: None)
            assert found.tobytes() == gumbel(spec, at, ids).tobytes()


@pytest.mark.skipif(host_library.library() is None, reason="nothing was compiled")
def test_compiled_functions_reject_arrays_of_wrong_size() -> None:
    lib = host_library.library()
    assert lib is not None
    some, space = np.arange(4), np.empty(4, dtype=np.float32)
    for at, ids, out in ((some[:2], some, space), (some, some, space[:3]), (some, some[:3], space)):
        with pytest.raises(ValueError, match="different sizes"):
            lib.noise(1, 0, 0, at, ids, out)
    with pytest.raises(TypeError):
        lib.noise(1, 0, 0, some, some.astype(np.int32), space)
    for temperature, k in ((0.0, 1), (1.0, 0)):
        with pytest.raises(ValueError, match="k >= 1"):
            lib.sample(space, 1, 0, 0, 3, temperature, -np.inf, k)


def test_logarithm_is_accurate() -> None:
    x = np.concatenate([np.logspace(-10, 1.5, 20001), 1 + np.linspace(-1e-3, 1e-3, 1001)]).astype(
        np.float32
    )
    exact = np.log(x.astype(np.float64))
    assert np.max(np.abs(sampling.log(x) - exact) / np.maximum(np.abs(exact), 1)) < 2e-7


def test_exponential_is_exact_at_both_ends() -> None:
    words = np.asarray([0, 1, 2**31, sampling._TOP - 1, sampling._TOP, 2**32 - 2, 2**32 - 1])
    exact = -np.log1p(-((2.0**32 - words - 0.5) / 2.0**32))
    np.testing.assert_allclose(sampling.exponential(words), exact, rtol=3e-7)
    assert gumbel_range()[1] <= sampling.MAX_NOISE


def gumbel_range() -> tuple[float, float]:
    ends = -sampling.log(sampling.exponential(np.asarray([0, 2**32 - 1])))
    return float(ends.min()), float(ends.max())


def test_noise_is_gumbel_and_its_keys_are_independent() -> None:
    ids = np.arange(200_000)
    a = gumbel(SamplingSpec(temperature=1.0, seed=1), 5, ids)
    assert abs(a.mean() - 0.5772) < 0.01
    assert abs(a.std() - math.pi / math.sqrt(6)) < 0.01
    for other in (
        gumbel(SamplingSpec(temperature=1.0, seed=2), 5, ids),
        gumbel(SamplingSpec(temperature=1.0, seed=1, index=1), 5, ids),
        gumbel(SamplingSpec(temperature=1.0, seed=1, purpose=Purpose.RESIDUAL), 5, ids),
        gumbel(SamplingSpec(temperature=1.0, seed=1), 6, ids),
        gumbel(SamplingSpec(temperature=1.0, seed=1 << 32), 5, ids),
    ):
        assert abs(float(np.corrcoef(a, other)[0, 1])) < 0.01


def test_noise_belongs_to_token_ids_not_to_places_in_a_vector() -> None:
    spec, rng = SamplingSpec(temperature=1.0, seed=9), np.random.default_rng(0)
    dense = gumbel(spec, 2, np.arange(5000))
    for size in (1, 7, 900):
        some = np.sort(rng.choice(5000, size, replace=False))
        np.testing.assert_array_equal(gumbel(spec, 2, some), dense[some])


@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(temperature=1.0),
        SamplingSpec(temperature=0.3),
        SamplingSpec(temperature=2.0, top_k=7),
        SamplingSpec(temperature=0.8, top_p=0.9),
        SamplingSpec(temperature=0.8, top_p=0.3),
        SamplingSpec(temperature=1.0, min_p=0.1),
        SamplingSpec(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01),
        SamplingSpec(temperature=5.0, top_p=0.999),
    ],
)
def test_filters_follow_their_definitions(spec: SamplingSpec) -> None:
    """Against a slow reference."""
    rng = np.random.default_rng(3)
    for size in (5, 300, 3000):
        row = (rng.standard_normal(size) * 3).astype(np.float32)
        row[: size // 4] = np.round(row[: size // 4])  # ties
        p = np.exp((row / np.float32(spec.temperature)).astype(np.float64))
        p /= p.sum()
        order = sorted(range(size), key=lambda i: (-row[i], i))
        if spec.top_k:
            order = order[: spec.top_k]
        if spec.top_p < 1:
            mass, kept = 0.0, []
            total = sum(p[i] for i in order)
            for i in order:
                kept.append(i)
                mass += p[i]
                if mass >= spec.top_p * total:
                    break
            order = kept
        order = [i for i in order if p[i] >= spec.min_p * p.max() * (1 - 1e-6)]
        expected = np.zeros(size)
        expected[order] = p[order] / p[order].sum()
        found = probabilities(row, spec)
        np.testing.assert_array_equal(found > 0, expected > 0)
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.usefixtures("implementation")
def test_best_is_the_argmax_of_the_noisy_sum_and_pruning_changes_nothing() -> None:
    rng = np.random.default_rng(5)
    for position in range(60):
        row = (rng.standard_normal(2000) * (0.3, 4, 12)[position % 3]).astype(np.float32)
        spec = SamplingSpec(temperature=0.7, seed=position)
        sums = row / np.float32(0.7) + gumbel(spec, position, np.arange(2000))
        expected = np.argsort(-sums, kind="stable")[:5]
        np.testing.assert_array_equal(best(row, spec, position, 5), expected)
        assert best(row, spec, position)[0] == expected[0]


@pytest.mark.usefixtures("implementation")
def test_of_equal_sums_the_lowest_token_comes_first() -> None:
    """Logits this large outweigh any noise."""
    row = np.asarray([1e9, -np.inf, 1e9, 5.0, 1e9, 1e9, -np.inf], dtype=np.float32)
    spec = SamplingSpec(temperature=1.0, seed=3)
    assert best(row, spec, 0, 3).tolist() == [0, 2, 4]
    assert best(row, spec, 0, 7).tolist() == [0, 2, 4, 5, 3, 1, 6]


@pytest.mark.usefixtures("implementation")
def test_what_is_no_number_comes_last() -> None:
    """Only a broken model returns NaN; sampling gives a token all the same."""
    row = np.asarray([np.nan, 1.0, np.nan, 9.0], dtype=np.float32)
    spec = SamplingSpec(temperature=0.5, seed=2)
    assert best(row, spec, 0, 4).tolist() == [3, 1, 0, 2]
    assert best(np.full(9, np.nan, dtype=np.float32), spec, 0, 1).tolist() == [0]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("allowed", [0, 1, 3, 40, 900, 1000])
@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(temperature=0.9, seed=5),
        SamplingSpec(temperature=1.3, top_k=20, seed=6),
        SamplingSpec(temperature=0.7, top_p=0.8, seed=7),
        SamplingSpec(temperature=1.0, min_p=0.01, seed=8),
    ],
)
def test_forbidden_tokens_come_last_and_need_no_noise(
    spec: SamplingSpec, allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(allowed)
    computed: list[int] = []

    def spy(spec: SamplingSpec, position: int, tokens: IntArray) -> IntArray:
        computed.append(len(tokens))
        return words(spec, position, tokens)

    words = sampling.random_words
    monkeypatch.setattr(sampling, "random_words", spy)
    for position in range(6):
        row = np.full(1000, -np.inf, dtype=np.float32)
        ids = rng.choice(1000, allowed, replace=False)
        row[ids] = rng.normal(0, 3, allowed).astype(np.float32)
        if allowed == 0 and (spec.top_p < 1 or spec.min_p > 0):
            continue  # no row without any token gets that far
        known, x = sampling.admitted(row, spec)
        sums = x + gumbel(spec, position, known)
        for k in (1, 8):
            computed.clear()
            naive = known[np.argsort(-sums, kind="stable")[:k]]
            assert best(row, spec, position, k).tolist() == naive.tolist()
            assert max(computed, default=0) <= allowed


def test_words_below_the_bar_make_no_large_noise() -> None:
    """The bound is where its comment says, and the noise rises with the words around it."""
    words = np.arange(sampling._LARGE - 4000, sampling._LARGE + 4000)
    noise = sampling._noise(words)
    assert noise[:4000].max() < sampling.LARGE_NOISE - 0.005
    assert noise[-1] > noise[0]
    lower = np.linspace(0, sampling._LARGE - 1, 100_000).astype(np.int64)
    assert sampling._noise(lower).max() < sampling.LARGE_NOISE - 0.005


def test_words_do_not_depend_on_what_else_is_asked_for() -> None:
    spec, rng = SamplingSpec(temperature=1.0, seed=9), np.random.default_rng(0)
    whole = sampling.random_words(spec, 3, np.arange(2000))
    for size in (1, 2, 5, 400, 700, 1999):
        ids = rng.choice(2000, size, replace=False)
        assert (sampling.random_words(spec, 3, ids) == whole[ids]).all()
    some = np.arange(1200, 1300)
    assert (sampling.random_words(spec, 3, some) == whole[some]).all()


def test_sampling_follows_the_distribution() -> None:
    row = np.asarray([1.0, 0.0, 2.0, -1.0, 0.5], dtype=np.float32)
    spec = SamplingSpec(temperature=0.9, top_k=4)
    counts = np.zeros(5)
    trials = 20_000
    for seed in range(trials):
        counts[best(row, SamplingSpec(temperature=0.9, top_k=4, seed=seed), 0)[0]] += 1
    expected = probabilities(row, spec) * trials
    assert counts[3] == 0
    live = expected > 0
    assert ((counts[live] - expected[live]) ** 2 / expected[live]).sum() < 20


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = np.asarray([1.0, 3.0, 3.0, 2.0, 3.0], dtype=np.float32)
    assert best(row, SamplingSpec(), 0).tolist() == [1]
    assert best(row, SamplingSpec(), 0, 4).tolist() == [1, 2, 4, 3]


def test_rules() -> None:
    row = np.asarray([2.0, -2.0, 1.0, 0.0], dtype=np.float32)
    rules = LogitsProcessors(
        penalized=(0, 1),
        scale=2.0,
        added={2: 1.5, 3: -math.inf},
        allowed=np.asarray([True, True, False, True]),
    )
    assert rules.apply(row).tolist() == [1.0, -4.0, -math.inf, -math.inf]
    assert row.tolist() == [2.0, -2.0, 1.0, 0.0]


def test_logprobs_are_normalised() -> None:
    row = np.random.default_rng(0).standard_normal(500).astype(np.float32)
    listed = sampling.logprobs(row, [17], 500)
    assert listed[0][0] == 17
    assert abs(sum(math.exp(v) for _, v in listed[1:]) - 1) < 1e-9
    assert [v for _, v in listed[1:]] == sorted((v for _, v in listed[1:]), reverse=True)
