"""All engines that are here, in one run: the same prompts, token counts and answer lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from outstride.bench import clock
from outstride.bench.harness import Watch
from outstride.bench.peers import llama_cpp, openvino, transformers, vllm
from outstride.bench.peers.ours import Ours
from outstride.bench.peers.peer import Ground, Peer
from outstride.errors import InvalidParams, OutstrideError

if TYPE_CHECKING:
    from outstride.bench.prompts import BenchPrompt
    from outstride.llm import LLM

PEERS: dict[str, Callable[[Ground], Sequence[Peer]]] = {
    "llama.cpp": llama_cpp.open_all,
    "transformers": transformers.open_all,
    "vllm": vllm.open_all,
    "openvino": openvino.open_all,
}
NODES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Course:
    """How much is run."""

    output: int = 64
    batches: tuple[int, ...] = (1, 8)
    nodes: tuple[int, ...] = NODES
    cached: int = 128
    rounds: int = 1
    passes: int = 7


@dataclass(slots=True)
class RaceReport:
    """All samples, who took part and how it was set up, and who did not and why."""

    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    found: list[dict[str, Any]] = field(default_factory=list)

    def samples(self) -> list[dict[str, Any]]:
        return self.found

    def rates(self) -> dict[str, dict[str, float]]:
        """Tokens per second by peer and batch size, prompts included."""
        found: dict[str, dict[str, float]] = {}
        answers = [sample for sample in self.found if sample["what"] == "answer"]
        for name in self.settings:
            for batch in dict.fromkeys(sample["batch"] for sample in answers):
                mine = [s for s in answers if (s["peer"], s["batch"]) == (name, batch)]
                if mine:
                    rate = sum(s["tokens"] for s in mine) / sum(s["seconds"] for s in mine)
                    found.setdefault(name, {})[str(batch)] = round(rate, 3)
        return found

    def passes(self) -> dict[str, dict[str, float]]:
        """Milliseconds of a pass by peer and nodes."""
        found: dict[str, dict[str, float]] = {}
        times: dict[tuple[str, int], list[float]] = {}
        for sample in self.found:
            if sample["what"] == "pass":
                times.setdefault((sample["peer"], sample["nodes"]), []).append(sample["seconds"])
        for (name, nodes), seconds in times.items():
            found.setdefault(name, {})[str(nodes)] = round(median(seconds) * 1e3, 4)
        return found

    def summary(self) -> dict[str, Any]:
        """Rates, passes, and both against the first of our own entries."""
        rates, passes = self.rates(), self.passes()
        first = next(iter(self.settings), "")
        against = {
            name: {
                batch: round(rates[first][batch] / rate, 4)
                for batch, rate in mine.items()
                if batch in rates.get(first, {})
            }
            for name, mine in rates.items()
            if name != first
        }
        return {
            "tokens_per_second": rates,
            "milliseconds": passes,
            "first_against": against,
            "settings": self.settings,
            "skipped": self.skipped,
        }


def race(
    llm: LLM,
    ground: Ground,
    methods: Sequence[str],
    names: Sequence[str],
    prompts: Sequence[BenchPrompt],
    course: Course,
    *,
    report: RaceReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> RaceReport:
    """Opens every peer that is here and runs all of them in turns."""
    if not methods or not prompts or min(course.output, course.rounds, *course.batches) < 1:
        raise InvalidParams("needs methods, prompts, and numbers from 1 on")
    report = RaceReport() if report is None else report
    given = [(prompt.id, llm.encode(prompt.text, chat=True)) for prompt in prompts]
    with ExitStack() as stack:
        peers: list[Peer] = [Ours(llm, method, ground.threads) for method in methods]
        for name in names:
            try:
                opened = PEERS[name](ground)
            except OutstrideError as error:
                report.skipped[name] = str(error)
                continue
            for peer in opened:
                stack.callback(peer.close)
                peers.append(peer)
        report.settings |= {peer.name: peer.settings for peer in peers}
        _run(peers, given, course, report, Watch(progress))
    return report


def _run(
    peers: Sequence[Peer],
    given: Sequence[tuple[str, list[int]]],
    course: Course,
    report: RaceReport,
    watch: Watch,
) -> None:
    cases = {
        (peer.name, nodes): case
        for nodes in course.nodes
        for peer in peers
        if (case := peer.once(nodes, course.cached)) is not None
        and (not isinstance(peer, Ours) or peer is peers[0])  # methods do not change passes
    }
    portions = [
        (batch, given[i : i + batch])
        for batch in course.batches
        for i in range(0, len(given) - batch + 1, batch)
    ]
    turns = [
        (peer, batch, portion)
        for _ in range(course.rounds)
        for batch, portion in portions
        for peer in peers
        if peer.fits(batch)
    ]
    watch.expected = len(cases) * (course.passes + 1) + len(turns) + len(peers)
    for turn in range(course.passes + 1):
        for (name, nodes), case in cases.items():
            with case() as call:
                seconds = clock.timed(call)
            if turn:
                report.found.append(
                    {"what": "pass", "peer": name, "nodes": nodes, "seconds": round(seconds, 7)}
                )
            watch.tick()
    for peer in peers:
        peer.generate([given[0][1]], 4)
        watch.tick()
    for peer, batch, portion in turns:
        prompts = [tokens for _, tokens in portion]
        start = clock.now()
        said = peer.generate(prompts, course.output)
        seconds = clock.now() - start
        if [len(tokens) for tokens in said] != [course.output] * len(prompts):
            raise OutstrideError(f"{peer.name} gave an answer of another length than was asked for")
        report.found.append(
            {
                "what": "answer",
                "peer": peer.name,
                "batch": batch,
                "prompts": [name for name, _ in portion],
                "prompt_tokens": sum(map(len, prompts)),
                "tokens": course.output * len(prompts),
                "seconds": round(seconds, 6),
            }
        )
        watch.tick()
