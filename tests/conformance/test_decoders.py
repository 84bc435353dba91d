"""Exactness on real arithmetic: tiny decoders, every backend, all exact methods."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from outstride import registry
from outstride.core.contracts import Method
from outstride.core.params import SamplingParams
from outstride.engine.engine import Engine
from outstride.engine.scheduler import Limits
from outstride.ops.contract import Ops
from outstride.ops.cpu import Cpu, native
from outstride.ops.reference import Reference
from outstride.ops.weights import ModelWeights
from tests.models.drive import random_decoder, tiny

registry.discover()

IMPLEMENTATIONS: dict[str, Callable[[ModelWeights], Ops]] = {"reference": Reference}
if native.library_path() is not None:
    IMPLEMENTATIONS["cpu"] = Cpu.of

SPECS = [
    "plain",
    "ngram",
    "draft:model=twin,length=4",
    "draft:model=cousin,length=3,width=3",
]


def engine(ops: str, pages: int, nodes: int) -> Engine:
    make = IMPLEMENTATIONS[ops]
    config = tiny(layers=2)
    models = {
        "target": random_decoder(config, pages=pages, make_ops=make),
        "twin": random_decoder(config, pages=pages, make_ops=make),
        "cousin": random_decoder(tiny(layers=1), pages=pages, make_ops=make),
    }
    return Engine(models, limits=Limits(nodes=nodes))


def run(
    on: Engine, prompts: list[list[int]], methods: list[Method], params: list[SamplingParams]
) -> list[list[int]]:
    sequences = [on.submit(p, q, m) for p, m, q in zip(prompts, methods, params, strict=True)]
    while on.busy:
        on.step()
        on.check_integrity()
    for sequence in sequences:
        assert sequence.error is None
    return [s.output for s in sequences]


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_any_batch(ops: str) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(97) for _ in range(rng.randrange(1, 70))] for _ in range(16)]
    kinds = [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5),
        SamplingParams(max_tokens=24, temperature=1.0, frequency_penalty=0.3, seed=6),
    ]
    params = [kinds[i % 3] for i in range(16)]
    plain = registry.build("plain")
    alone = engine(ops, 64, 256)
    expected = [run(alone, [p], [plain], [q])[0] for p, q in zip(prompts, params, strict=True)]
    for pages, nodes in ((200, 256), (40, 24)):
        methods = [registry.build(rng.choice(SPECS)) for _ in prompts]
        together = engine(ops, pages, nodes)
        assert run(together, prompts, methods, params) == expected
        assert together.ledger.total.accepted > 0
