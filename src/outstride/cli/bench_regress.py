"""`outstride bench regress`: compares two results and finds regressions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from outstride.cli import screen
from outstride.cli.context import Context


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = kinds.add_parser(
        "regress",
        help="compare two results; exits with 1 if a figure is worse",
        description="Compares two result files, or two folders of them. Counts (tokens per pass, equal "
        "and correct answers) may not drop at all; tokens per pass of decode counts as exact if both "
        "runs had the same frozen cost curve (--cost). Ratios of times within one run may drop by "
        "the tolerance. Times themselves are not compared.",
        allow_abbrev=False,
    )
    parser.add_argument("old", metavar="OLD", type=Path, help="a result file, or a folder of them")
    parser.add_argument("new", metavar="NEW", type=Path, help="of the same kind")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.05,
        metavar="X",
        help="share that a ratio may lose (default 0.05)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object and nothing else")
    parser.set_defaults(action=run)


def run(args: argparse.Namespace, context: Context) -> int:
    """Compares."""
    import json

    from outstride.bench.regress import compare_paths

    del context
    report = compare_paths(args.old, args.new, args.tolerance)
    if args.json:
        print(json.dumps({**report.summary(), "figures": report.samples()}), flush=True)
        return int(bool(report.worse))
    console = screen.console()
    for change in report.worse:
        bound = "exact" if change.exact else f"tolerance {args.tolerance:.0%}"
        console.print(f"worse: {change} ({bound})", style="red", markup=False, soft_wrap=True)
    console.print(f"{len(report.changes)} figures compared, {len(report.worse)} worse")
    return int(bool(report.worse))
