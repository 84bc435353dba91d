"""`demand` answers without changing anything, for every registered method."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from outstride import registry
from outstride.core.contracts import Demand, Drafter, Method
from outstride.core.params import SamplingParams
from outstride.core.sequence import View
from outstride.errors import MethodFailed
from outstride.policy.auto import Auto
from outstride.policy.config import AutoConfig
from outstride.policy.mix import Mix, MixState
from tests.conformance.harness import Bench, some_prompts, toy_method
from tests.conformance.masked import KINDS, PAIRS
from tests.conformance.test_registry import VARIANTS, samples
from tests.policy.heads import head_of

MEMOS = {"_templates"}
"""Caches of pure functions that drafters keep."""


def snapshot(value: Any, seen: dict[int, int] | None = None) -> Any:
    """A value as nested tuples that can be compared, whatever it consists of."""
    seen = {} if seen is None else seen
    if isinstance(value, str | int | float | bytes | bool | types.NoneType | types.FunctionType):
        return value
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Mapping):
        return tuple((snapshot(k, seen), snapshot(v, seen)) for k, v in value.items())
    if isinstance(value, list | tuple | deque | set | frozenset):
        return tuple(snapshot(item, seen) for item in value)
    names = {*getattr(value, "__dict__", {})}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
    fields = ((n, getattr(value, n, None)) for n in sorted(names - MEMOS) if n[:2] != "__")
    return type(value).__name__, tuple((name, snapshot(field, seen)) for name, field in fields)


class Watching:
    """Asks a drafter twice, and compares what it holds before and after."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self._demand, self.asked = drafter, drafter.demand, 0

    def __call__(self, view: View) -> Demand:
        before = snapshot((view.state, vars(self._drafter)))
        first = self._demand(view)
        second = self._demand(view)
        assert snapshot(first) == snapshot(second)
        assert snapshot((view.state, vars(self._drafter))) == before
        self.asked += 1
        return first


def run_watched(bench: Bench, method: Method, params: SamplingParams) -> Watching:
    """Runs some requests; every question is put twice."""
    drafter = method.drafter
    watching, cls = Watching(drafter), type(drafter)
    twice = type(cls.__name__, (cls,), {"demand": lambda self, view: watching(view)})
    drafter.__class__ = twice
    watching._demand = types.MethodType(cls.demand, drafter)
    bench.run(some_prompts(4, 2), method, params)
    return watching


def cases() -> list[tuple[str, str]]:
    """Each registered method with options, and the kind of masked model that it needs, if any."""
    masked = dict(reversed([(spec.partition(":")[0], (spec, kind)) for spec, kind in PAIRS]))
    found = []
    for entry in registry.entries():
        causal = VARIANTS.get(entry.name, [entry.name])
        found.append(masked[entry.name] if entry.name in masked else (causal[-1], ""))
    return found


@pytest.mark.parametrize(("spec", "kind"), cases())
def test_demand_changes_nothing(spec: str, kind: str) -> None:
    method = registry.build(spec)
    if type(method.drafter).demand is Drafter.demand:
        return  # there is nothing to ask
    params = SamplingParams(max_tokens=10, temperature=0.5, seed=2, n=samples(spec))
    bench = Bench(**KINDS[kind], nodes=512, pages=400) if kind else Bench(pages=400)
    assert run_watched(bench, method, params).asked > 3


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("name", ["auto", "mix"])
def test_demand_of_a_drafter_with_a_head_changes_nothing(name: str, chain: bool) -> None:
    bench = Bench(pages=400)
    head = head_of(bench.target, "block-drafter", device_chain=chain)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    assert run_watched(bench, registry.build(f"{name}:from={head}"), params).asked > 10


def test_a_demand_that_changes_something_is_caught() -> None:
    class Counting(Mix):
        def demand(self, view: View) -> Demand:
            self.nodes += 1
            return super().demand(view)

    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with pytest.raises(MethodFailed):
        run_watched(Bench(), toy_method(Counting(), registry.build("plain").acceptor), params)


def looks(config: AutoConfig) -> int:
    """In how many steps `auto` looks for drafts while no draft pays."""
    bench = Bench(pages=400, cost={1: 1.0, 64: 64.0})
    method = toy_method(Auto(config), registry.build("plain").acceptor)
    params = SamplingParams(max_tokens=120, temperature=3.0, seed=5, ignore_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        found, real = list[int](), Auto._tree_demand

        def look(self: Auto, view: View, state: MixState) -> Demand:
            found.append(view.steps)
            return real(self, view, state)

        patch.setattr(Auto, "_tree_demand", look)
        bench.run([[5, 6, 7]], method, params)
    return len(found)


def test_a_lower_back_off_looks_less_often() -> None:
    usual = looks(AutoConfig())
    assert looks(AutoConfig(backoff_after=4)) < 0.7 * usual
    assert looks(AutoConfig(backoff_after=4, backoff_interval=32)) < 0.5 * usual
    assert looks(AutoConfig(backoff_after=500)) > 2 * usual
