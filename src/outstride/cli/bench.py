"""`outstride bench …`: benchmarks, printed as tables and one JSON object."""

from __future__ import annotations

import argparse
from typing import Any

from outstride.cli import (
    bench_all,
    bench_checks,
    bench_decode,
    bench_peers,
    bench_quality,
    bench_regress,
    bench_start,
    bench_step,
    load,
    parallel,
)

KINDS = (
    bench_step,
    bench_decode,
    bench_peers,
    bench_start,
    load,
    parallel,
    bench_quality,
    bench_checks,
    bench_all,
    bench_regress,
)
"""In the order of the help."""


def add(commands: Any) -> None:
    """Adds the command and its subcommands."""
    parser = commands.add_parser(
        "bench", help="benchmarks", description="Benchmarks.", allow_abbrev=False
    )
    parser.set_defaults(action=lambda _args, _context: _choose(parser))
    kinds = parser.add_subparsers(metavar="WHAT", dest="what")
    for kind in KINDS:
        kind.add(kinds)


def _choose(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2
