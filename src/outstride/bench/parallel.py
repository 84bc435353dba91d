"""`outstride bench parallel`: what parallel decoding of masked models gains and costs, task by task.

The tasks of `models.shipped.lists` range from answers with independent tokens to answers in which
each token depends on all others. For each task and policy this measures how many answers are correct
and how many passes they took. A canvas is as long as its answer plus one end-of-text token, so no
policy gains or loses by empty space.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

from outstride import registry
from outstride.bench import clock
from outstride.core.contracts import Exactness
from outstride.core.params import SamplingParams
from outstride.errors import InvalidParams, RequestError
from outstride.models.shipped.lists import TASKS, Case, cases
from outstride.results import Stats

if TYPE_CHECKING:
    from outstride.llm import LLM

BASELINE = "steps"
"""One token per pass: the baseline."""
POLICIES = (
    "verify",
    "verify:order=random",
    "verify:order=confidence",
    "steps:count=2",
    "steps:count=4",
    "threshold:threshold=0.7",
    "threshold",
    "threshold:threshold=0.98",
    "factor",
    "factor:factor=0.5",
    "entropy-bound",
    "entropy-bound:bound=0.5",
    "dilated",
    "leap",
    "credit",
    "gap",
    "adaptive-block",
    "refine",
    "pipeline",
)
"""Policies that are compared by default."""
LOSS = 1.0
"""Points of mean exact match that the best lossy policy may lose."""


@dataclass(slots=True)
class PolicyLine:
    """One policy on one task."""

    policy: str
    task: str
    cases: int = 0
    right: int = 0
    equal: int = 0
    """Number of answers that equal those of the policy's reference, token for token."""
    emitted: int = 0
    passes: int = 0
    nodes: int = 0
    seconds: float = 0.0

    @property
    def match(self) -> float:
        """Correct answers in percent."""
        return 100 * self.right / max(1, self.cases)

    @property
    def tokens_per_pass(self) -> float:
        return self.emitted / max(1, self.passes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"match": self.match, "tokens_per_pass": self.tokens_per_pass}


@dataclass(frozen=True, slots=True)
class PolicyTotal:
    """One policy on all tasks: means over tasks, and sums."""

    policy: str
    exactness: str
    match: float
    tokens_per_pass: float
    equal: int
    cases: int
    passes: int
    nodes: int
    seconds: float
    reference: str
    """What the policy is compared with: the baseline, or the schedule that it is exact to."""
    fewer: float
    """Passes of the reference divided by passes of the policy."""
    loss: float
    """Points of mean exact match below the reference."""


@dataclass(slots=True)
class ParallelReport:
    """All lines, the baseline's first."""

    policies: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    lines: dict[tuple[str, str], PolicyLine] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Policies that the model cannot run, with the reason."""

    def of(self, policy: str) -> list[PolicyLine]:
        return [self.lines[policy, task] for task in self.measured]

    @property
    def measured(self) -> list[str]:
        """Tasks that every policy has answered; an interrupted run lacks some."""
        return [
            task
            for task in self.tasks
            if self.lines and all(self.lines[policy, task].cases for policy in self.policies)
        ]

    def totals(self) -> list[PolicyTotal]:
        """Totals by policy, in the order of measuring."""
        found = []
        for policy in self.policies:
            mine, base = self.of(policy), self.of(reference_of(policy))
            passes = sum(line.passes for line in mine)
            match = mean(line.match for line in mine)
            found.append(
                PolicyTotal(
                    policy=policy,
                    exactness=exactness_of(policy),
                    match=match,
                    tokens_per_pass=mean(line.tokens_per_pass for line in mine),
                    equal=sum(line.equal for line in mine),
                    cases=sum(line.cases for line in mine),
                    passes=passes,
                    nodes=sum(line.nodes for line in mine),
                    seconds=sum(line.seconds for line in mine),
                    reference=reference_of(policy),
                    fewer=sum(line.passes for line in base) / max(1, passes),
                    loss=mean(line.match for line in base) - match,
                )
            )
        return found

    def samples(self) -> list[dict[str, Any]]:
        return [line.to_dict() for line in self.lines.values() if line.cases]

    def summary(self) -> dict[str, Any]:
        """The baseline by task, all policies, and the best lossy policy."""
        if not self.measured:
            return {"skipped": self.skipped}
        totals = self.totals()
        lossy = [t for t in totals if t.exactness == Exactness.LOSSY.value and t.loss <= LOSS]
        best = max(lossy, key=lambda total: total.fewer, default=None)
        return {
            "baseline": {line.task: round(line.match, 2) for line in self.of(BASELINE)},
            "policies": [asdict(total) for total in totals],
            "best lossy": None if best is None else asdict(best),
            "skipped": self.skipped,
        }


def exactness_of(policy: str) -> str:
    """The exactness that a policy's method declares; `steps` with several tokens per step is lossy."""
    entry, options = registry.parse(policy)
    if entry.name == BASELINE and options.get("count", 1) != 1:
        return Exactness.LOSSY.value
    return str(entry.exactness.value)


