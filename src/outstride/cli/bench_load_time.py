"""`outstride bench load`: seconds and memory of the first start of a model and of later ones."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from outstride.cli import screen
from outstride.cli.context import Context, add_model_options
from outstride.cli.outcome import close, output

if TYPE_CHECKING:
    from outstride.bench.load_time import LoadReport


def add(kinds: Any) -> None:
    """Adds the command."""
    load = kinds.add_parser(
        "load",
        help="how long a model takes to load, and how much memory",
        description="Loads a model with an empty cache directory, which converts its weights, and "
        "then from what that start kept, each time in a new process. The last line is one JSON object.",
        allow_abbrev=False,
    )
    add_model_options(load)
    load.add_argument(
        "--later",
        type=int,
        default=2,
        metavar="N",
        help="starts after the first (default 2; the median counts)",
    )
    output(load)
    load.set_defaults(action=run)


def run(args: argparse.Namespace, _: Context) -> int:
    """Measures the starts."""
    from outstride.bench import load_time
    from outstride.bench.result import BenchResult

    settings = {
        "model": args.model,
        "device": args.device,
        "weights": args.weights,
        "later": args.later,
    }
    result = BenchResult("load", settings)
    report = load_time.measure(args.model, args.device, args.weights, max(1, args.later))
    result.finish(report.samples(), report.summary())
    if not args.json:
        _print(report, args.model)
    return close(result, args)


def _print(report: LoadReport, model: str) -> None:
    first = report.first
    screen.console().print(
        f"[bold]{model}, {first.device}, weights {first.weights}[/bold]\n"
        f"first start    {first.seconds:.2f} s ({first.cpu_seconds:.1f} s of CPU time), "
        f"{report.kept_bytes / 1e6:,.0f} MB kept\n"
        f"later starts   {report.later_seconds:.2f} s\n"
        f"memory         {first.peak_bytes / 1e6:,.0f} MB at most during the first start, "
        f"{first.final_bytes / 1e6:,.0f} MB after it: {first.memory_ratio:.2f} x\n"
    )
