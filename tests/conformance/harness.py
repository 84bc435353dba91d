"""Runs engines on the toy model and checks all KV after every step."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from outstride import registry
from outstride.core.contracts import CAUSAL, FULL, AttentionPattern, Exactness, MaskedSpec, Method
from outstride.core.params import SamplingParams
from outstride.core.sequence import Sequence
from outstride.engine.engine import Engine
from outstride.engine.ledger import SequenceProgress
from outstride.engine.scheduler import Limits
from outstride.models.toy import Toy
from outstride.policy.cost_model import CostModel
from outstride.policy.policy import DraftPolicy

registry.discover()

VOCABULARY = 24
MASK = VOCABULARY
BOTH = MaskedSpec(MASK, block=4, shifted=False, causal=True)
BLOCKS = MaskedSpec(MASK, block=4, shifted=True, causal=False)
CANVAS = MaskedSpec(MASK, block=None, shifted=False, causal=False)
END = 0
LETTERS = "#abcdefghijklmnopqrstuvwxyz"
PLAIN = registry.build("plain")


def to_text(tokens: Iterable[int]) -> str:
    """The toy's tokenizer: token 1 is a, 2 is b, …"""
    return "".join(LETTERS[t] for t in tokens)


def toy_method(drafter: Any, acceptor: Any, exactness: Exactness = Exactness.EXACT) -> Method:
    drafter.name = type(drafter).__name__
    acceptor.name = type(acceptor).__name__
    return Method(drafter.name, drafter, acceptor, exactness)


@dataclass
class Bench:
    """An engine on toys whose whole KV cache is checked after each step."""

    pages: int = 96
    nodes: int = 64
    sequences: int = 64
    vision: AttentionPattern = CAUSAL
    masking: MaskedSpec | None = BOTH
    draft_pages: int | None = None
    cost: Mapping[int, float] = field(default_factory=lambda: {1: 1.0, 64: 1.2})
    """The assumed cost of a pass: a measured curve would differ from run to run."""
    shake: int = 0
    """Every this many steps one sequence loses all its pages; 0: never."""
    adapters: Seq[str] = ()
    """LoRA adapters of the target."""
    steps: int = 0

    def __post_init__(self) -> None:
        self.target = Toy(
            pages=self.pages,
            attention_pattern=self.vision,
            masking=self.masking,
            adapters=self.adapters,
        )
        draft = Toy(accent=1, pages=self.draft_pages or self.pages)
        self.toys: dict[str, Toy] = {"target": self.target, "draft": draft}
        self.engine = Engine(
            self.toys,
            limits=Limits(nodes=self.nodes, sequences=self.sequences),
            end_tokens=[END],
            token_to_bytes=lambda token: LETTERS[token].encode(),
            policy=DraftPolicy(CostModel(self.cost, frozen=True)),
        )
        self.texts: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}

    def add_models(self, method: Method) -> None:
        """Adds the masked models that a method asks for: few need one, and checking them costs time."""
        for name in set(method.drafter.models) - set(self.toys):
            vision, masking = {"blocks": (AttentionPattern(4), BLOCKS), "canvas": (FULL, CANVAS)}[
                name
            ]
            size = self.draft_pages or self.pages
            self.toys[name] = Toy(accent=1, pages=size, attention_pattern=vision, masking=masking)
            self.engine.add_model(name, self.toys[name])

    def step(self) -> None:
        self.steps += 1
        assert self.steps < 20_000, "the engine does not finish"
        running = self.engine.running
        if self.shake and self.steps % self.shake == 0 and running:
            self.engine.preempt(running[self.steps % len(running)])
        self.engine.step(self._collect)
        self.engine.check_integrity()
        for sequence in self.engine.unfinished:
            known = {**dict(enumerate(sequence.tokens)), **sequence.canvas}
            for name, table in sequence.tables.items():
                vision = self.engine.attention_pattern(name, sequence.method.drafter)
                adapter = sequence.params.adapter if name == "target" else ""
                self.toys[name].check(table, known, vision.block, adapter)

    def _collect(self, finished: list[SequenceProgress]) -> None:
        for progress in finished:
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
            self.add_models(method)
        sequences = [
            self.engine.submit(list(p), q, m, **extra)
            for p, m, q in zip(prompts, method_of, params_of, strict=True)
        ]
        self.finish()
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
            assert self.tokens[sequence.id] == sequence.output, "tokens lost or doubled"
        return sequences


def alone(
    prompt: list[int], params: SamplingParams, method: Method = PLAIN, **bench: Any
) -> list[int]:
    """The text of a request that runs alone."""
    [sequence] = Bench(**bench).run([prompt], method, params)
    return sequence.output


_TEXTS: dict[str, list[int]] = {}


def yardstick(prompt: list[int], params: SamplingParams) -> list[int]:
    """The text of plain decoding alone: the reference of hundreds of tests, computed once.

    Not for tests that plant faults, because the faulty text would stay in the cache.
    """
    key = repr((prompt, params))
    if key not in _TEXTS:
        _TEXTS[key] = alone(prompt, params)
    return list(_TEXTS[key])


def some_prompts(seed: int, count: int, max_length: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(1, VOCABULARY) for _ in range(rng.randrange(1, max_length))]
        for _ in range(count)
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
    "min tokens": SamplingParams(max_tokens=50, min_tokens=30, temperature=0.5, seed=2),
}
"""Sampling parameters, one corner of the request contract at a time."""
