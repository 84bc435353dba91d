"""`Routing`: how a mixture-of-experts layer chooses the experts of a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Routing:
    """A row goes through the `per_token` experts with the highest scores; ties go to the lowest expert.

    sigmoid: each expert is scored by itself; else by a softmax over all experts.
    biased: whether the load-balancing bias also counts in an expert's weight.
    normalized: whether the weights of a row's experts are scaled to sum to one.
    scale: a factor of all weights.
    groups, groups_kept: experts are in groups of equal size; only the groups with the highest sum of
      their two best scores are considered.
    """

    per_token: int
    sigmoid: bool = False
    biased: bool = False
    normalized: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1


class ExpertShape(Protocol):
    """The sizes of the experts of a model.

    layers: which layers have experts. shared: the inner size of the shared expert; 0 for none.
    """

    @property
    def layers(self) -> Sequence[bool]: ...
    @property
    def count(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def shared(self) -> int: ...
    @property
    def routing(self) -> Routing: ...
