"""Compares all engines that are installed, in one run: the same prompts, token counts and answer
lengths.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from outstride.bench import clock
from outstride.bench.harness import ProgressCounter
from outstride.bench.peers import llama_cpp, subprocess_peer, transformers
from outstride.bench.peers.ours import OutstridePeer
from outstride.bench.peers.peer import Peer, PeerSetup
from outstride.errors import InvalidParams, OutstrideError

if TYPE_CHECKING:
    from outstride.bench.prompts import BenchPrompt
    from outstride.llm import LLM

PEERS: dict[str, Callable[[PeerSetup], Sequence[Peer]]] = {
    "llama.cpp": llama_cpp.open_all,
    "transformers": transformers.open_all,
    "vllm": subprocess_peer.opener("vllm", "vllm", folder=True),
    "openvino": subprocess_peer.opener("openvino", "openvino_genai"),
}
NODES = (1, 2, 4, 8, 16, 32, 64)
WARM = 4
"""Tokens of an answer that is not timed."""
SETTLE = 0.02
"""Seconds before a turn, in which the previous engine's threads stop spinning."""


Portions = dict[tuple[str, ...], list[dict[str, Any]]]
"""One sample per round, by the prompts that were answered in one batch."""


def _seconds(runs: Portions, of: Iterable[tuple[str, ...]]) -> float:
    """Total seconds of some batches.

    Of several rounds, each batch counts with its median: a slow moment of the machine spoils one
    round of one engine, and no figure.
    """
    return sum(median(float(run["seconds"]) for run in runs[portion]) for portion in of)


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """What is run, and how often."""

    output: int = 64
    batches: tuple[int, ...] = (1, 8)
    nodes: tuple[int, ...] = NODES
    cached: int = 128
    rounds: int = 1
    passes: int = 7


@dataclass(slots=True)
class EngineComparisonReport:
    """All samples, the engines with their settings, and those left out with the reason."""

    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    found: list[dict[str, Any]] = field(default_factory=list)

    def samples(self) -> list[dict[str, Any]]:
        return self.found

    def _portions(self) -> dict[tuple[str, int], Portions]:
        """Samples by peer and batch size, then by the prompts of a batch."""
        found: dict[tuple[str, int], Portions] = {}
        for sample in self.found:
            if sample["what"] == "answer":
                mine = found.setdefault((sample["peer"], sample["batch"]), {})
                mine.setdefault(tuple(sample["prompts"]), []).append(sample)
        return found

    def rates(self) -> dict[str, dict[str, float]]:
        """Tokens per second by peer and batch size, prompts included."""
        found: dict[str, dict[str, float]] = {}
        portions = self._portions()
        for name in self.settings:
            for (peer, batch), mine in portions.items():
                if peer == name:
                    tokens = sum(runs[0]["tokens"] for runs in mine.values())
                    found.setdefault(name, {})[str(batch)] = round(tokens / _seconds(mine, mine), 3)
        return found

    def against(self) -> dict[str, dict[str, float]]:
        """Speed-up of the first peer over each other one, on the prompts that both answered."""
        first, found = next(iter(self.settings), ""), dict[str, dict[str, float]]()
        portions = self._portions()
        for (name, batch), mine in portions.items():
            ours = portions.get((first, batch), {})
            if name != first and (both := mine.keys() & ours.keys()):
                ratio = _seconds(mine, both) / _seconds(ours, both)
                found.setdefault(name, {})[str(batch)] = round(ratio, 4)
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
        """Rates, passes, and speed-ups of the first of our own peers."""
        return {
            "tokens_per_second": self.rates(),
            "milliseconds": self.passes(),
            "first_against": self.against(),
            "settings": self.settings,
            "skipped": self.skipped,
        }


