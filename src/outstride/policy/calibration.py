"""Calibration: expected acceptance, corrected by how much of earlier expectations came true."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from functools import cache

from outstride.policy.config import DEFAULT_CONFIG, AutoConfig


@cache
def head_prior(config: AutoConfig = DEFAULT_CONFIG) -> tuple[float, ...]:
    """Prior gains of the nodes of a tree that a draft head contributed to, best first."""
    first, decay = config.head_prior_first, config.head_prior_decay
    return tuple(first * decay**i for i in range(config.head_prior_nodes))


def level_of(gains: Sequence[float], config: AutoConfig = DEFAULT_CONFIG) -> int:
    """The group that a step belongs to, by the expected gains of what was looked up.

    A draft head is used where lookups found little. What it brings there says little about steps in
    which they found much, and the other way round.
    """
    return bisect(config.lookup_gain_levels, sum(gains[: config.level_nodes]))


def num_worthwhile(gains: Sequence[float], marginal_costs: Sequence[float]) -> int:
    """How many nodes, best first, are expected to bring most beyond their marginal cost.

    Where a kernel tile is full, the next node is expensive and those after it are cheap: the sum
    decides.
    """
    count, best, total = 0, 0.0, 0.0
    for number, (gain, cost) in enumerate(zip(gains, marginal_costs, strict=False), start=1):
        total += gain - cost
        if total > best:
            count, best = number, total
    return count


class Calibration:
    """How many drafted tokens were accepted against how many were expected.

    A sequence's own record starts from what all sequences of its tenant have seen (`base`), and that
    starts from `prior`.
    """

    def __init__(
        self,
        base: Calibration | None = None,
        prior: float = 1.0,
        config: AutoConfig = DEFAULT_CONFIG,
    ) -> None:
        self._base = base
        self._expected, self._accepted = 0.0, 0.0
        self._prior: float = base._prior if base is not None else prior
        self._memory, self._idle_memory = config.calibration_memory, config.calibration_idle_memory
        self._weight, self._sharing = config.calibration_weight, config.calibration_sharing
        self._max = config.max_calibration

    @property
    def factor(self) -> float:
        """Accepted tokens per expected token."""
        prior = self._prior
        if self._base is not None:
            prior += self._sharing * (self._base.factor - prior)
        return (self._accepted + self._weight * prior) / (self._expected + self._weight)

    @property
    def shared_factor(self) -> float:
        """The factor over all sequences of the tenant."""
        return self._prior if self._base is None else self._base.factor

    def observe(self, expected: float, accepted: int) -> None:
        """Learns from a draft: how many tokens were expected, and how many were accepted."""
        if self._base is not None:
            self._base.observe(expected, accepted)
        self._expected = self._memory * self._expected + expected
        self._accepted = self._memory * self._accepted + accepted

    def fade(self, steps: int = 1) -> None:
        """Counts steps without a draft: the prior gains weight again, because texts change."""
        left = self._idle_memory**steps
        self._expected, self._accepted = left * self._expected, left * self._accepted

    def calibrated(self, gains: Sequence[float]) -> tuple[float, ...]:
        """Expected gains, corrected."""
        factor = min(self.factor, self._max)
        return tuple([factor * gain for gain in gains])


class HeadCalibration(Calibration):
    """The same for trees that a draft head contributed to, with the gains that such trees have.

    The gains are an exponential average, best node first. Every sequence begins with the prior, however
    others fared: sequences differ, and to use a head in vain for some steps costs less than never to
    use it.
    """

    def __init__(
        self,
        base: HeadCalibration | None = None,
        prior: float = 1.0,
        config: AutoConfig = DEFAULT_CONFIG,
    ) -> None:
        super().__init__(base, prior, config)
        self._weight, self._sharing = (
            config.head_calibration_weight,
            config.head_calibration_sharing,
        )
        self._rate, self._recovery = config.head_gain_rate, config.head_gain_recovery
        self._prior_gains = head_prior(config)
        self.gains: list[float] = list(self._prior_gains)

    def learn(self, gains: Sequence[float]) -> None:
        """Learns from a tree's gains, best node first."""
        mine, rate = self.gains, self._rate
        padded = [*gains[: len(mine)], *[0.0] * (len(mine) - len(gains))]
        self.gains = [own + rate * (gain - own) for own, gain in zip(mine, padded, strict=True)]

    def fade(self, steps: int = 1) -> None:
        """Counts steps without the head: the prior comes back, until the head is tried again."""
        super().fade(steps)
        mine, share = self.gains, 1.0 - (1.0 - self._recovery) ** steps
        self.gains = [
            own + share * (prior - own) for own, prior in zip(mine, self._prior_gains, strict=True)
        ]


class ChainCalibration(Calibration):
    """How many tokens of a head's chain are accepted, where it drafts chains and nothing else.

    The number varies from step to step, so this is a mean over many steps.
    """

    def __init__(
        self,
        base: ChainCalibration | None = None,
        prior: float = 1.0,
        config: AutoConfig = DEFAULT_CONFIG,
    ) -> None:
        super().__init__(base, prior, config)
        self._memory = config.chain_memory
        self._weight, self._sharing = config.chain_weight, config.chain_sharing

    def gains(self, depth: int) -> tuple[float, ...]:
        """Expected gains of the nodes of a chain."""
        factor = self.factor
        each = factor / (1.0 + factor)
        return tuple([each ** (i + 1) for i in range(depth)])


class SourceCalibration:
    """What a draft head brings if it is used, and what lookups bring otherwise.

    Sequences differ most, so the head is tracked for each of them. How much more or less it brings in a
    group of steps than on average is learned by all sequences of a tenant together.
    """

    def __init__(
        self,
        base: SourceCalibration | None = None,
        prior: float = 1.0,
        config: AutoConfig = DEFAULT_CONFIG,
    ) -> None:
        self._config = config
        self.head: HeadCalibration = HeadCalibration(base.head if base else None, prior, config)
        self.chains: ChainCalibration = ChainCalibration(
            base.chains if base else None, prior, config
        )
        levels = range(len(config.lookup_gain_levels) + 1)
        self.lookups: list[Calibration] = [
            Calibration(base.lookups[level] if base else None, config=config) for level in levels
        ]
        self._level_factors: list[float] = base._level_factors if base else [1.0 for _ in levels]

    def learn(self, level: int, gains: Sequence[float]) -> None:
        """Learns from the gains of a tree that a draft head contributed to."""
        config, factor = self._config, self._level_factors[level]
        usual = sum(self.head.gains[: config.level_nodes])
        found = sum(gains[: config.level_nodes]) / max(usual, 0.01)
        found = min(max(found, config.min_level_factor), config.max_level_factor)
        self.head.learn([gain / factor for gain in gains])
        self._level_factors[level] += config.level_rate * (found - factor)

    def observe(self, level: int, expected: float, accepted: int, with_head: bool) -> None:
        """Learns what became of a draft."""
        record: Calibration = self.head if with_head else self.lookups[level]
        record.observe(expected, accepted)

    def gains_with_head(self, level: int, gains: Sequence[float]) -> tuple[float, ...]:
        """Expected gains of a tree that the head contributes to, with what was looked up."""
        factor = self._level_factors[level]
        mine = [min(factor * gain, 1.0) for gain in self.head.calibrated(self.head.gains)]
        both = min(len(mine), len(gains))
        return (*map(max, mine[:both], gains[:both]), *mine[both:], *gains[both:])
