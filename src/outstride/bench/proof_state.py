"""The state of a proof while it runs: the method under test, its reference, prompts and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from outstride import registry
from outstride.bench.proof import ProofReport
from outstride.core.contracts import Exactness, Method
from outstride.core.params import SamplingParams
from outstride.errors import OutstrideError, UnknownMethod
from outstride.llm import LLM
from outstride.results import Result

PLAIN = "plain"


@dataclass(slots=True)
class ProofRun:
    """A proof while it runs."""

    llm: LLM
    judged: Method
    plain: Method
    tokens: list[list[int]]
    params: SamplingParams
    report: ProofReport
    progress: Callable[[int, int], None] | None = None
    total: int = 0
    done: int = 0
    references: dict[int, Result] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return self.judged.exactness is Exactness.EXACT

    def tick(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)

    def answers(
        self, prompts: Sequence[list[int]], methods: Sequence[Method], salt: str, *, bits: bool
    ) -> list[Result]:
        """One result per prompt; an error stays with its prompt, also where there is only one
        prompt.
        """
        params = replace(self.params, logprobs=0) if bits else self.params
        try:
            return self.llm.generate(prompts, params, method=list(methods), salt=salt)
        except OutstrideError as error:
            if len(prompts) != 1:
                raise
            return [Result(list(prompts[0]), error=error)]


def baseline_of(judged: Method) -> str:
    """The baseline of a method; plain decoding for one that is not registered."""
    try:
        return registry.baseline(judged.spec or judged.name)
    except UnknownMethod:
        return PLAIN


def batches(count: int, size: int) -> Iterator[range]:
    for start in range(0, count, size):
        yield range(start, min(start + size, count))
