"""A draft head of any kind joins `mix` and `auto`."""

from __future__ import annotations

import pytest

from outstride import registry
from outstride.core.params import SamplingParams
from outstride.errors import MethodFailed, UnknownMethod
from outstride.policy.auto import Auto
from outstride.policy.mix import Mix, head_methods
from tests.conformance.harness import Bench, alone, some_prompts
from tests.policy.heads import head_of

PARAMS = SamplingParams(max_tokens=50, ignore_eos=True)
KINDS = ("block-drafter", "eagle", "heads")


def test_every_method_that_drafts_trees_with_a_head_can_join() -> None:
    assert set(KINDS) <= set(head_methods())
    assert not {"mix", "auto", "judge", "prompt-tokens"} & {e.name for e in head_methods().values()}


@pytest.mark.parametrize("method", ["mix:nodes=16", "auto:parts=suffix"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_the_head_decides_who_drafts_with_it(method: str, kind: str) -> None:
    bench, prompts = Bench(pages=400, nodes=512), some_prompts(6, 4)
    spec = f"{method},from={head_of(bench.target, kind)}"
    found = bench.run(prompts, registry.build(spec), PARAMS)
    assert [s.output for s in found] == [alone(p, PARAMS) for p in prompts]
    assert any(kind in source for s in found for source in s.counts.sources)
    assert sum(s.counts.other_passes for s in found) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_may_name_the_method_of_the_head(kind: str) -> None:
    bench, prompts = Bench(pages=400, nodes=512), some_prompts(6, 2)
    name = head_of(bench.target, kind)
    found = bench.run(prompts, registry.build(f"mix:parts=suffix+{kind},from={name}"), PARAMS)
    assert [s.output for s in found] == [alone(p, PARAMS) for p in prompts]
    assert any(kind in source for s in found for source in s.counts.sources)


def test_options_of_a_part_reach_its_drafter() -> None:
    bench, prompts = Bench(pages=400, nodes=512), some_prompts(6, 2)
    name, passes = head_of(bench.target, "eagle"), []
    for depth in (1, 4):
        method = registry.build(f"mix:parts=suffix+eagle:depth={depth},from={name}")
        found = bench.run(prompts, method, PARAMS)
        passes.append(sum(s.counts.other_passes / s.counts.passes for s in found))
    assert passes[1] > 2 * passes[0]


def test_a_head_of_another_kind_than_the_part_is_refused() -> None:
    bench = Bench()
    method = registry.build(f"mix:parts=suffix+eagle,from={head_of(bench.target, 'heads')}")
    with pytest.raises(MethodFailed, match="'eagle'"):
        bench.run([[5]], method, PARAMS)


@pytest.mark.parametrize("options", ["parts=suffix+eagle", "parts=eagle+heads,from=x"])
def test_a_part_needs_its_own_head(options: str) -> None:
    with pytest.raises(UnknownMethod, match="draft head"):
        registry.build(f"mix:{options}")


def test_a_head_alone_is_no_mix() -> None:
    with pytest.raises(UnknownMethod, match="looks drafts up"):
        registry.build("mix:parts=eagle,from=x")


@pytest.mark.parametrize("drafter", [Auto, Mix])
def test_kinds_that_are_accepted(drafter: type[Mix]) -> None:
    assert drafter.head_kinds({})[0] == "block-drafter"
    assert set(KINDS) <= set(drafter.head_kinds({"parts": "suffix+recycle"}))
    assert drafter.head_kinds({"parts": "suffix+eagle:depth=2"}) == ("eagle",)
