"""`Routing`: how a row of a mixture of experts chooses those that it goes through."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Routing:
    """A row's experts are those with the highest scores; ties go to the lowest expert.

    sigmoid: each expert is scored by itself; else by a softmax over all of them.
    biased: whether the bias, which is there to spread the load, also counts in an expert's weight.
    normalized: whether the weights of a row's experts are made to sum to one.
    scale: what the weights are multiplied with in the end.
    groups, groups_kept: experts lie in groups of equal size, of which only those with the highest
      sum of their two best scores are considered.
    """

    per_token: int
    sigmoid: bool = False
    biased: bool = False
    normalized: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
