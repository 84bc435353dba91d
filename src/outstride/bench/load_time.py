"""How long a model takes to load, and how much memory, at its first start and at later ones.

Every start is a process of its own. The first finds an empty cache directory and converts the weights;
later ones read what it kept. Memory is anonymous memory (`new_process.anonymous`), which the
system cannot give back as it can the pages of a mapped file; a thread samples it. The KV cache has few
pages, so that it hardly counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outstride.bench.new_process import PeakMemory, anonymous
from outstride.errors import OutstrideError
from outstride.models.fetch import cache_dir

_PAGES = 64


@dataclass(frozen=True, slots=True)
class StartSample:
    """One start. Bytes are growth since the libraries were imported."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    final_bytes: int
    weights: str
    device: str

    @property
    def memory_ratio(self) -> float:
        """Peak against final memory."""
        return self.peak_bytes / max(self.final_bytes, 1)


@dataclass(slots=True)
class LoadReport:
    """The first start and later ones."""

    first: StartSample
    later: list[StartSample] = field(default_factory=list)
    kept_bytes: int = 0
    """Bytes that the first start wrote to the cache directory."""

    @property
    def later_seconds(self) -> float:
        """The median of the later starts."""
        times = sorted(sample.seconds for sample in self.later)
        return times[len(times) // 2]

    def summary(self) -> dict[str, Any]:
        return {
            "first_seconds": round(self.first.seconds, 3),
            "later_seconds": round(self.later_seconds, 3),
            "first_cpu_seconds": round(self.first.cpu_seconds, 3),
            "peak_bytes": self.first.peak_bytes,
            "final_bytes": self.first.final_bytes,
            "memory_ratio": round(self.first.memory_ratio, 3),
            "kept_bytes": self.kept_bytes,
            "weights": self.first.weights,
            "device": self.first.device,
        }

    def samples(self) -> list[dict[str, Any]]:
        return [
            {"start": "first" if number == 0 else "later", **asdict(sample)}
            for number, sample in enumerate([self.first, *self.later])
        ]


def measure(model: str, device: str, weights: str, later: int = 2) -> LoadReport:
    """Loads a model once with an empty cache directory, then `later` times with what it kept."""
    with tempfile.TemporaryDirectory(dir=cache_dir() if cache_dir().is_dir() else None) as folder:
        cache = Path(folder)
        if (models := cache_dir() / "models").is_dir():
            (cache / "models").symlink_to(models.resolve())
        first = _start(model, device, weights, cache)
        report = LoadReport(first)
        report.kept_bytes = sum(f.stat().st_size for f in (cache / "converted").glob("*"))
        report.later = [_start(model, device, weights, cache) for _ in range(later)]
    return report


def _start(model: str, device: str, weights: str, cache: Path) -> StartSample:
    """Loads a model in a process of its own."""
    command = [sys.executable, "-m", "outstride.bench.load_time", model, device, weights]
    done = subprocess.run(
        command,
        env={**os.environ, "OUTSTRIDE_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise OutstrideError(f"{model} could not be loaded; the error is above")
    return StartSample(**json.loads(done.stdout.splitlines()[-1]))


def start(model: str, device: str, weights: str) -> StartSample:
    """Loads a model in this process and measures it; libraries are imported before."""
    import gguf  # noqa: F401
    import tokenizers  # noqa: F401

    import outstride.models.converted  # noqa: F401
    from outstride import LLM

    before = anonymous()
    with PeakMemory() as memory:
        began, cpu = time.perf_counter(), time.process_time()
        llm = LLM(model, device=device, weights=weights, pages=_PAGES)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    with llm:
        final = anonymous() - before
        return StartSample(seconds, cpu, max(memory.growth, final), final, llm.weights, llm.device)


if __name__ == "__main__":
    print(json.dumps(asdict(start(*sys.argv[1:4]))))
