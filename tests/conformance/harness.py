"""Runs engines on the toy model and looks at every cache entry after every step."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outstride import registry
from outstride.core.contracts import CAUSAL, FULL, Exactness, Masking, Method, Vision
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence
from outstride.engine.cost import Cost
from outstride.engine.engine import Engine
from outstride.engine.ledger import Progress
from outstride.engine.scheduler import Limits
from outstride.models.toy import Toy

registry.discover()

VOCABULARY = 24
MASK = VOCABULARY
BOTH = Masking(MASK, block=4, shifted=False, causal=True)
BLOCKS = Masking(MASK, block=4, shifted=True, causal=False)
CANVAS = Masking(MASK, block=None, shifted=False, causal=False)
END = 0
LETTERS = "#abcdefghijklmnopqrstuvwxyz"
PLAIN = registry.build("plain")


def spell(tokens: Iterable[int]) -> str:
    """The toy's tokenizer: token 1 is a, 2 is b, …"""
    return "".join(LETTERS[t] for t in tokens)


def toy_method(drafter: Any, acceptor: Any, exactness: Exactness = Exactness.EXACT) -> Method:
    drafter.name = type(drafter).__name__
    acceptor.name = type(acceptor).__name__
    return Method(drafter.name, drafter, acceptor, exactness)


@dataclass
class Bench:
    """An engine on toys, checked to the last entry after each step."""

    pages: int = 96
    nodes: int = 64
    sequences: int = 64
    vision: Vision = CAUSAL
    masking: Masking | None = BOTH
    draft_pages: int | None = None
    cost: Mapping[int, float] = field(default_factory=lambda: {1: 1.0, 64: 1.2})
    """What a pass is said to cost: a curve that is measured would differ from run to run."""
    shake: int = 0
    """After how many steps somebody loses all pages, again and again; 0: never."""
    steps: int = 0

    def __post_init__(self) -> None:
        self.target = Toy(pages=self.pages, vision=self.vision, masking=self.masking)
        draft = Toy(accent=1, pages=self.draft_pages or self.pages)
        self.toys: dict[str, Toy] = {"target": self.target, "draft": draft}
        self.engine = Engine(
            self.toys,
            limits=Limits(nodes=self.nodes, sequences=self.sequences),
            end_tokens=[END],
            spell=lambda token: LETTERS[token].encode(),
            cost=Cost(self.cost, frozen=True),
        )
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}

    def invite(self, method: Method) -> None:
        """Brings in a masked model that a method asks for: most need none, and checks cost time."""
        for name in set(method.drafter.models) - set(self.toys):
            vision, masking = {"blocks": (Vision(4), BLOCKS), "canvas": (FULL, CANVAS)}[name]
            size = self.draft_pages or self.pages
            self.toys[name] = Toy(accent=1, pages=size, vision=vision, masking=masking)
            self.engine.passes.add(name, self.toys[name])

    def step(self) -> None:
        self.steps += 1
        assert self.steps < 20_000, "the engine does not come to an end"
        running = self.engine.scheduler.running
        if self.shake and self.steps % self.shake == 0 and running:
            self.engine.scheduler.preempt(running[self.steps % len(running)])
        self.engine.step(self._hear)
        self.engine.check_integrity()
        for sequence in self.engine.scheduler:
            known = {**dict(enumerate(sequence.tokens)), **sequence.canvas}
            for name, table in sequence.tables.items():
                vision = self.engine.passes.vision(name, sequence.method.drafter)
                self.toys[name].check(table, known, vision.block)

    def _hear(self, news: list[Progress]) -> None:
        for progress in news:
            key = progress.sequence.id
            self.texts[key] = self.texts.get(key, "") + progress.text
            self.tokens[key] = self.tokens.get(key, []) + progress.tokens

    def finish(self) -> None:
        while self.engine.busy:
            self.step()

    def run(
        self,
        prompts: Seq[list[int]],
        methods: Method | Seq[Method],
        params: SamplingParams | Seq[SamplingParams],
        **extra: Any,
    ) -> list[Sequence]:
        count = len(prompts)
        method_of = [methods] * count if isinstance(methods, Method) else methods
        params_of = [params] * count if isinstance(params, SamplingParams) else params
        for method in method_of:
            self.invite(method)
        sequences = [
            self.engine.submit(list(p), q, m, **extra)
            for p, m, q in zip(prompts, method_of, params_of, strict=True)
        ]
        self.finish()
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
            assert self.tokens[sequence.id] == sequence.output, "tokens lost or doubled on the way"
        return sequences


def alone(
    prompt: list[int], params: SamplingParams, method: Method = PLAIN, **bench: Any
) -> list[int]:
    """What a request says with nobody else there."""
    [sequence] = Bench(**bench).run([prompt], method, params)
    return sequence.output


_SAID: dict[str, list[int]] = {}


def yardstick(prompt: list[int], params: SamplingParams) -> list[int]:
    """What plain decoding says alone: the measure of hundreds of tests, computed once.

    Not for tests that plant faults, which would stay in it.
    """
    key = repr((prompt, params))
    if key not in _SAID:
        _SAID[key] = alone(prompt, params)
    return list(_SAID[key])


def some_prompts(seed: int, count: int, most: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, most))] for _ in range(count)
    ]


SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=0.8, seed=11),
    "filtered": SamplingParams(
        max_tokens=40, temperature=1.3, top_k=8, top_p=0.9, min_p=0.02, seed=5
    ),
    "penalties": SamplingParams(
        max_tokens=40,
        temperature=0.7,
        seed=3,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
    ),
    "biased": SamplingParams(max_tokens=40, logit_bias={3: 2.0, 5: -100.0, 7: 1.0}),
    "stopped": SamplingParams(max_tokens=60, stop=("ab", "c", "fed"), min_tokens=3),
    "stop tokens": SamplingParams(max_tokens=60, stop_token_ids=(4, 9), temperature=0.9, seed=8),
    "endless": SamplingParams(max_tokens=50, ignore_eos=True),
    "patient": SamplingParams(max_tokens=50, min_tokens=30, temperature=0.5, seed=2),
}
"""The request contract, one corner at a time."""
