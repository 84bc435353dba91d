"""How often one step leaves one package of the project for another.

A crossing is a place in the code at which a function of one package calls a function of another: a
reader follows it once, however often a loop repeats it. Not counted are properties and special methods
such as `__len__`, which read a value, and the generated constructors of data classes. A generator that
is resumed at the same place counts once, like any call. Frames of other libraries in between are
skipped: a call through `map` or numpy counts as one of its caller.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import outstride
from outstride import registry
from outstride.core.contracts import Model
from outstride.core.params import SamplingParams
from outstride.core.proposal import TARGET
from outstride.engine.engine import Engine
from outstride.models.toy import Toy
from outstride.ops.cpu import Cpu, native
from outstride.policy.cost_model import CostModel
from outstride.policy.policy import DraftPolicy
from tests.conformance.masked import KINDS
from tests.models.drive import random_decoder, tiny
from tests.policy.heads import head_of

ROOT = str(Path(outstride.__file__).parent) + "/"
registry.discover()


def package_of(code: CodeType) -> str | None:
    """The top-level package of a function of this project."""
    if not code.co_filename.startswith(ROOT):
        return None
    return code.co_filename.removeprefix(ROOT).split("/")[0].removesuffix(".py")


def property_codes() -> set[CodeType]:
    """The functions behind all properties that are loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("outstride")]
    classes = [cls for module in modules for cls in vars(module).values() if isinstance(cls, type)]
    found = [value for cls in classes for value in vars(cls).values()]
    return {item.fget.__code__ for item in found if isinstance(item, property) and item.fget}


def crossings(engine: Engine) -> set[tuple[str, str, str, str]]:
    """Caller's package and function, and callee's package and function, of one step."""
    found, ignored = set[tuple[str, str, str, str]](), property_codes()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        callee = package_of(code) if event == "call" else None
        if callee is None or code in ignored or code.co_name.startswith("__"):
            return
        above = frame.f_back
        if above is not None and above.f_code.co_filename == "<string>":
            return  # a generated constructor fills in a default value
        while above is not None and package_of(above.f_code) is None:
            above = above.f_back
        if above is None or (caller := package_of(above.f_code)) in (None, callee):
            return
        found.add((str(caller), above.f_code.co_qualname, callee, code.co_qualname))

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return found


def steady(model: Model, spec: str, steps: int) -> Engine:
    """An engine in the middle of one answer."""
    policy = DraftPolicy(CostModel({1: 1.0, 64: 1.2}, frozen=True))
    engine = Engine({TARGET: model}, policy=policy)
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    engine.submit([1, 2, 3, 4] * 6, params, registry.build(spec))
    for _ in range(steps):
        engine.step()
    return engine


def decoder() -> Model:
    """A model on the CPU kernels, where they are built; on the reference otherwise."""
    if native.library_path() is None:
        pytest.skip("the CPU kernels are not built")
    config = tiny(layers=3, tied=True)
    return random_decoder(config, pages=64, rounded=True, make_ops=Cpu.of)


@pytest.mark.parametrize("make", [lambda: Toy(pages=200), decoder])
def test_a_step_of_auto_crosses_packages_at_most_40_times(make: Any) -> None:
    found = crossings(steady(make(), "auto", 20))
    assert len(found) <= 40
    assert {crossing[2] for crossing in found} >= {"policy", "draft", "accept", "cache", "models"}


def test_a_step_of_auto_with_a_draft_head_crosses_packages_at_most_40_times() -> None:
    toy = Toy(pages=200)
    engine, sizes = steady(toy, f"auto:from={head_of(toy, 'block-drafter')}", 10), []
    for _ in range(10):
        before = engine.gauges().totals.other_passes
        found = crossings(engine)
        if engine.gauges().totals.other_passes > before:
            sizes.append(len(found))
    assert sizes
    assert max(sizes) <= 40


def test_a_step_of_threshold_crosses_packages_at_most_20_times() -> None:
    toy = Toy(
        pages=200, attention_pattern=KINDS["blocks"]["vision"], masking=KINDS["blocks"]["masking"]
    )
    found = crossings(steady(toy, "threshold", 6))
    assert len(found) <= 20


def test_the_engine_reaches_the_policy_in_few_places() -> None:
    found = crossings(steady(Toy(pages=200), "auto", 20))
    reached = {
        callee for caller, _, package, callee in found if (caller, package) == ("engine", "policy")
    }
    assert reached == {
        "Auto.demand",
        "Auto.propose",
        "Auto.observe",
        "DraftPolicy.grants",
        "DraftPolicy.observe_step",
    }