def compare_engines(
    llm: LLM,
    setup: PeerSetup,
    methods: Sequence[str],
    names: Sequence[str],
    prompts: Sequence[BenchPrompt],
    plan: ComparisonPlan,
    *,
    report: EngineComparisonReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EngineComparisonReport:
    """Opens every peer that is installed and runs all of them in turns."""
    if not methods or not prompts or min(plan.output, plan.rounds, *plan.batches) < 1:
        raise InvalidParams("needs methods and prompts, and numbers of at least 1")
    report = EngineComparisonReport() if report is None else report
    given = [(prompt.id, llm.encode(prompt.text, chat=True)) for prompt in prompts]
    with ExitStack() as stack:
        peers: list[Peer] = [OutstridePeer(llm, method, setup.threads) for method in methods]
        for name in names:
            try:
                opened = PEERS[name](setup)
            except OutstrideError as error:
                report.skipped[name] = str(error)
                continue
            for peer in opened:
                stack.callback(peer.close)
                peers.append(peer)
        peers = _warm(peers, given[0][1], report)
        report.settings |= {peer.name: peer.settings for peer in peers}
        _run(peers, given, plan, report, ProgressCounter(progress))
    return report


def _run(
    peers: Sequence[Peer],
    given: Sequence[tuple[str, list[int]]],
    plan: ComparisonPlan,
    report: EngineComparisonReport,
    counter: ProgressCounter,
) -> None:
    cases = {
        (peer.name, nodes): case
        for nodes in plan.nodes
        for peer in peers
        if (case := peer.once(nodes, plan.cached)) is not None
        and (
            not isinstance(peer, OutstridePeer) or peer is peers[0]
        )  # methods do not change passes
    }
    portions = [
        (batch, given[i : i + batch])
        for batch in plan.batches
        for i in range(0, len(given) - batch + 1, batch)
    ]
    turns = [
        (peer, batch, portion)
        for _ in range(plan.rounds)
        for batch, portion in portions
        for peer in peers
        if peer.fits(batch)
    ]
    counter.expected = len(cases) * (plan.passes + 1) + len(turns)
    for turn in range(plan.passes + 1):
        for (name, nodes), case in cases.items():
            with case() as call:
                seconds = clock.timed(call)
            if turn:
                report.found.append(
                    {"what": "pass", "peer": name, "nodes": nodes, "seconds": round(seconds, 7)}
                )
            counter.advance()
    for peer, batch, portion in turns:
        if peer.name not in report.skipped:
            _turn(peer, batch, portion, plan.output, report)
        counter.advance()


def _warm(peers: Sequence[Peer], prompt: list[int], report: EngineComparisonReport) -> list[Peer]:
    """The peers that answer at all; errors of the others are recorded."""
    found = []
    for peer in peers:
        try:
            peer.generate([prompt], WARM)
        except OutstrideError as error:
            if isinstance(peer, OutstridePeer):
                raise
            report.skipped[peer.name] = str(error)
        else:
            found.append(peer)
    return found


def _turn(
    peer: Peer,
    batch: int,
    portion: Sequence[tuple[str, list[int]]],
    output: int,
    report: EngineComparisonReport,
) -> None:
    """One batch by one engine. An engine that fails is left out from then on; the others continue."""
    prompts = [tokens for _, tokens in portion]
    time.sleep(SETTLE)
    start = clock.now()
    try:
        answers = peer.generate(prompts, output)
    except OutstrideError as error:
        if isinstance(peer, OutstridePeer):
            raise
        report.skipped[peer.name] = str(error)
        return
    seconds = clock.now() - start
    if [len(tokens) for tokens in answers] != [output] * len(prompts):
        raise OutstrideError(f"{peer.name} gave an answer of another length than requested")
    report.found.append(
        {
            "what": "answer",
            "peer": peer.name,
            "batch": batch,
            "prompts": [name for name, _ in portion],
            "prompt_tokens": sum(map(len, prompts)),
            "tokens": output * len(prompts),
            "seconds": round(seconds, 6),
        }
    )
