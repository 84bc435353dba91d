"""The report of a server under load: rounds of closed-loop clients, arrivals, ITL, a soak test, a
kill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outstride.bench.arrivals import ArrivalReport
from outstride.bench.serve import LoadResult


@dataclass(slots=True)
class ServeReport:
    """All measurements that were requested, as far as they are done."""

    url: str
    against: str | None
    arrivals: ArrivalReport
    loads: dict[str, list[LoadResult]] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    itl: dict[str, Any] | None = None
    soak: dict[str, Any] | None = None
    kill: dict[str, Any] | None = None

    def enter(self, url: str, number: int, load: LoadResult) -> None:
        """Adds one round of closed-loop clients."""
        self.loads.setdefault(url, []).append(load)
        self.rounds.append({"what": "load", "server": url, "round": number, **load.to_dict()})

    @property
    def rates(self) -> dict[str, float]:
        """The best tokens per second of each server."""
        return {url: max(load.rate for load in loads) for url, loads in self.loads.items()}

    @property
    def went_wrong(self) -> bool:
        failed = sum(sample["failed"] for sample in self.rounds)
        kill = self.kill or {"silent": 0, "serves_again": True}
        lost = kill["silent"] or not kill["serves_again"]
        return bool(failed or (self.soak or {}).get("wrong") or lost)

    def samples(self) -> list[dict[str, Any]]:
        arrivals = ({"what": "arrival", **sample} for sample in self.arrivals.samples())
        return [*self.rounds, *arrivals]

    def summary(self) -> dict[str, Any]:
        rates = self.rates
        summary: dict[str, Any] = {
            "tokens_per_second": {url: round(rate, 1) for url, rate in rates.items()},
            "cpu_outside_steps": self.rounds[0]["cpu_outside_steps"] if self.rounds else None,
            "failed": sum(sample["failed"] for sample in self.rounds),
        }
        if self.against in rates and self.url in rates:
            summary["ratio"] = round(rates[self.url] / rates[self.against], 2)
        if self.arrivals.arrivals:
            summary["arrivals"] = self.arrivals.summary()
        if self.itl is not None:
            summary["itl"] = self.itl
        if self.soak is not None:
            summary["soak"] = self.soak
        if self.kill is not None:
            summary["kill"] = self.kill
        return summary
