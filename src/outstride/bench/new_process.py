"""New processes: how long a model takes to load, how much memory that takes, and whether the first
answer waits for anything.

Each figure comes from a process of its own. The first one finds an empty cache folder, so it converts
the weights and has no cost curve; the later ones find both on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from outstride.bench import clock
from outstride.bench.comparison_rows import Bound, PeerReport, Row
from outstride.bench.harness import ProgressCounter
from outstride.errors import OutstrideError

PROMPT = "Write a short story about a lighthouse keeper and a storm."
SAMPLED = 0.005
"""Seconds between two looks at the memory of a process that loads a model."""
Ask = Callable[[Path], dict[str, Any]]
"""Runs a process with a cache folder; returns what `main` prints."""


@dataclass(frozen=True, slots=True)
class NewProcess:
    """What a new process does."""

    path: Path
    weights: str = "auto"
    method: str = "auto"
    output: int = 64

    def ask(self, cache: Path) -> dict[str, Any]:
        """Runs it with a folder for converted weights and cost curves."""
        values = (self.path, self.weights, self.method, self.output)
        ran = subprocess.run(
            [sys.executable, "-m", "outstride.bench.new_process", *map(str, values)],
            capture_output=True,
            text=True,
            env={**os.environ, "OUTSTRIDE_CACHE": str(cache)},
            check=False,
        )
        if ran.returncode:
            last = ran.stderr.strip().splitlines()[-1:]
            raise OutstrideError(f"a new process ended with {ran.returncode}: {' '.join(last)}")
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return found


def measure(
    ask: Ask,
    *,
    repeat: int = 3,
    report: PeerReport | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PeerReport:
    """One process with an empty cache folder, then `repeat` processes that find it filled."""
    report = PeerReport() if report is None else report
    counter = ProgressCounter(progress)
    counter.expected = 1 + repeat
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        first = ask(cache)
        kept = sum(f.stat().st_size for f in (cache / "converted").glob("*") if f.is_file())
        report.rows += _first_rows(first, kept)
        counter.advance()
        later = []
        for _ in range(repeat):
            later.append(ask(cache))
            counter.advance()
    report.rows += _later_rows(later)
    return report


def _first_rows(first: dict[str, Any], kept: int) -> list[Row]:
    extra = first["answers"][0] - first["answers"][1]
    rows = [
        Row("imports of libraries", "s", first["imports"]),
        Row("LLM(), first load", "s", first["load"], bound=Bound(15.0, of="value")),
        Row("weights kept on disk", "MB", kept / 1e6),
        Row(
            "first answer after the second, no cost curve",
            "s",
            extra,
            bound=Bound(0.5, of="value"),
            raw={"answers": first["answers"]},
        ),
    ]
    if first["size"]:
        rows.append(
            Row(
                "anonymous memory of the first load at its peak",
                "MB",
                first["growth"] / 1e6,
                first["size"] / 1e6,
                Bound(1.3),
                other="after it",
            )
        )
    return rows


def _later_rows(later: Sequence[dict[str, Any]]) -> list[Row]:
    loads = [one["load"] for one in later]
    answers = [one["answers"] for one in later]
    ratio = median(first / second for first, second in answers)
    second = median(second for _, second in answers)
    return [
        Row("LLM(), later", "s", median(loads), bound=Bound(2.0, of="value"), raw={"load": loads}),
        Row(
            "first answer, cost curve on disk",
            "s",
            ratio * second,
            second,
            Bound(1.15),
            other="second answer",
            raw={"first": [a for a, _ in answers], "second": [b for _, b in answers]},
        ),
    ]


# --- the process ------------------------------------------------------------------------------------


def anonymous() -> int:
    """Bytes of anonymous memory that this process has in RAM; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


class PeakMemory:
    """The largest growth of anonymous memory while a block runs; the block's KV cache counts only
    as far as it is written.
    """

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = anonymous()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._end.wait(SAMPLED):
            self._peak = max(self._peak, anonymous())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._peak = max(self._peak, anonymous())

    @property
    def growth(self) -> int:
        return self._peak - self._start


def main(arguments: Sequence[str]) -> None:
    """Loads a model and answers one prompt twice; prints seconds and bytes as JSON.

    The second answer finds neither the prefix nor the drafter memory of the first. Libraries are
    imported before the model is loaded: they take the same time whatever the model is.
    """
    start = clock.now()
    import gguf  # noqa: F401
    import tokenizers  # noqa: F401

    import outstride.models.converted  # noqa: F401
    from outstride import LLM, SamplingParams

    imports = clock.now() - start
    path, weights, method, output = arguments
    before = anonymous()
    with PeakMemory() as memory:
        start = clock.now()
        llm = LLM(path, weights=weights)
        load = clock.now() - start
    size, answers = anonymous() - before, []
    with llm:
        for salt in ("first", "second"):
            params = SamplingParams(max_tokens=int(output), ignore_eos=True)
            start = clock.now()
            [result] = llm.chat(PROMPT, params, method=method, salt=salt)
            answers.append(clock.now() - start)
            if result.error is not None:
                raise result.error
    memory_used = {"growth": max(memory.growth, size), "size": size}
    print(json.dumps({"imports": imports, "load": load, "answers": answers, **memory_used}))


if __name__ == "__main__":
    main(sys.argv[1:])