def reference_of(policy: str) -> str:
    """The policy that a policy is compared with."""
    entry, _ = registry.parse(policy)
    baseline = registry.baseline(policy)
    exact = entry.name != BASELINE and entry.exactness is Exactness.EXACT
    return baseline if exact and registry.parse(baseline)[0].name == BASELINE else BASELINE


def measure(
    llm: LLM,
    policies: Sequence[str] = POLICIES,
    *,
    tasks: Sequence[str] = tuple(TASKS),
    limit: int = 20,
    batch: int = 1,
    report: ParallelReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ParallelReport:
    """Answers `limit` questions of each task by each policy, in turns, `batch` at a time."""
    if limit < 1 or batch < 1:
        raise InvalidParams("limit and batch must be at least 1")
    if unknown := [task for task in tasks if task not in TASKS]:
        raise InvalidParams(f"there is no task {unknown[0]!r}; tasks are {', '.join(TASKS)}")
    pairs = [(reference_of(policy), policy) for policy in policies]
    wanted = list(dict.fromkeys([BASELINE, *(policy for pair in pairs for policy in pair)]))
    report = ParallelReport() if report is None else report
    report.tasks = list(tasks)
    asked = {task: cases(task, limit) for task in tasks}
    first = asked[tasks[0]][0]
    for policy in wanted:  # compiles what there is to compile, and finds out what cannot be done
        try:
            _answer(llm, policy, [first])
        except RequestError as error:
            if policy in {reference for reference, _ in pairs}:
                raise
            report.skipped[policy] = str(error)
        else:
            report.policies.append(policy)
    report.lines = {(p, task): PolicyLine(p, task) for p in report.policies for task in tasks}
    done, total = 0, sum(-(-len(asked[task]) // batch) for task in tasks) * len(report.policies)
    for task in tasks:
        for start in range(0, len(asked[task]), batch):
            portion = asked[task][start : start + batch]
            tokens: dict[str, list[list[int]]] = {}
            for policy in report.policies:
                tokens[policy] = _enter(llm, report.lines[policy, task], portion)
                same = zip(tokens[policy], tokens[reference_of(policy)], strict=True)
                report.lines[policy, task].equal += sum(a == b for a, b in same)
                done += 1
                if progress is not None:
                    progress(done, total)
    return report


def _enter(llm: LLM, line: PolicyLine, portion: Sequence[Case]) -> list[list[int]]:
    """Answers a batch, counts it, and returns the answers' tokens."""
    start = clock.now()
    texts, tokens, stats = _answer(llm, line.policy, portion)
    line.seconds += clock.now() - start
    line.cases += len(portion)
    line.right += sum(case.accepts(text) for case, text in zip(portion, texts, strict=True))
    line.emitted += stats.emitted
    line.passes += stats.passes
    line.nodes += stats.nodes
    return tokens


def _answer(
    llm: LLM, policy: str, portion: Sequence[Case]
) -> tuple[list[str], list[list[int]], Stats]:
    """Texts, tokens and stats of the answers to a batch."""
    params = [SamplingParams(max_tokens=len(case.answer.split()) + 1, seed=0) for case in portion]
    results = llm.generate([case.prompt for case in portion], params, method=policy, salt=policy)
    for result in results:
        if result.error is not None:
            raise result.error
    outputs = [result.outputs[0] for result in results]
    texts = [" ".join(output.text.split()) for output in outputs]
    return texts, [output.token_ids for output in outputs], Stats.total(outputs)
